"""Checkpoints that are complete or absent: written aside, read back, renamed, and only then are older ones retired.

A checkpoint holds the trained state, not the export: weights in the dtype they are trained in, optimizer states, random
states and the step. Tensors are safetensors, the rest is JSON; nothing is pickled.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from framework.build.assembly import Assembly
from framework.build.fingerprints import fixed_fingerprint
from framework.errors import Problem, RequestError, SaveFailed
from framework.memory.explain.causes import Repair
from framework.run.optimizer_state import SEPARATOR, flat_state, restore_state
from framework.run.random_state import parsed, random_state, restore_random_state
from framework.run.trained import trained_state

FORMAT = 1
"""Version of the files in a checkpoint."""

_WEIGHTS, _OPTIMIZER, _RANDOM, _STATE = "model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"

PARTS = "parts"
"""Folder of a checkpoint of sharded weights, into which every rank has written its part."""


def empty_parts(folder: Path) -> str:
    """Make the folder that all ranks write into, beside the checkpoints of a run folder."""
    parts = folder / "checkpoints" / f".{PARTS}"
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    return str(parts)


def tried_parts(parts: Path | Mapping[str, Tensor], assembly: Assembly) -> str:
    """Read back what all ranks have written, and delete it. Raises SaveFailed when it is not what there is."""
    from framework.run.parts import verify_parts  # torch's part of it takes seconds to import

    if isinstance(parts, Path):
        verify_parts(parts, assembly)
        shutil.rmtree(parts)
    return "tried"


@contextlib.contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes `target` in one rename when the block ends well, and vanishes when it does not.

    Raises SaveFailed for any error of the file system; `target` is then as it was.
    """
    aside = target.with_name(f".{target.name}.incomplete")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for file in aside.rglob("*"):
            _flush(file)
        replaced = target.with_name(f".{target.name}.replaced")
        if target.exists():
            target.rename(replaced)
        aside.rename(target)
        _flush(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise SaveFailed(f"{target} could not be written: {error}. Earlier saves are untouched.") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    return sorted((folder / "checkpoints").glob("step-????????"))


def save_checkpoint(
    folder: Path,
    assembly: Assembly,
    step: int,
    keep: int,
    repairs: Sequence[Repair] = (),
    stream: Mapping[str, int] | None = None,
    others: Sequence[str] = (),
    split: Path | Mapping[str, Tensor] | None = None,
    read: Mapping[str, str] | None = None,
) -> Path:
    """Write `checkpoints/step-<step>`, verify it, then delete all but the `keep` newest. Returns its path.

    `others` are the random states of ranks 1, 2, ... as `random_state.dumped` gives them, `split` is of
    sharded weights: the folder into which all ranks have written their parts, which moves into the checkpoint, or all
    weights and states as the first rank has gathered them; `read` are the digests of `read_digests`.

    Raises SaveFailed, leaving every earlier checkpoint in place, when it cannot be written or does not read back.
    """
    target = folder / "checkpoints" / f"step-{step:08d}"
    with written_aside(target) as aside:
        random_tensors, random_numbers = random_state()
        written = {_RANDOM: random_tensors}
        if split is None:
            written[_WEIGHTS] = trained_state(assembly.model)
            written[_OPTIMIZER], numbers = flat_state(assembly)
        else:
            from framework.run.parts import split_state, verify_parts  # torch's part of it takes seconds to import

            _, numbers = split_state(assembly)
            if isinstance(split, Path):
                split.rename(aside / PARTS)
                verify_parts(aside / PARTS, assembly)
            else:
                written[_WEIGHTS] = {name: item for name, item in split.items() if SEPARATOR not in name}
                written[_OPTIMIZER] = {name: item for name, item in split.items() if SEPARATOR in name}
        for name, part in written.items():
            save_file(part, aside / name)
            verify_tensors(aside / name, part)
        state = {"format": FORMAT, "step": step, "optimizer": numbers, "random": random_numbers}
        for rank, text in enumerate(others, 1):
            (aside / _random_of(rank)).write_text(text)
        state["loss_scale"] = assembly.loss_scale.state()
        state["reference"] = fixed_fingerprint(assembly)
        state["stream"] = stream
        state["read"] = dict(read or {})
        state["repairs"] = [repair.to_json() for repair in repairs]
        state["config"] = assembly.config.model_dump(mode="json")
        (aside / _STATE).write_text(json.dumps(state))
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def _random_of(rank: int) -> str:
    return f"random-{rank:05d}.json"


def verify_tensors(file: Path, expected: Mapping[str, Tensor]) -> None:
    """Read the header of `file` back. Raises SaveFailed unless names, shapes and dtypes are those of `expected`."""
    with safe_open(file, framework="pt") as stored:
        names = set(stored.keys())
        wrong = sorted(names ^ set(expected))
        wrong += [name for name in names & set(expected) if tuple(expected[name].shape) != _shape(stored, name)]
    if wrong:
        raise SaveFailed(f"{file} does not read back as it was written: {len(wrong)} tensors differ, first {wrong[0]}")


def _shape(stored: Any, name: str) -> tuple[int, ...]:
    return tuple(stored.get_slice(name).get_shape())


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint. Raises RequestError when it is of another format or damaged."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text())
    except (OSError, ValueError) as error:
        raise RequestError([Problem("--resume", f"{checkpoint} is not a readable checkpoint: {error}")]) from None
    if state.get("format") != FORMAT:
        found = f"{checkpoint} has format {state.get('format')}, this version reads {FORMAT}"
        raise RequestError([Problem("--resume", found)])
    return state


def load_checkpoint(checkpoint: Path, assembly: Assembly) -> int:
    """Put a checkpoint's tensors and random states back in place. Returns its step.

    Raises RequestError when it holds other tensors than the model that was built.
    """
    state = read_state(checkpoint)
    built = fixed_fingerprint(assembly)
    if None not in (built, state.get("reference")) and state["reference"] != built:
        message = f"the model that {checkpoint} was measured against had other weights than the one built now"
        raise RequestError([Problem("--resume", message, expected="the files that the run began with")])
    if assembly.is_in_parts or (checkpoint / PARTS).exists():
        from framework.run.parts import load_parts

        load_parts(checkpoint, assembly, state["optimizer"])
    else:
        _load_whole(checkpoint, assembly, state["optimizer"])
    first_alike = assembly.ranks.rank - assembly.ranks.rank % assembly.ranks.alike  # those alike draw alike
    if first_alike == 0:
        restore_random_state(load_file(checkpoint / _RANDOM), state["random"])
    elif (own := checkpoint / _random_of(first_alike)).exists():  # else there were fewer ranks
        restore_random_state(*parsed(own.read_text()))
    assembly.loss_scale.restore(state.get("loss_scale", {}))
    return int(state["step"])


def _load_whole(checkpoint: Path, assembly: Assembly, numbers: dict[str, Any]) -> None:
    device = str(assembly.place.device)
    expected, stored = trained_state(assembly.model), load_file(checkpoint / _WEIGHTS, device=device)
    different = sorted(set(expected) ^ set(stored)) or [
        name for name in expected if expected[name].shape != stored[name].shape
    ]
    if different:
        message = f"{checkpoint} holds another model: {len(different)} tensors differ, first {different[0]}"
        raise RequestError([Problem("--resume", message)])
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(stored.pop(name))
    restore_state(assembly, load_file(checkpoint / _OPTIMIZER), numbers)
