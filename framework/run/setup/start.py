"""Setup of a run: read, plan, build and verify, then write the first files."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
import transformers
from accelerate import Accelerator
from rich.console import Console

from framework.build.assembly import Assembly, assemble
from framework.build.from_python import TASKS_OWN, FromPython, check_same
from framework.build.levers.allocator import choose_allocator
from framework.build.loading.bases import ALLOWED_MODELS, BASE, check_all_weights
from framework.build.loading.sharded import needs_whole_model
from framework.build.model.parts import causal_model
from framework.build.place import Place, real_place
from framework.build.ranks import local_part
from framework.build.sources.python_rows import NO_ROWS, RowsFromPython
from framework.build.text.tokenizer import stop_at, supervised_ends
from framework.build.verify import (
    verify,
)
from framework.console import TerminalConsole
from framework.errors import (
    DoesNotFit,
    Problem,
    RequestError,
)
from framework.memory.explain.causes import Repair
from framework.memory.ledger import Plan
from framework.memory.units import size
from framework.run.checkpoints.checkpoint import load_checkpoint, read_state, remove_partial_saves, retire_older
from framework.run.checkpoints.resume import check_resume
from framework.run.inputs import (
    Inputs,
    check_adapters_base,
    check_read,
    moved,
    needed_models,
    read_digests,
    read_inputs,
    total_steps,
    training_batches,
)
from framework.run.oom.report import PlannedRun, Watch, explained_failures
from framework.run.oom.retry import remembered
from framework.run.planning.capacity import require_capacity, too_large
from framework.run.planning.plan_pool import abandon
from framework.run.ranks.coordinator import Coordinator, plan_of_all
from framework.run.record.layout import step_of
from framework.run.record.lock import only_run
from framework.run.record.meter import Meter
from framework.run.record.overwrite import remove
from framework.run.record.progress import ProgressLine
from framework.run.record.run_folder import RunFolder, folder_problems, make
from framework.run.record.trackers import check_trackers
from framework.run.rehearsal.footprint import largest_unit_bytes, whole_bytes
from framework.run.session import Planner, Session
from framework.run.setup.agreement import agree, digest, find_folder, seed_each_rank
from framework.run.setup.first_passes import ask_before_resuming
from framework.run.state import seed_all
from framework.schema.choices import OnOutOfMemory
from framework.schema.config import TrainingConfig


def open_session(
    config: TrainingConfig,
    name: str,
    *,
    resume: bool,
    overwrite: bool,
    allow: Sequence[str],
    quiet: bool,
    planner: Planner | None,
    given: RowsFromPython = NO_ROWS,
    from_python: FromPython = TASKS_OWN,
    coordinator: Coordinator,
) -> Session:
    """Read, plan, assemble and verify a config; nothing is written before all of that has succeeded.

    Raises RequestError for an impossible request, DoesNotFit if the plan exceeds the card, VerificationFailed for an
    option that is not in effect, OutOfMemory. The caller closes the session.
    """
    check_trackers(config)
    transformers.utils.logging.disable_progress_bar()  # the run has its own bar
    with coordinator.phase("checking the run folder"):
        folder = find_folder(coordinator, config, name, resume, overwrite)
    with coordinator.phase("reading rows and planning"):
        console = TerminalConsole(stderr=True, quiet=quiet or not coordinator.ranks.is_main)
        inputs, plan = _read_and_plan(config, planner if coordinator.ranks.is_main else None, given, console)
    plan = plan_of_all(coordinator, plan)
    if plan is not None and not plan.fits and config.training.on_oom is not OnOutOfMemory.SHRINK:
        raise DoesNotFit(f"{too_large(plan)} `tunesmith plan` shows every term; nothing was loaded.")
    with coordinator.phase("loading the model"):
        inputs = replace(inputs, from_python=from_python)
        session = _build(inputs, plan, folder, resume, allow, quiet, coordinator)
    session.planner = planner
    if plan is not None and not plan.fits:
        session.progress.say(f"warning   {too_large(plan)} training.on_oom=shrink tries it anyway")
    return session


def _read_and_plan(
    config: TrainingConfig, planner: Planner | None, given: RowsFromPython, console: Console
) -> tuple[Inputs, Plan | None]:
    """Read the rows while a child process makes the plan."""
    # the size of the head depends on the rows' classes
    if config.training.task.facts.is_of_rows and not config.data.labels:
        inputs = read_inputs(config, given, console)
        return inputs, planner(inputs.config) if planner is not None else None
    with ThreadPoolExecutor(1) as pool:
        planned = pool.submit(planner, config) if planner is not None else None
        try:
            inputs = read_inputs(config, given, console)
            return inputs, planned.result() if planned is not None else None
        except BaseException:
            abandon()  # otherwise leaving the pool would wait for the plan
            raise


def _build(
    inputs: Inputs,
    plan: Plan | None,
    folder: RunFolder,
    resume: bool,
    allow: Sequence[str],
    quiet: bool,
    coordinator: Coordinator,
) -> Session:
    """Build and verify the session from the inputs and the plan."""
    config = inputs.config
    _require_capacity(plan, folder, config, coordinator)
    unused = [*check_all_weights(config, inputs.architecture)]  # on each rank, before one of them loads for all
    read = read_digests(inputs) | inputs.from_python.names
    origin = _origin_of(folder, config, read, allow) if resume else _fresh(config, read, allow)
    config = origin.config
    batches = training_batches(config, inputs, origin.state, coordinator.ranks.rank)
    total = total_steps(config, batches)
    agree(coordinator, digest(inputs, total))  # before the first collective, which starts the device
    meter = Meter(place := real_place(_start_device(config, coordinator)))
    watch = Watch(meter)
    seed_all(config.training.seed)
    planned = PlannedRun(config, plan, coordinator.ranks.world == 1) if plan is not None else None
    with explained_failures(watch, planned, None):
        with HostWatch() as host:
            assembly = assemble(config, inputs.architecture, place, total, coordinator.ranks, inputs.from_python)
        stop_at(causal_model(assembly.model), supervised_ends(inputs.data.train, inputs.tokenizer))
        seed_each_rank(config.training.seed, assembly.ranks)
        read |= {BASE: {**read[BASE], "drawn": assembly.drawn}} if assembly.drawn is not None else {}
        meter.observe("end")  # memory used by verification does not count as loading
        readings = verify(assembly)
        _empty_cache(place)
    quiet = quiet or not coordinator.ranks.is_main
    progress = ProgressLine(assembly.schedule.total, origin.step, config.training.logging_steps, quiet)
    for line in (*describe_load(coordinator, assembly, host.grown), *_file_notes(origin, unused)):
        progress.say(line)
    session = Session(
        config,
        folder,
        inputs,
        assembly,
        readings,
        batches,
        progress,
        meter,
        plan,
        watch,
        coordinator,
        step=origin.step,
        read=read,
        repairs=[*origin.repairs],
        best_before=origin.state.get("best") if origin.state is not None else None,
    )
    if origin.checkpoint is not None and origin.state is not None:
        ask_before_resuming(session, origin.state["config"])
        with explained_failures(watch, planned, None):
            meter.observe("resume")
            load_checkpoint(origin.checkpoint, assembly, bool({*ALLOWED_MODELS} & {*allow}))
            _empty_cache(assembly.place)
    return session


@dataclass(frozen=True)
class _Origin:
    """Starting point of a run. A resumed one has a checkpoint, its JSON part, and the differences from it."""

    config: TrainingConfig
    checkpoint: Path | None = None
    state: Mapping[str, Any] | None = None
    repairs: Sequence[Repair] = ()
    changes: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @property
    def step(self) -> int:
        """The last completed optimizer step."""
        return int(self.state["step"]) if self.state is not None else 0


def _file_notes(origin: _Origin, unused: Sequence[Problem]) -> Iterator[str]:
    """Lines on differences from the checkpoint, and on weights of a model folder that the run does not use."""
    yield from (f"resumed with {change}" for change in origin.changes)
    yield from (f"warning   {warning}" for warning in origin.warnings)
    yield from (f"warning   {warning.key}: {warning.message}" for warning in unused)


def _fresh(config: TrainingConfig, read: Mapping[str, Any], allow: Sequence[str]) -> _Origin:
    return _Origin(config, warnings=check_adapters_base(config, read, allow))


def _origin_of(folder: RunFolder, config: TrainingConfig, read: Mapping[str, Any], allow: Sequence[str]) -> _Origin:
    """The newest checkpoint of the folder. Raises RequestError if the run cannot resume under this config."""
    newest = folder.newest()
    assert newest is not None, "`open_folder` has found one"
    state = read_state(newest)
    config, repairs = remembered(config, state.get("repairs", []), allow)
    before = state.get("read", {})
    changes, problems = [str(repair) for repair in repairs], list[Problem]()
    checks: tuple[Callable[[], list[str]], ...] = (
        lambda: check_same(before, read),
        lambda: check_resume(state["config"], config, allow, moved(before, read, allow)),
        lambda: check_read(before, read, allow, needed_models(config)),
    )
    for check in checks:
        try:
            changes += check()
        except RequestError as error:
            problems += error.problems
    if problems:
        raise RequestError(problems)
    changes += folder.moved_versions()
    return _Origin(config, newest, state, repairs, changes)


def _require_capacity(plan: Plan | None, folder: RunFolder, config: TrainingConfig, coordinator: Coordinator) -> None:
    """Check host memory on one rank per machine, for all ranks there, and the disk on the rank that writes."""
    if plan is not None and coordinator.ranks.local_rank == 0:
        written = folder.path if folder.is_written else None
        workers, processes = config.data.workers, coordinator.ranks.local_world
        require_capacity(plan, written, workers, processes, folder.fallback)


def _start_device(config: TrainingConfig, coordinator: Coordinator) -> torch.device:
    """Start this process's device, after its allocator has been configured."""
    choose_allocator(config)
    device = coordinator.start(config)
    accelerator = Accelerator(cpu=config.gpu.name == "cpu")
    return device or accelerator.device  # accelerate numbers devices if there are several, also CPUs


