"""Export of a plain model as one GGUF file for llama.cpp and Ollama, read back after writing."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig

from framework.build.loading.bases import weights_digest
from framework.build.model_folder import weight_files
from framework.compose.trained_folders import read_json
from framework.errors import Problem, RequestError, SaveFailed
from framework.run.checkpoints.saved_model import ADAPTER_WEIGHTS, find_saved_model
from framework.run.record.layout import FINAL, GGUF, MERGED, MERGED_FROM, aside_of, discard, replace_file
from framework.run.record.run_folder import make_writable
from framework.schema.choices import Choice

if TYPE_CHECKING:
    from gguf import GGUFWriter

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""llama.cpp's kinds of tokens."""
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_WORD + r"\p{N}{1,3}" + _REST: "llama-bpe", _WORD + r"\p{N}" + _REST: "qwen2"}
"""A tokenizer's regular expression -> llama.cpp's name for it (its src/llama-vocab.cpp)."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer for GGUF: token `types` as numbered by llama.cpp, its name of the word `split`, special ids."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    split: str
    special: dict[str, int]
    adds_start: bool
    template: str | None


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """Read a folder's tokenizer, padded to the embedding's `size`. Raises RequestError if llama.cpp cannot match it."""
    from transformers import AutoTokenizer

    file = folder / "tokenizer.json"
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    model = document.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise _refused(folder, f"a tokenizer of the kind {model.get('type') or 'without tokenizer.json'}")
    tokens, types = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for text, index in model["vocab"].items():
        tokens[index], types[index] = text, NORMAL
    for added in document.get("added_tokens", ()):
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = ((name, getattr(tokenizer, f"{name}_token_id")) for name in ("bos", "eos", "pad", "unk"))
    special = {name: index for name, index in ids if index is not None}
    starts, split = tokenizer("a")["input_ids"][:1] == [special.get("bos")], _split(folder, document)
    return Vocabulary(tokens, types, merges, split, special, starts, tokenizer.chat_template)


def _split(folder: Path, document: dict[str, Any]) -> str:
    """llama.cpp's name for the tokenizer's word split."""
    before: dict[str, Any] = document.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    if len(steps) == 1 and levels and levels[0].get("use_regex", True) and not levels[0].get("add_prefix_space"):
        return "gpt-2"
    if len(patterns) == 1 and levels and patterns[0] in SPLITS:
        return SPLITS[patterns[0]]
    raise _refused(folder, "how its tokenizer splits words")


def _refused(folder: Path, what: str) -> RequestError:
    message = f"{folder}: {what} is not one that can be written for llama.cpp"
    return RequestError([Problem("RUN", message, expected="a byte-level BPE of Llama 3, Qwen 2 or 3, or GPT-2's")])


class GgufKind(Choice):
    """How a GGUF file holds its matrices; vectors are float32."""

    F16 = "f16"
    Q8_0 = "q8_0"


FAMILIES = ("llama", "qwen2", "qwen3")
"""Supported model types, which have the same names in llama.cpp."""
_ROTATED = "llama"
"""The family whose query and key rows llama.cpp stores in another order."""
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""transformers' tensor names -> llama.cpp's; within a block without the block's number."""
_STRETCHED = frozenset({"factor", "original_max_position_embeddings"})
_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "yarn": _STRETCHED,
    "llama3": _STRETCHED | {"low_freq_factor", "high_freq_factor"},
}
"""Supported kinds of rotary positions, and the keys written for each."""
_ROPE_FIXED = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "partial_rotary_factor": 1}
"""llama.cpp's defaults for values missing from a file (ggml 0.12.0)."""
_BLOCK = 32
"""Numbers that share a scale in Q8_0: rows of another length are stored as float16."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Exported:
    """A GGUF file, its Modelfile, and the number of tensors by type."""

    file: Path
    modelfile: Path
    kinds: dict[str, int]
    bytes: int


def chosen_kind(word: str) -> GgufKind:
    """Look up the kind of that name. Raises RequestError for an unknown one."""
    if word not in [*GgufKind]:
        raise RequestError([Problem("--gguf", f"cannot be {word!r}", expected=" or ".join(GgufKind))])
    return GgufKind(word)


def export_gguf(source: Path, kind: GgufKind, output: Path | None = None) -> Exported:
    """Write the model of a run, or of a folder, as `output` (else `gguf/RUN-KIND.gguf` in `source`) and a Modelfile.

    Raises RequestError for an unsupported model or an existing file, SaveFailed if the file does not read back.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        message = "the package gguf is not installed"
        raise RequestError([Problem("--gguf", message, expected="pip install gguf")]) from None
    folder = _plain(source)
    config = _read_config(folder)
    target = output or source / GGUF / f"{source.absolute().name}-{kind}.gguf"
    if target.exists():
        raise RequestError([Problem("--output", f"{target} already exists", expected="a new file")])
    vocabulary = read_vocabulary(folder, config.vocab_size)
    tensors = [*_tensors(folder, config)]
    make_writable(target.parent, "--output", target)
    aside = aside_of(target)
    try:
        _write(aside, folder, config, vocabulary, tensors, kind)
        kinds = _read_back(aside, tensors, config, kind)
        aside.rename(target)
        modelfile = target.with_name("Modelfile")
        replace_file(modelfile, _modelfile(target, config, vocabulary))
    except OSError as error:
        raise SaveFailed(f"{target} could not be written: {error.strerror or error}") from error
    finally:
        discard(aside)
    return Exported(target, modelfile, kinds, target.stat().st_size)


