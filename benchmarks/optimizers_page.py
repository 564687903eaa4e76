"""Writer of docs/optimizers.md: bytes of state per parameter, counted on built optimizers after one step.

python benchmarks/optimizers_page.py
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from framework.build.assembly import assemble
from framework.build.loading.model import read_architecture
from framework.build.optimizers.low_bit import LOW_BIT, RehearsedLowBit, is_managed, parts_of
from framework.build.place import real_place
from framework.installation import shipped
from framework.memory.resolve import resolve
from framework.run.rehearsal.footprint import state_tensors
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import FACTS, Optimizer

PAGE = Path(__file__).parents[1] / "docs" / "optimizers.md"
EIGHTH = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 1968,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
"""An eighth of Llama-3.2-1B's width with as large a share of embeddings: its matrices have the same proportions."""
ONE_B = yaml.safe_load((shipped("conf") / "model" / "llama3.2_1b.yaml").read_text())["model"]["architecture"]
RANK = 16
"""The rank with the proportion to this width that 128, the default, has to the width of the 1B."""


@dataclass(frozen=True)
class Row:
    """One line of the table: an optimizer with the settings that change its states, and a remark."""

    optimizer: Optimizer
    said: str
    note: str = ""
    settings: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        settings = [f"`{key}: {value}`" for key, value in self.settings if key != "projection_rank"]
        return " with ".join([f"`{self.optimizer}`", *settings])


_RANKED = (("projection_rank", RANK),)
ROWS = (
    Row(Optimizer.ADAMW_TORCH, "8", "two moments in the weights' dtype: 8 only of float32 weights"),
    Row(Optimizer.ADAMW_TORCH_FUSED, "8", "the same states without temporaries as large as the weights"),
    Row(Optimizer.SGD, "0", "no states"),
    Row(Optimizer.SGD, "4", "one, in the weights' dtype", (("sgd_momentum", 0.9),)),
    Row(Optimizer.ADAFACTOR, "4", "a row and a column of each matrix"),
    Row(Optimizer.LION, "4", "one moment in the weights' dtype"),
    Row(Optimizer.SOPHIA, "8", "moment and curvature"),
    Row(Optimizer.MUON, "4", "momentum of matrices; embeddings and norms have AdamW's two"),
    Row(Optimizer.ANYPRECISION_ADAMW, "4", "two bfloat16 moments", (("rounding", "stochastic"),)),
    Row(Optimizer.ANYPRECISION_ADAMW, "6", "and a bfloat16 compensation of bfloat16 weights", (("rounding", "kahan"),)),
    Row(
        Optimizer.ANYPRECISION_ADAMW_8BIT,
        "-",
        "8-bit floats and a float32 scale for 256 of them; weights below 4096 elements keep bfloat16",
    ),
    Row(Optimizer.SCHEDULE_FREE_ADAMW, "8", "second moment and the averaged weights"),
    Row(Optimizer.GALORE_ADAMW, "-", "moments of 1/16 of the rows, and the projection", _RANKED),
    Row(Optimizer.APOLLO_ADAMW, "-", "the same moments; the projection is drawn anew from its seed", _RANKED),
    Row(
        Optimizer.ADAMW_8BIT, "2", "8-bit codes and a float32 scale for 256 of them; weights below 4096 elements keep 8"
    ),
    Row(Optimizer.LION_8BIT, "1", "one state of codes"),
    Row(Optimizer.PAGED_ADAMW_32BIT, "8", "float32 states of bfloat16 weights too, in managed memory"),
    Row(Optimizer.PAGED_ADAMW_8BIT, "2", "codes in managed memory, scales on the device"),
    Row(Optimizer.PAGED_LION_8BIT, "1", "codes in managed memory, scales on the device"),
    Row(Optimizer.ADAMW_TORCHAO_8BIT, "2", "a scale for 256 codes"),
    Row(Optimizer.ADAMW_TORCHAO_4BIT, "1", "a scale for 128 codes"),
)


def stepped(row: Row, dtype: str) -> tuple[Iterable[Tensor], list[Tensor]]:
    """(trained parameters, states) of a model with this optimizer after one step on the CPU."""
    any_precision = FACTS[row.optimizer].keeps_small_updates
    written = None if any_precision and dtype == "float32" else dtype
    model = {"architecture": EIGHTH, "load_pretrained_weights": False, "torch_dtype_str": written}
    training = {"optimizer": str(row.optimizer), **dict(row.settings)}
    config = resolve(TrainingConfig.model_validate({"training": training, "model": model, "gpu": {"name": "cpu"}}))
    torch.manual_seed(0)
    assembly = assemble(config, read_architecture(config), real_place(torch.device("cpu")), 1)
    ids = torch.arange(16)[None]
    train_step(assembly, [{"input_ids": ids, "labels": ids.clone()}], 1)
    return assembly.trained, state_tensors(assembly)


