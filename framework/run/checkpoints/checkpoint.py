"""Atomic checkpoints: written under a temporary name, read back, renamed, and only then are older ones deleted.

A checkpoint holds the training state, not the export: weights in the dtype of training, optimizer states, random states
and the step. Tensors are safetensors, the rest is JSON; nothing is pickled.
"""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from framework.build.assembly import Assembly
from framework.build.loading.bases import BASE
from framework.build.ranks import Ranks
from framework.build.verify.frozen_models import fixed_fingerprint
from framework.errors import Problem, RequestError, SaveFailed
from framework.memory.explain.causes import Repair
from framework.run.checkpoints.read_back import count_differing, damage, save_verified
from framework.run.record.layout import (
    PARTS,
    aside_of,
    checkpoint_name,
    checkpoints,
    discard,
    kept_for,
    leftovers,
    others_files,
    step_of,
)
from framework.run.state import (
    SEPARATOR,
    flat_state,
    parsed,
    random_state,
    restore_random_state,
    restore_state,
    trained_state,
)
from framework.schema.choices import StateDictType

FORMAT = 1
"""Version of the checkpoint format."""
_SEAL = "crc32"
_ALWAYS = {"step", "optimizer", "random", "config"}
"""Keys of the state that every version has written."""

_WEIGHTS, _OPTIMIZER, _RANDOM, _STATE = "model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"


def remove_partial_saves(folder: Path) -> None:
    """Delete what a killed run had half written or half deleted."""
    for left in leftovers(folder):
        whole = left.with_name(left.stem.removeprefix("."))
        if left.suffix == ".replaced" and not whole.exists():  # killed between two renames
            left.rename(whole)
        discard(left)


def empty_parts(folder: Path, fallback: Path | None = None) -> str:
    """Create the folder that all ranks write into, next to the run's checkpoints, or in its fallback if that fails.
    Raises SaveFailed."""
    parts = folder / "checkpoints" / f".{PARTS}"
    try:
        discard(parts)
        parts.mkdir(parents=True)
    except OSError as error:
        if fallback is not None:
            return empty_parts(fallback)
        raise SaveFailed(f"{parts} could not be created: {error}. Earlier saves are untouched.") from error
    return str(parts)


def tried_parts(parts: Path, tensors: Mapping[str, Tensor]) -> str:
    """Read back what all ranks have written and delete it. Raises SaveFailed if it differs from `tensors`."""
    from framework.run.checkpoints.sharded import verify_parts  # torch's part of it takes seconds to import

    verify_parts(parts, tensors)
    shutil.rmtree(parts)
    return "tried"