def _plain(source: Path) -> Path:
    """The folder of the plain model. Raises RequestError for an adapter that is not merged, or has changed since."""
    merged = source / MERGED
    for adapter in (folder / ADAPTER_WEIGHTS for folder in (source / FINAL, source)):
        if merged.is_dir() and adapter.exists():
            merged_from = (read_json(merged / MERGED_FROM) or {}).get("adapter")
            if merged_from != weights_digest([adapter]):
                message = f"{merged} was not merged from {adapter} as it is now"
                expected = f"tunesmith merge {source} again, after removing {merged}"
                raise RequestError([Problem("RUN", message, expected=expected)])
    saved = find_saved_model(merged if merged.is_dir() else source)
    if saved.adapter_kind is not None:
        message = f"{saved.folder} is an adapter, and a GGUF file holds a whole model"
        raise RequestError([Problem("RUN", message, expected=f"tunesmith merge {source}, then this again")])
    return saved.folder


def _read_config(folder: Path) -> PretrainedConfig:
    """The model's config. Raises RequestError for a feature that is not supported."""
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type not in FAMILIES:
        found, expected = f"is a {config.model_type}, which is not written as GGUF", ", ".join(FAMILIES)
    elif config.architectures and not config.architectures[0].endswith("ForCausalLM"):
        found, expected = f"is a {config.architectures[0]}", "a model that generates text"
    elif (unknown := _unknown_positions(config)) is not None:
        found, expected = f"has positions of the kind {unknown[0]}", unknown[1]
    elif getattr(config, "use_sliding_window", False):
        found, expected = "attends within a sliding window", "a model without"
    elif config.hidden_act != "silu":
        found, expected = f"has the activation {config.hidden_act}", "silu"
    else:
        known: PretrainedConfig = config
        return known
    raise RequestError([Problem("RUN", f"{folder} {found}", expected=expected)])


def _unknown_positions(config: Any) -> tuple[str, str] | None:
    """A position setting that llama.cpp would compute differently, and what is supported instead; else None."""
    rope = config.rope_parameters
    kind, known = rope["rope_type"], [*_ROPE_KEYS]
    if config.model_type != _ROTATED:
        known.remove("llama3")  # llama.cpp reads its tensor of factors for Llama only
    if kind not in known:
        return kind, ", ".join(known)
    written = {key: value for key, value in rope.items() if key not in _ROPE_KEYS[kind] and value is not None}
    for key, value in written.items():
        if key not in ("rope_type", "rope_theta", "type") and value != _ROPE_FIXED.get(key):
            return f"{kind} with {key} {value}", f"{kind} without"
    return None


@dataclass(frozen=True)
class _Tensor:
    """A tensor to write: the file that holds it, and its name there."""

    name: str
    file: Path
    key: str
    shape: tuple[int, ...]

    def held_as(self, kind: GgufKind) -> str:
        """GGML's name for the type that it is stored in."""
        if len(self.shape) < 2:
            return "F32"
        return "Q8_0" if kind is GgufKind.Q8_0 and self.shape[-1] % _BLOCK == 0 else "F16"

    def read(self, config: Any) -> Array:
        """Its values, float32, in llama.cpp's order."""
        with safe_open(self.file, framework="pt") as opened:
            tensor: Array = opened.get_tensor(self.key).to(torch.float32).numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        count = heads.get(self.name.split(".")[-2]) if config.model_type == _ROTATED else None
        if count is not None:
            halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        return tensor


