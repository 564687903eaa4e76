"""Host memory of a rehearsed run, per process and per machine. Arithmetic only; no torch."""

from collections.abc import Sequence

from framework.memory.allocator import Peak
from framework.memory.ledger import HostUse
from framework.memory.trace import Rehearsal, Space
from framework.schema.choices import StateDictType

MIB = 1 << 20
HOST_BASE_BYTES = 2500 * MIB
"""Resident memory of a process with torch, transformers and a CUDA context, before any model. An upper estimate; not
measured on a GPU machine yet."""
WORKER_BYTES = 200 * MIB
"""Memory that a process of `data.workers` adds; it shares its parent's pages until they are written. 11 MiB at first,
146 after its garbage collector ran (torch 2.13, transformers 5.24, Linux, 2026-11), plus a block of a stream."""
CARDS_A_MACHINE = 8
"""Number of cards assumed per machine, for host memory and for the shards of a hybrid strategy."""
LARGEST_FILE = 5 * 10**9
"""Bytes of a sharded export that the first rank's host gathers at a time
(framework/run/checkpoints/sharded_export.py)."""


def host_use(rehearsal: Rehearsal, peaks: Sequence[Peak]) -> tuple[int, HostUse]:
    """Host memory of the first process, and of all processes of a machine.

    A load streams one tensor at a time, unless the whole model is transformed first or sent by the first process. A
    save holds what it writes in addition to a base in host memory; an asynchronous save keeps copies during steps,
    which on the CPU are part of the peaks. At the end a single process holds checkpoint and export at a time if they
    fit (framework/run/checkpoints/saver.py).
    """
    config, footprint = rehearsal.config, rehearsal.footprint
    process, processes = HOST_BASE_BYTES + config.data.workers * WORKER_BYTES, min(config.gpu.count, CARDS_A_MACHINE)
    on_cpu = config.gpu.name == "cpu"
    load = max((peak.host + on_cpu * peak.reserved for peak in peaks if peak.phase == "load"), default=0)
    other = max(load, *(peak.reserved if on_cpu else peak.host for peak in peaks))
    first = max(other, load + footprint.sent_bytes)
    pinned = end = 0
    if not on_cpu:
        base, (of_first, of_each) = sum(footprint.home_sizes), _saved_on_host(rehearsal)
        training, (copied, copied_each) = max(peak.host for peak in peaks), _async_save_copies(rehearsal)
        other = max(other, training + copied_each, max(footprint.weight_sizes, default=0), base + of_each)
        first = max(first, other, training + copied, base + of_first)
        end = max(0, base + _written_at_the_end(rehearsal) - first)
        pinned = max(peak.pinned for peak in peaks) + (base if config.model.offload_frozen_base is True else 0)
    host = HostUse(processes, process + other, pinned, processes * load + footprint.sent_bytes, end)
    return process + first + end, host


def _written_at_the_end(rehearsal: Rehearsal) -> int:
    """Host bytes of the last checkpoint and the export, written at a time; 0 where they are not.

    Averaged weights and a best checkpoint change the weights in between. States in host memory are written from there,
    except by an asynchronous save, which has copied them.
    """
    config, footprint = rehearsal.config, rehearsal.footprint
    training = config.training
    if config.gpu.count > 1 or training.exports_average or training.best_metric is not None:
        return 0
    states = zip(footprint.state_sizes, footprint.state_spaces, strict=True)
    copied = sum(size for size, space in states if space in (Space.PINNED, Space.HOST)) if training.async_save else 0
    return sum(footprint.trained_sizes) + sum(footprint.state_sizes) + copied + footprint.export_bytes


def _saved_on_host(rehearsal: Rehearsal) -> tuple[int, int]:
    """Host bytes during a save: of the first process, which exports, and of each other one."""
    config, footprint = rehearsal.config, rehearsal.footprint
    is_asynchronous = config.training.async_save
    if footprint.shards == 1:
        written = max(sum(footprint.trained_sizes), sum(footprint.state_sizes))  # one file after the other
        return max(footprint.export_bytes, 0 if is_asynchronous else written), 0
    exported = min(footprint.export_bytes, LARGEST_FILE)
    if config.fsdp.state_dict_type is StateDictType.FULL_STATE_DICT:
        return max(exported, 0 if is_asynchronous else footprint.checkpoint_bytes), 0
    is_there = config.fsdp.is_on_host or is_asynchronous
    own = 0 if is_there else sum(footprint.trained_sizes) + sum(footprint.state_sizes)
    return max(exported, own), own


def _async_save_copies(rehearsal: Rehearsal) -> tuple[int, int]:
    """Host copies of asynchronous saves, kept between saves: of the first process, and of each other one."""
    config, footprint = rehearsal.config, rehearsal.footprint
    if not config.training.async_save:
        return 0, 0
    own = sum(footprint.trained_sizes) + sum(footprint.state_sizes)
    if footprint.shards == 1:
        return own, 0
    is_whole = config.fsdp.state_dict_type is StateDictType.FULL_STATE_DICT
    return (footprint.checkpoint_bytes, 0) if is_whole else (own, own)