def _empty_cache(place: Place) -> None:
    """Free memory that loading left unused, as the plan assumes."""
    if place.kind == "cuda":
        torch.cuda.empty_cache()


def begin(session: Session, overwrite: bool) -> None:
    """Write the first files of the run. Nothing has changed the run folder before this."""
    if session.folder.is_written:
        _write_first(session, overwrite)
    if session.config.batch != session.inputs.config.batch:
        session.plan_again()  # the plan was not made for the size that this run had shrunk to
    else:
        session.keep_plan()


def _write_first(session: Session, overwrite: bool) -> None:
    folder, step = session.folder, session.step
    make(folder)
    session.held.enter_context(only_run(folder.path))
    if folder.fallback is not None and folder.fallback.stat().st_dev == folder.path.stat().st_dev:
        session.progress.say("warning   training.fallback_dir is on the disk of the run folder: both fill up together")
    _recheck_folder(session, overwrite)
    if step:
        keep, best = session.config.training.save_total_limit, session.best.step if session.best.is_kept else None
        for place in filter(None, (folder.path, folder.fallback)):
            remove_partial_saves(place)
            retire_older(place, keep, best, session.progress.say)  # left by a kill, maybe after the last save
        folder.forget_metrics_after(step, is_last=step >= session.total)
        folder.set_stops_aside(step)
        folder.keep_config(session.config, step)
    device: dict[str, Any] = {"device": str(session.assembly.place.device), "torch_threads": torch.get_num_threads()}
    device |= session.assembly.from_python.names
    folder.write_environment(device, step)
    folder.write_config(session.config)