def _tensors(folder: Path, config: Any) -> Iterator[_Tensor]:
    """Yield a model's tensors, block by block. Raises RequestError for one without a name in llama.cpp."""
    found, unknown = list[_Tensor](), list[str]()
    for file in weight_files(folder, "RUN"):
        with safe_open(file, framework="pt") as opened:
            keys = opened.keys()
            for key in keys:
                if key == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                name = _name(key)
                shape = tuple(opened.get_slice(key).get_shape())
                found += [_Tensor(name, file, key, shape)] if name is not None else []
                unknown += [key] if name is None else []
    if unknown:
        message = f"{folder} has weights that llama.cpp's {config.model_type} does not have: {', '.join(unknown[:3])}"
        raise RequestError([Problem("RUN", message)])
    yield from sorted(
        found, key=lambda tensor: [int(part) if part.isdigit() else -1 for part in tensor.name.split(".")]
    )


def _name(key: str) -> str | None:
    """llama.cpp's name for a weight; None if it has none."""
    within = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", key)
    if within:
        number, module, part = within.groups()
        return f"blk.{number}.{_NAMES[module]}.{part}" if module in _NAMES else None
    module, _, part = key.rpartition(".")
    return f"{_NAMES[module]}.{part}" if module in _NAMES else None


def _write(
    file: Path, folder: Path, config: Any, vocabulary: Vocabulary, tensors: list[_Tensor], kind: GgufKind
) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
    from gguf.quants import quantize

    writer = GGUFWriter(file, config.model_type, use_temp_file=True)  # otherwise it keeps all tensors in memory
    writer.add_name(folder.absolute().parent.name)
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if kind is GgufKind.F16 else LlamaFileType.MOSTLY_Q8_0)
    _add_shape(writer, config)
    _add_vocabulary(writer, vocabulary)
    _add_positions(writer, config)
    for tensor in tensors:
        held = GGMLQuantizationType[tensor.held_as(kind)]
        writer.add_tensor(tensor.name, quantize(tensor.read(config), held), raw_dtype=held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: "GGUFWriter", config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_positions(writer: "GGUFWriter", config: Any) -> None:
    from gguf import RopeScalingType

    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_factors(config))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_vocabulary(writer: "GGUFWriter", vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_add_bos_token(vocabulary.adds_start)
    for name, index in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(index)
    if vocabulary.template:
        writer.add_chat_template(vocabulary.template)


def _rope_factors(config: Any) -> Array:
    """llama.cpp's divisors of the frequencies for Llama 3's scaled positions, computed as transformers does."""
    rope: dict[str, float] = config.rope_parameters
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head, 2) / head)
    turns = rope["original_max_position_embeddings"] / waves
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors: Array = (1 / ((1 - share) / rope["factor"] + share)).astype(np.float32)
    return factors


def _read_back(file: Path, tensors: list[_Tensor], config: Any, kind: GgufKind) -> dict[str, int]:
    """Compare the file with the model and count tensors by type. Raises SaveFailed for a tensor that differs."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    read = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    counts: dict[str, int] = {}
    for tensor in tensors:
        found, expected = read.get(tensor.name), tensor.read(config)
        values = dequantize(found.data, found.tensor_type).reshape(expected.shape) if found is not None else None
        if values is None or not np.all(np.abs(values - expected) <= _rounding(expected, tensor.held_as(kind))):
            raise SaveFailed(f"{file}: {tensor.name} does not read back as it was written")
        assert found is not None
        counts[found.tensor_type.name] = counts.get(found.tensor_type.name, 0) + 1
    return counts


def _rounding(values: Array, held: str) -> Array:
    """Largest rounding error of each stored value: half a step of its type."""
    if held == "F32":
        return np.zeros_like(values)
    if held == "F16":
        return np.abs(values) * 2.0**-11 + 2.0**-25
    blocks = np.abs(values.reshape(-1, _BLOCK)).max(1, keepdims=True)
    return np.broadcast_to(blocks / 127 * 0.51 + blocks * 2.0**-10, (len(blocks), _BLOCK)).reshape(values.shape)


def _modelfile(file: Path, config: Any, vocabulary: Vocabulary) -> str:
    """The Modelfile for `ollama create`, which recognizes most chat templates from the GGUF file."""
    lines = [f"FROM ./{file.name}", f"PARAMETER num_ctx {config.max_position_embeddings}"]
    if "eos" in vocabulary.special:
        lines.append(f"PARAMETER stop {json.dumps(vocabulary.tokens[vocabulary.special['eos']])}")
    if vocabulary.template is None:
        lines.append('TEMPLATE "{{ .Prompt }}"')
    return "\n".join(lines) + "\n"
