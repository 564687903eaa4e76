"""The numbers that an adapter starts from: a function of the run's seed and the names of its modules alone, so that one
process, copies and shards of any number begin alike."""

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from framework.build.optimizers.seeds import mixed
from framework.build.place import Place
from framework.schema.adapters import ADAPTERS
from framework.schema.choices import LoraInit
from framework.schema.peft import PeftParams


@contextmanager
def drawn_for(name: str, seed: int, place: Place) -> Iterator[None]:
    """Within the block random numbers are those of `name`; what is drawn after it is as without the block."""
    devices = [place.device] if place.kind == "cuda" and not place.rehearsed else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(mixed(seed, 0, zlib.crc32(name.encode())))
        yield


def start_word(params: PeftParams) -> str | bool:
    """peft's word for how LoRA's A matrices are drawn; those of EVA are found later, when there are rows."""
    is_gaussian = "lora_init" in ADAPTERS[params.peft_method].keys and params.lora_init is LoraInit.GAUSSIAN
    return "gaussian" if is_gaussian else True


def start_layers(layers: Iterable[tuple[str, nn.Module]], seed: int, place: Place, params: PeftParams) -> None:
    """Draw what peft's layers start from that have values of their own. The names are those in the base model."""
    word = start_word(params)
    for name, module in layers:
        if isinstance(module, LoraLayer):
            with drawn_for(name, seed, place), torch.no_grad():
                module.reset_lora_parameters("default", word)
        elif isinstance(module, IA3Layer):
            with torch.no_grad():  # to ones
                module.reset_ia3_parameters("default")