def _recheck_folder(session: Session, overwrite: bool) -> None:
    """Check the folder again after locking it, since another run may have used it meanwhile, and remove old files for
    `--overwrite`. Raises RequestError."""
    folder, newest = session.folder, session.folder.newest()
    if session.step:
        if newest is None or step_of(newest) != session.step:
            message = f"another run has continued in {folder.path} since this one read its checkpoint"
            raise RequestError([Problem("--resume", message, expected="the same command again")])
        return
    held = folder.held()
    if problems := folder_problems(session.config, folder.path, held, resume=False, overwrite=overwrite):
        raise RequestError(problems)
    remove(held)


SHARE = 0.3
"""Share of the whole model that a rank may take in addition to its own shards."""
SLACK_BYTES = 256 << 20
"""Host memory of a load besides weights: imported libraries, and cached allocations. Not measured on cards."""
_EVERY = 0.02
"""Seconds between two samples: a checkpoint of 1 GiB takes ten times as long to read."""
_STATUS = Path("/proc/self/status")


class HostWatch:
    """Context manager that measures the peak growth of this process's own memory, `grown`, in bytes. Pages of mapped
    files do not count, since ranks share them and the system can reclaim them."""

    def __init__(self) -> None:
        self.grown = 0
        self._began = own_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "HostWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.grown = max(self.grown, own_bytes() - self._began)
            if self._ended.wait(_EVERY):
                return


def own_bytes() -> int:
    """Anonymous memory of this process in RAM."""
    try:
        lines = (line.split() for line in _STATUS.read_text().splitlines())
        kinds = {words[0]: int(words[1]) << 10 for words in lines if words[0] in ("RssAnon:", "RssShmem:")}
        return sum(kinds.values())
    except OSError:  # not Linux
        return int(psutil.Process().memory_info().rss)


def describe_load(coordinator: Coordinator, assembly: Assembly, grown: int) -> Iterator[str]:
    """Lines on the host memory that ranks took during a sharded load, with a warning if one other than the first took
    more than it should. Every rank must call this. Empty for an unsharded load."""
    config = assembly.config
    is_promised = assembly.is_in_parts and config.model.load_pretrained_weights and not needs_whole_model(config)
    if coordinator.ranks.world == 1 or not is_promised:
        return
    own, model = _own_part(assembly), whole_bytes(assembly)
    texts = coordinator.gathered("grown while loading", json.dumps([grown, own]))
    (first, _), *others = [json.loads(text) for text in texts]
    most = max(took for took, _ in others)
    yield (
        f"load      host memory of the first rank grew by {size(first)}, of others by {size(most)} at most; the model "
        f"is {size(model)}"
    )
    limit = int(SHARE * model) + SLACK_BYTES
    for rank, (took, part) in enumerate(others, 1):
        if took - part > limit:
            yield (
                f"warning   sharded loading: requested but not in effect. Host memory of rank {rank} grew by "
                f"{size(took)} instead of at most {size(limit + part)}: together the ranks of a machine may need more "
                "than it has"
            )


def _own_part(assembly: Assembly) -> int:
    """Host memory that a sharded load needs: the rank's shards if they stay there, and on the CPU one whole unit."""
    on_cpu = assembly.place.kind == "cpu"
    if not on_cpu and not assembly.config.fsdp.is_on_host:
        return 0
    parts = sum(part.numel() * part.element_size() for part in map(local_part, assembly.model.parameters()))
    return parts + (largest_unit_bytes(assembly) if on_cpu else 0)