@contextlib.contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `target` when the block succeeds, and deleted when it fails.

    Raises SaveFailed for any file-system error; `target` is unchanged then.
    """
    aside, replaced = aside_of(target), target.with_name(f".{target.name}.replaced")
    try:
        discard(aside)
        aside.mkdir(parents=True)
        yield aside
        readable = aside.stat().st_mode & 0o666  # by the umask; safetensors restricts its files to their owner
        for file in aside.rglob("*"):
            if file.is_file():
                file.chmod(readable)
            _flush(file)
        discard(replaced)
        if os.path.lexists(target):
            target.rename(replaced)
        aside.rename(target)
        _flush(target.parent)
        for path in others_files(replaced, target.name):  # move to the new folder
            if not os.path.lexists(target / path.name):
                path.rename(target / path.name)
        discard(replaced)
    except (OSError, SafetensorError) as error:
        discard(aside)
        raise SaveFailed(f"{target} could not be written: {error}. Earlier saves are untouched.") from error
    except BaseException:
        discard(aside)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Contents:
    """Everything that a checkpoint holds, ready to be written at any time.

    `tensors` are the trained weights and, under names with a SEPARATOR, the optimizer's states; `others` the random
    states of ranks 1, 2, ... as texts of `dumped`; `document` the JSON part. With `is_split` each rank has its part of
    every tensor, and all of them write. `is_separate` means that training changes none of the tensors.
    """

    step: int
    tensors: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    others: Sequence[str]
    document: Mapping[str, Any]
    is_split: bool = False
    is_separate: bool = False


def contents_of(
    assembly: Assembly,
    step: int,
    repairs: Sequence[Repair] = (),
    stream: Mapping[str, Any] | None = None,
    others: Sequence[str] = (),
    read: Mapping[str, Any] | None = None,
) -> Contents:
    """The contents of a checkpoint of the current state. If weights are sharded, every rank must call this.

    `read` are the digests of `read_digests`.
    """
    is_gathered = assembly.config.fsdp.state_dict_type is StateDictType.FULL_STATE_DICT
    if not assembly.is_in_parts:
        states, numbers = flat_state(assembly)
        tensors = {**trained_state(assembly.model), **states}
    else:
        from framework.run.checkpoints.sharded import (  # torch's part of it takes seconds to import
            split_state,
            whole_on_host,
        )

        tensors, numbers = split_state(assembly)
        if is_gathered:
            tensors = whole_on_host(tensors, assembly.ranks.is_main)
    random_tensors, random_numbers = random_state()
    document = {
        "format": FORMAT,
        "step": step,
        "optimizer": numbers,
        "random": random_numbers,
        "loss_scale": assembly.loss_scale.state(),
        "reference": fixed_fingerprint(assembly),
        "stream": stream,
        "read": dict(read or {}),
        "repairs": [repair.to_json() for repair in repairs],
        "config": assembly.config.model_dump(mode="json"),
    }
    is_split, is_separate = assembly.is_in_parts and not is_gathered, assembly.is_in_parts and is_gathered
    return Contents(step, tensors, random_tensors, others, document, is_split, is_separate)


def save_checkpoint(
    folder: Path,
    contents: Contents,
    keep: int,
    parts: Path | None = None,
    say: Callable[[str], None] = print,
    best: int | None = None,
    at_once: bool = False,
) -> Path:
    """Write `checkpoints/step-<step>`, verify it, then delete all but the `keep` newest and the one of step `best`.
    Returns its path.

    `parts` is the folder into which all ranks have written their shards, which moves into the checkpoint. `say`
    receives a warning for an older one that cannot be deleted. With `at_once`, weights and optimizer states are written
    concurrently, both from host memory.

    Raises SaveFailed if it cannot be written or does not read back; every earlier checkpoint is kept then.
    """
    target = folder / "checkpoints" / checkpoint_name(contents.step)
    with written_aside(target) as aside:
        files = {_RANDOM: contents.random}
        if parts is None:
            files[_WEIGHTS] = {name: item for name, item in contents.tensors.items() if SEPARATOR not in name}
            files[_OPTIMIZER] = {name: item for name, item in contents.tensors.items() if SEPARATOR in name}
        else:
            from framework.run.checkpoints.sharded import verify_parts

            parts.rename(aside / PARTS)
            verify_parts(aside / PARTS, contents.tensors)
        with ThreadPoolExecutor(len(files) if at_once else 1) as pool:  # one processor writes one file

            def write(name: str) -> None:
                save_verified(aside / name, {key: tensor.cpu() for key, tensor in files[name].items()})

            list(pool.map(write, files))
        for rank, text in enumerate(contents.others, 1):
            (aside / _random_of(rank)).write_text(text)
        names = sorted(str(file.relative_to(aside)) for file in aside.rglob("*") if file.is_file())
        document = {
            **contents.document,
            "files": names,
            "others": [zlib.crc32(text.encode()) for text in contents.others],
        }
        (aside / _STATE).write_text(_sealed(document))
    retire_older(folder, keep, best, say)
    return target


def retire_older(folder: Path, keep: int, best: int | None, say: Callable[[str], None]) -> None:
    """Delete all checkpoints but the `keep` newest and the one of step `best`; `say` receives a warning for one that
    cannot be deleted."""
    for old in checkpoints(folder)[:-keep]:
        if step_of(old) != best and (reason := _retire(old)):
            say(f"warning   {old} could not be deleted: {reason}")


def _retire(checkpoint: Path) -> str | None:
    """Delete a checkpoint, renaming it first so that a kill leaves no partial one under its name. Returns why that
    failed, else None."""
    aside = checkpoint.with_name(f".{checkpoint.name}.retired")
    try:
        if reason := kept_for(checkpoint):
            return reason
        discard(aside)
        checkpoint.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        left = f"; its remains are in {aside}" if aside.exists() else ""
        return f"{error.strerror or error}{left}"
    return None


def _random_of(rank: int) -> str:
    return f"random-{rank:05d}.json"


def _sealed(document: Mapping[str, Any]) -> str:
    """Write a document as JSON that begins with a checksum of the rest."""
    text = json.dumps(document)
    return f'{{"{_SEAL}": {zlib.crc32(text.encode())}, {text[1:]}'


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read the JSON part of a checkpoint. Raises RequestError if it is damaged or has another format."""
    try:
        text = (checkpoint / _STATE).read_text()
        state: dict[str, Any] = json.loads(text)
    except (OSError, ValueError) as error:
        found = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise _unusable(checkpoint, f"{_STATE} {found}") from None
    if not isinstance(state, dict) or "format" not in state:
        raise _unusable(checkpoint, f"{_STATE} was not written by a run")
    if state["format"] != FORMAT:
        found = f"{checkpoint} has format {state['format']}, this version reads {FORMAT}"
        raise RequestError([Problem("--resume", found)])
    if state.pop(_SEAL, None) is not None and text != _sealed(state):
        raise _unusable(checkpoint, f"{_STATE} has changed since it was written")
    if gone := sorted(_ALWAYS - state.keys()):
        raise _unusable(checkpoint, f"{_STATE} lacks {', '.join(gone)}")
    return state


