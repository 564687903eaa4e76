"""GGUF files: transformers reads the same model out of them; what llama.cpp would read as another is refused."""

import json
import os
import sys
import types

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from framework.build.loading.bases import weights_digest
from framework.cli import main
from framework.errors import RequestError, SaveFailed
from framework.run import gguf
from framework.run.gguf import SPLITS, GgufKind, export_gguf, read_vocabulary
from tests.grids import thinned
from tests.tiny import GPT2, LLAMA

QWEN = {"hidden_size": 64, "head_dim": 16, "vocab_size": 300, "tie_word_embeddings": False}
SHAPES = {
    "llama": {**LLAMA, "hidden_size": 64, "vocab_size": 300},
    "tied": {**LLAMA, "hidden_size": 64, "vocab_size": 300, "tie_word_embeddings": True},
    "qwen2": {**LLAMA, **QWEN, "model_type": "qwen2", "head_dim": None},
    "qwen3": {**LLAMA, **QWEN, "model_type": "qwen3", "head_dim": 128},  # transformers reads no other from GGUF
}


def make(folder, architecture, tokenizer=None):
    """A random model of an architecture, saved with a byte-level tokenizer of 256 tokens and an end token."""
    torch.manual_seed(0)
    shape = {key: value for key, value in architecture.items() if value is not None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    if tokenizer is None:
        alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "ab": 256}, merges=[("a", "b")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(folder)
    return model.eval()


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA_3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCHED = [("llama", YARN), ("qwen2", YARN), ("qwen3", LINEAR), ("llama", LINEAR), ("llama", LLAMA_3)]


@pytest.mark.parametrize(("name", "rope"), [*((name, None) for name in SHAPES), *STRETCHED])
def test_llama_cpp_finds_the_same_logits(tmp_path, name, rope):
    """llama.cpp itself, in the package cyllama: the last of 200 tokens, beyond the positions that were trained on."""
    pytest.importorskip("gguf")
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    shape = {**SHAPES[name], "max_position_embeddings": 256}
    model = make(tmp_path / "m", {**shape, "rope_parameters": rope} if rope else shape)
    made, ids = export_gguf(tmp_path / "m", GgufKind.F16), [number * 7 % 250 for number in range(200)]
    llama_cpp.disable_logging()
    llama_cpp.ggml_backend_load_all()
    of_model, of_context = llama_cpp.LlamaModelParams(), llama_cpp.LlamaContextParams()
    of_model.n_gpu_layers, of_context.n_ctx, of_context.n_threads = 0, 256, 1
    loaded = type("Model", (llama_cpp.LlamaModel,), {"n_vocab": 300})(str(made.file), of_model)
    context = llama_cpp.LlamaContext(loaded, of_context)
    context.decode(llama_cpp.llama_batch_get_one(ids))
    found = torch.tensor([*context.get_logits_ith(-1)])
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1]
    assert (found - expected).norm() < 3e-3 * expected.norm()


@pytest.mark.parametrize(("rope", "expected"), [(YARN, ["yarn", 4.0, 64]), (LINEAR, ["linear", 4.0, None])])
def test_stretched_positions_are_written(tmp_path, rope, expected):
    gguf = pytest.importorskip("gguf")
    make(tmp_path / "m", {**SHAPES["qwen2"], "rope_parameters": rope})
    fields = gguf.GGUFReader(export_gguf(tmp_path / "m", GgufKind.F16).file).fields
    found = [fields.get(f"qwen2.rope.scaling.{name}") for name in ("type", "factor", "original_context_length")]
    assert [field and field.contents() for field in found] == expected


@pytest.mark.parametrize(("name", "kind"), thinned(list(SHAPES), list(GgufKind)))
def test_the_file_is_the_same_model(tmp_path, name, kind):
    gguf = pytest.importorskip("gguf")
    model = make(tmp_path / "m", SHAPES[name])
    made = export_gguf(tmp_path / "m", kind)
    read = AutoModelForCausalLM.from_pretrained(made.file.parent, gguf_file=made.file.name, dtype=torch.float32).eval()
    ids = torch.arange(40)[None] * 7 % 300
    with torch.no_grad():
        expected, found = model(ids).logits, read(ids).logits
    off = (found - expected).norm() / expected.norm()
    assert off < (1e-3 if kind is GgufKind.F16 else 2e-2)
    assert off > 0
    weights = sum(name != "lm_head.weight" or not model.config.tie_word_embeddings for name in model.state_dict())
    assert sum(made.kinds.values()) == weights
    assert set(made.kinds) == {"F32", "F16" if kind is GgufKind.F16 else "Q8_0"}
    fields = gguf.GGUFReader(made.file).fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.tokens"].contents()[256:259] == ["ab", "<|end|>", "[PAD258]"]
    assert fields["tokenizer.ggml.token_type"].contents()[256:259] == [1, 3, 5]
    assert fields["tokenizer.ggml.merges"].contents() == ["a b"]
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 257
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert made.modelfile.read_text().splitlines()[:1] == [f"FROM ./{made.file.name}"]
    assert 'PARAMETER stop "<|end|>"' in made.modelfile.read_text()


