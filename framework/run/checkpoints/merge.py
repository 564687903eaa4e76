"""`tunesmith merge`: write a trained adapter and its base as one plain Hugging Face folder."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers

from framework.build.adapters.merge import merge
from framework.build.adapters.quantize import quantized_kinds
from framework.build.loading.bases import weights_digest
from framework.build.model.heads import answers_for_rows
from framework.errors import Problem, RequestError
from framework.run.checkpoints.checkpoint import written_aside
from framework.run.checkpoints.export import write_model
from framework.run.checkpoints.saved_model import ADAPTER_WEIGHTS, PROMPTS, find_saved_model
from framework.run.checkpoints.trained_model import load_base, with_adapter
from framework.run.record.layout import MERGED, MERGED_FROM
from framework.run.record.run_folder import make_writable


@dataclass(frozen=True)
class Merged:
    """Folder and dtype of the merged model, the quantization that was undone (empty: none), and the transformers class
    that loads it."""

    folder: Path
    dtype: str
    dequantized: str
    loader: str


def merge_run(source: Path, output: Path | None = None, trusts_code: bool = False, allow: Sequence[str] = ()) -> Merged:
    """Merge a run's adapter into its base and write the model to `output` (default: `merged/` in `source`).

    `source` is a run folder, or a folder with an adapter whose base can be loaded by its name. The weights get the
    dtype that the run would export. Code of the base runs only with `trusts_code`. `allow` may name `model.base`, to
    accept a changed base. Raises RequestError if there is no adapter to merge, describing what the folder holds.
    """
    transformers.utils.logging.disable_progress_bar()  # it would be written into pipes too
    target = output if output is not None else source / MERGED
    saved_model = find_saved_model(source, trusts_code, allow)
    folder, kind = saved_model.folder, saved_model.adapter_kind
    if kind is None:
        raise RequestError([Problem("RUN", f"{folder} is a plain model already: there is no adapter to merge")])
    if kind in PROMPTS:
        message = f"{folder} holds tokens before the row ({kind}): there is nothing to add to the weights"
        raise RequestError([Problem("RUN", message, expected="the adapter as it is, with its base")])
    if target.exists():
        raise RequestError([Problem("--output", f"{target} already exists", expected="a new folder")])
    make_writable(target.parent, "--output", target)  # before any weight is loaded
    base, dtype = load_base(saved_model)
    kinds = ", ".join(quantized_kinds(base))
    loader = "AutoModelForSequenceClassification" if answers_for_rows(base) else "AutoModelForCausalLM"
    adapted = with_adapter(base, saved_model)
    with written_aside(target) as aside:
        write_model(merge(adapted, dtype), aside, dtype)
        merged_from = {"adapter": weights_digest([saved_model.folder / ADAPTER_WEIGHTS])}
        (aside / MERGED_FROM).write_text(json.dumps(merged_from) + "\n")
        if (saved_model.folder / "tokenizer_config.json").exists():
            saved_model.tokenizer.save_pretrained(aside)
    return Merged(target, str(dtype).removeprefix("torch."), kinds, loader)