def stood_in(row: Row, dtype: str, architecture: Mapping[str, Any]) -> tuple[Iterable[Tensor], list[Tensor]]:
    """The same for an optimizer with quantized or paged states, using its stand-in of a rehearsal, which needs neither
    package nor card. The tests of the stand-ins compare them with the classes of bitsandbytes and torchao."""
    with torch.device("meta"):
        settings = AutoConfig.for_model(**architecture)
        model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype))
    trained = list(model.parameters())
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer = RehearsedLowBit(trained, 1e-4, LOW_BIT[row.optimizer])
    optimizer.step()
    states = [tensor for state in optimizer.state.values() for value in state.values() for _, tensor in parts_of(value)]
    return trained, states


def bytes_of(trained: Iterable[Tensor], states: Iterable[Tensor]) -> tuple[float, float]:
    """Bytes of state per trained parameter: on the device, and in managed memory.

    Step counts are left out, and a table of codes that all parameters share is counted once.
    """
    count = sum(parameter.numel() for parameter in trained)
    sizes = {True: 0, False: 0}
    for tensor in {id(tensor): tensor for tensor in states}.values():
        if tensor.dim():
            sizes[is_managed(tensor)] += tensor.numel() * tensor.element_size()
    return sizes[False] / count, sizes[True] / count


def measured(row: Row, dtype: str) -> tuple[float, float]:
    """`bytes_of` the row's optimizer for weights of this dtype."""
    return bytes_of(*(stood_in(row, dtype, ONE_B) if row.optimizer in LOW_BIT else stepped(row, dtype)))


def line(row: Row) -> str:
    """The table's row of an optimizer that is built here."""
    half = measured(row, "bfloat16")
    cells = f"| {row.name} | {_sum(*half)} | {4 + sum(half):.2f} "
    if FACTS[row.optimizer].keeps_small_updates:
        return f"{cells}| - | - | {row.said} | {row.note} |"
    full = measured(row, "float32")
    return f"{cells}| {_sum(*full)} | {8 + sum(full):.2f} | {row.said} | {row.note} |"


def _sum(device: float, managed: float) -> str:
    return f"{device:.2f} + {managed:.2f} paged" if managed else f"{device:.2f}"


HEAD = """# Optimizers: bytes a parameter

Written by `python benchmarks/optimizers_page.py`; a test holds it to the built optimizers. States were counted after
one step: of bitsandbytes and torchao over the shape of Llama-3.2-1B, of all others over an eighth of its width with the
same proportions, where 21 % of the weights are embeddings. Bytes are per trained parameter.

- **pure**: weight 2 + gradient 2 + states, with `model.torch_dtype_str: bfloat16`.
- **masters**: weight 4 + gradient 4 + states, with float32 weights. Autocast to bf16 or fp16 adds a copy of 2 while a
  forward pass lasts: so AdamW comes to the 18 that is often quoted.
- **paged** states are in managed memory: torch's counters do not see them, the card holds them while it has room.
- **published**: what the usual tables say of states (guides to memory, manuals of bitsandbytes and torchao).
- `training.optimizer_in_backward` takes the gradients (2 or 4) away, but for one weight's. `training.optimizer_offload`
  takes the states off the device, unless they are codes or paged.
- `muon`, `galore_adamw` and `apollo_adamw` are for two-dimensional weights inside the blocks, the last two for those
  whose smaller side is above `projection_rank`; AdamW has the others, experts stacked in one tensor among them. The
  table at the start of a run says how much is whose; where nothing is theirs, as with LoRA of rank 16 under the default
  `projection_rank` of 128, the recipe is refused.

| optimizer | states, bf16 | pure | states, fp32 | masters | published | what is kept |
| --- | ---: | ---: | ---: | ---: | ---: | --- |
"""

TAIL = """
## Where published tables are wrong

- **AdamW is not always 8.** torch keeps moments in the weights' dtype: 4 bytes for bfloat16 weights, whose updates then
  round away: a model of 57 million weights after 1,000 steps on Python's sources (`rounding_h200.json`, one H200,
  2026-11-28) has a held-out loss of 3.6065 with float32 masters, 4.1888 in plain bfloat16 (+16.1 %), 3.6060 with
  stochastic rounding (-0.01 %) and 3.6079 with Kahan summation (+0.04 %). Only bitsandbytes keeps float32 moments of
  bfloat16 weights.
- **Adafactor is not 4 but nearly nothing.** Its second moment is a row and a column of each matrix, 0.02 bytes at this
  width and 0.003 at that of the 1B; its first moment, which would be 4, is off by default.
- **Lion is 4 only of float32 weights**, 2 of bfloat16 ones.
- **AnyPrecisionAdamW: 8 in all is right for stochastic rounding.** Kahan's compensation makes it 10.
- **8-bit AdamW is 2.03, not 2**: the scales. The embedding is coded here as every other weight is; the Trainer of
  transformers keeps its states in 32 bits, which makes it 3.3 for the 1B (docs/evidence/speed.md).
- **Paged is a place, not a size.** `paged_adamw_32bit` of bfloat16 weights has twice the states of `adamw_torch_fused`.
"""


def page() -> str:
    """The whole page, from optimizers built here."""
    return HEAD + "\n".join(line(row) for row in ROWS) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