def test_the_positions_of_llama_3_are_those_of_transformers():
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = AutoConfig.for_model(**{**LLAMA, "hidden_size": 256})
    config.rope_parameters = {**rope, "original_max_position_embeddings": 8192}
    plain = 5e5 ** -(np.arange(0, 64, 2) / 64)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert plain / gguf._rope_factors(config) == pytest.approx(stretched.numpy(), rel=1e-5)


def test_a_tensor_that_does_not_read_back_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    make(tmp_path / "m", SHAPES["llama"])
    monkeypatch.setattr(gguf, "_rounding", lambda values, held: np.full_like(values, -1.0))
    with pytest.raises(SaveFailed, match="does not read back"):
        export_gguf(tmp_path / "m", GgufKind.F16)
    assert [*(tmp_path / "m" / "gguf").iterdir()] == []


@pytest.fixture
def stand_in(monkeypatch):
    """Refusals come before the package is used."""
    monkeypatch.setitem(sys.modules, "gguf", types.ModuleType("gguf"))


@pytest.mark.usefixtures("stand_in")
def test_other_architectures_and_positions_are_named(tmp_path):
    make(tmp_path / "gpt2", GPT2)
    with pytest.raises(RequestError, match="is a gpt2, which is not written as GGUF"):
        export_gguf(tmp_path / "gpt2", GgufKind.F16)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    refused = {
        "llama": (dynamic, "positions of the kind dynamic"),
        "tied": ({**YARN, "beta_fast": 16}, "kind yarn with beta_fast 16"),
        "qwen2": (LLAMA_3, "positions of the kind llama3"),  # llama.cpp has no such tensor there
    }
    for name, (rope, message) in refused.items():
        make(tmp_path / name, {**SHAPES[name], "rope_parameters": rope})
        with pytest.raises(RequestError, match=message):
            export_gguf(tmp_path / name, GgufKind.F16)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("place", ["final", "."])
def test_a_merged_model_of_another_adapter_is_refused_whenever_it_was_written(tmp_path, place):
    make(tmp_path / "merged", SHAPES["llama"])
    (tmp_path / place).mkdir(exist_ok=True)
    adapter, merged_from = tmp_path / place / "adapter_model.safetensors", tmp_path / "merged" / "merged_from.json"
    save_file({"a": torch.ones(3)}, adapter)
    with pytest.raises(RequestError, match="was not merged from"):
        export_gguf(tmp_path, GgufKind.F16)
    merged_from.write_text(json.dumps({"adapter": weights_digest([adapter])}))
    later = (tmp_path / "merged" / "model.safetensors").stat().st_mtime + 10
    os.utime(adapter, (later, later))  # as in a copy
    assert gguf._plain(tmp_path) == tmp_path / "merged"
    save_file({"a": torch.zeros(3)}, adapter)
    os.utime(adapter, (later - 100, later - 100))
    with pytest.raises(RequestError, match="was not merged from"):
        export_gguf(tmp_path, GgufKind.F16)


@pytest.mark.usefixtures("stand_in")
def test_a_tokenizer_that_llama_cpp_would_read_as_another_is_refused(tmp_path):
    unigram = Tokenizer(models.Unigram([("a", 0.0), ("b", -1.0)], unk_id=0))
    make(tmp_path / "m", SHAPES["llama"], unigram)
    with pytest.raises(RequestError, match="a tokenizer of the kind Unigram"):
        export_gguf(tmp_path / "m", GgufKind.F16)
    spaces = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    spaces.pre_tokenizer = pre_tokenizers.Whitespace()
    make(tmp_path / "w", SHAPES["llama"], spaces)
    with pytest.raises(RequestError, match="how its tokenizer splits words"):
        export_gguf(tmp_path / "w", GgufKind.F16)


@pytest.mark.parametrize(("pattern", "name"), SPLITS.items())
def test_known_splits_have_the_names_of_llama_cpp(tmp_path, pattern, name):
    from tokenizers import Regex

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    assert read_vocabulary(tmp_path, 4).split == name


def test_the_command(tmp_path, monkeypatch, capsys):
    make(tmp_path / "m", SHAPES["qwen3"])
    assert main(["export", str(tmp_path / "m"), "--gguf", "q4"]) == 2
    assert "f16 or q8_0" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        assert main(["export", str(tmp_path / "m"), "--gguf", "f16"]) == 2
        assert "pip install gguf" in capsys.readouterr().err
    pytest.importorskip("gguf")
    assert main(["export", str(tmp_path / "m"), "--gguf", "f16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tensors"]["F16"] == 16
    assert main(["export", str(tmp_path / "m"), "--gguf", "f16"]) == 2
    assert "already exists" in capsys.readouterr().err