def _unusable(checkpoint: Path, found: str) -> RequestError:
    older = [each for each in checkpoints(checkpoint.parent.parent) if each.name < checkpoint.name]
    then = f"--resume then continues from {older[-1].name}" if older else "there is no older one to resume from"
    return RequestError([Problem("--resume", f"{checkpoint}/{found}", expected=f"delete {checkpoint}: {then}")])


def verify_checkpoint(checkpoint: Path, state: Mapping[str, Any], ranks: Ranks) -> None:
    """Read every byte of a checkpoint, each rank a share of the files. Raises RequestError if it is damaged."""
    for name in state.get("files", [])[ranks.rank :: ranks.world]:
        file = checkpoint / name
        if file.suffix == ".safetensors":
            found = damage(file)
        elif not file.exists():
            found = "is missing"
        else:
            is_whole = zlib.crc32(file.read_bytes()) in state["others"]
            found = None if is_whole else "has changed since it was written"
        if found:
            raise _unusable(checkpoint, f"{name} {found}")
    ranks.meet()  # no rank loads a checkpoint that another has found damaged


def load_checkpoint(checkpoint: Path, assembly: Assembly, is_other_allowed: bool = False) -> int:
    """Load a checkpoint's tensors and random states. Returns its step. With `is_other_allowed` the reference model may
    have other weights than before.

    Raises RequestError if its tensors are not those of the built model.
    """
    state = read_state(checkpoint)
    verify_checkpoint(checkpoint, state, assembly.ranks)
    built = fixed_fingerprint(assembly)
    if not is_other_allowed and None not in (built, state.get("reference")) and state["reference"] != built:
        message = f"the reference model of {checkpoint} had other weights than the one built now"
        raise RequestError([Problem("--resume", message, expected="the files that the run began with")])
    before = state["read"].get(BASE, {}) if isinstance(state.get("read"), dict) else {}
    if not is_other_allowed and None not in (assembly.drawn, before.get("drawn")) and before["drawn"] != assembly.drawn:
        message = (
            f"the base of {checkpoint} was initialized at random, which gives other weights on this device or version"
        )
        raise RequestError([Problem(BASE, message, expected=f"the machine that the run began on, or --allow {BASE}")])
    if assembly.is_in_parts or (checkpoint / PARTS).exists():
        from framework.run.checkpoints.sharded import load_parts

        load_parts(checkpoint, assembly, state["optimizer"])
    else:
        _load_whole(checkpoint, assembly, state["optimizer"])
    # Ranks with the same rows have the same random states.
    first_of_group = assembly.ranks.rank - assembly.ranks.rank % assembly.ranks.same_rows
    if first_of_group == 0:
        restore_random_state(load_file(checkpoint / _RANDOM), state["random"])
    elif (own := checkpoint / _random_of(first_of_group)).exists():  # otherwise there were fewer ranks
        restore_random_state(*parsed(own.read_text()))
    assembly.loss_scale.restore(state.get("loss_scale", {}))
    return int(state["step"])


def load_best(folder: Path, fallback: Path | None, assembly: Assembly, step: int) -> None:
    """Load the checkpoint of a step from the folder or the fallback. Raises SaveFailed if it cannot be read, so that no
    other weights are exported instead."""
    places = [place / "checkpoints" / checkpoint_name(step) for place in (folder, fallback) if place is not None]
    if assembly.is_in_parts:  # the states of sharded weights are read into separate memory, all at once
        for state in assembly.optimizer.state.values():
            state.clear()
    try:
        load_checkpoint(next(filter(Path.is_dir, places), places[0]), assembly, is_other_allowed=True)
    except RequestError as error:
        raise SaveFailed(f"the best checkpoint cannot be exported: {error}") from error


def _load_whole(checkpoint: Path, assembly: Assembly, numbers: dict[str, Any]) -> None:
    """Load one tensor at a time: when a run loads its best checkpoint at the end, the device already holds weights and
    states."""
    expected = trained_state(assembly.model)
    with safe_open(checkpoint / _WEIGHTS, framework="pt", device=str(assembly.place.device)) as stored:
        shapes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
        different = sorted(set(expected) ^ set(shapes)) or [
            name for name in expected if list(expected[name].shape) != shapes[name]
        ]
        if different:
            message = f"{checkpoint} holds another model: {count_differing(different)}"
            raise RequestError([Problem("--resume", message)])
        with torch.no_grad():
            for name, tensor in expected.items():
                tensor.copy_(stored.get_tensor(name))
    restore_state(assembly, load_file(checkpoint / _OPTIMIZER), numbers)
