"""The loop: one function between the command and the train step."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from framework.activity import doing, now
from framework.build.averages import averaged
from framework.build.data.report import report_warnings
from framework.build.data.rows import Row
from framework.build.data.streamed_batches import StreamedBatches
from framework.build.from_python import TASKS_OWN, FromPython
from framework.build.loading.bases import BASE
from framework.build.model.heads import model_class
from framework.build.refuse import refuse_impossible
from framework.build.sources.python_rows import PythonRows, RowsFromPython, take_rows
from framework.build.text.labels import IGNORED
from framework.build.verify import table, verify_unmoved
from framework.build.verify.frozen_models import Fingerprints, take_fingerprints
from framework.errors import SaveFailed
from framework.memory.ledger import Plan
from framework.run.checkpoints.checkpoint import load_best
from framework.run.checkpoints.export import export, leaves_model, recasts
from framework.run.checkpoints.resume import check_allowed
from framework.run.evaluate import complete
from framework.run.hooks import Hooks, RunResult
from framework.run.oom.retry import TRAIN, attempts
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.run.ranks.coordinator import process_group, require_world
from framework.run.ranks.signals import BEFORE_ALL, announced_interrupt, watched_interrupt
from framework.run.record.layout import FINAL, UNFINISHED, step_of
from framework.run.record.model_card import Trained, write_card
from framework.run.record.overwrite import read_environment
from framework.run.record.predicted_and_measured import last_line
from framework.run.session import Planner, Session
from framework.run.setup.agreement import decided_by_main
from framework.run.setup.eva import start_from_rows
from framework.run.setup.first_passes import know_reference, try_longest_rows
from framework.run.setup.start import begin, open_session
from framework.run.step import launch_step
from framework.schema.adapters import ADAPTERS
from framework.schema.choices import PeftSaveMode
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted

SAMPLE_PROMPT_TOKENS, SAMPLE_NEW_TOKENS, SAMPLED_ROWS = 16, 48, 32
"""Of the sample at the end: tokens of a prompt for rows that have none, most new ones, and rows that are looked at."""


def train(
    config: TrainingConfig,
    name: str = "run",
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    allow: Sequence[str] = (),
    quiet: bool = False,
    planner: Planner | None = plan_in_subprocess,
    train_rows: PythonRows | None = None,
    eval_rows: PythonRows | None = None,
    hooks: Hooks | None = None,
    from_python: FromPython = TASKS_OWN,
) -> RunResult:
    """Train as `config` asks and return the result; `framework.api.train` documents the arguments.

    `auto` values are searched first. `planner` predicts the memory (None: no prediction). `train_rows` and `eval_rows`
    are the source `{path: python_rows}` of `data.train` or `data.eval`, and the only source if the config has none.
    `from_python` may replace objective and optimizer; the plan does not know them, and warns. Raises RequestError,
    DoesNotFit, VerificationFailed, NonFinite, OutOfMemory, SaveFailed or Interrupted.
    """
    check_allowed(allow)
    from_python.refuse(config)
    config, given = take_rows(config, RowsFromPython(train_rows, eval_rows))
    opening = partial(
        open_session,
        name=name,
        resume=resume,
        overwrite=overwrite,
        allow=allow,
        quiet=quiet,
        planner=_warning_planner(planner, from_python),
        given=given,
        from_python=from_python,
    )
    with _opened(config, opening) as session:
        session.hooks = hooks if hooks is not None and session.coordinator.ranks.is_main else Hooks()
        if dry_run:
            return RunResult(session.folder.path, 0, (), session.meter.allocated, None, "")
        with announced_interrupt(partial(_abandoned, session)):
            begin(session, overwrite)
            with session.running():
                before = _prepared(session)
                with watched_interrupt() as session.interrupt:
                    try:
                        for step in session.steps():
                            for attempt in attempts(session, TRAIN):
                                with attempt as state:
                                    made = session.take(step), step, session.observe, state.before_update
                                    launched = launch_step(session.assembly, *made)
                            session.after_step(step, launched)
                        session.save(is_last=True)
                    except SaveFailed as error:
                        raise _export_instead(session, error) from error
                    verify_unmoved(session.assembly, before)
                    finished = _finish(session)
        # A hook of the last step or its save may have failed.
        session.hooks.raise_failure(f"the run is complete in {session.folder.path}")
        return finished


def _prepared(session: Session) -> Fingerprints | None:
    """Prepare the first step. Returns fingerprints of the tensors that training must not change."""
    start_from_rows(session)
    know_reference(session)
    before = take_fingerprints(session.assembly)
    with doing("trying the longest rows"):
        try_longest_rows(session)
    session.start()
    now(f"the first step{', which compiles' if session.config.training.compile is True else ''}")
    return before


def _warning_planner(planner: Planner | None, from_python: FromPython) -> Planner | None:
    """The planner with a warning in its plans for each object from Python that they do not know."""
    if planner is None or not (from_python.names or from_python.metrics):
        return planner

    def plan(config: TrainingConfig) -> Plan:
        made = planner(config)
        return replace(made, warnings=(*made.warnings, *from_python.notes(config)))

    return plan


@contextmanager
def _opened(config: TrainingConfig, opening: Callable[..., Session]) -> Iterator[Session]:
    """Connect the ranks, open the session and announce the run. Afterwards the folder is unlocked and the ranks
    disconnect."""
    with process_group() as coordinator, announced_interrupt(lambda: BEFORE_ALL):
        require_world(config, coordinator.ranks)
        config, decisions = decided_by_main(coordinator, config)
        refuse_impossible(config, devices="one")
        session = opening(config, coordinator=coordinator)
        with session.held:
            _announce(session, decisions)
            yield session


def _abandoned(session: Session) -> str:
    """The message for a run that is abandoned at once: where it stopped and what is saved."""
    folder, is_named = session.folder.path, session.config.training.output_dir is not None
    at = f"after step {session.step}" if session.has_stepped else "before the first step"
    if saved := session.folder.newest():
        return f"interrupted {at}; continue with --resume from step {step_of(saved)} (saved in {saved.parent.parent})"
    return f"interrupted {at}, and nothing was saved{'; start again with --overwrite' if is_named else ''} ({folder})"


def _announce(session: Session, decisions: Sequence[str]) -> None:
    """Print what is about to run: the values chosen for `auto`, rows, batch equation, schedule, verified options."""
    say = session.progress.say
    for line in decisions:
        say(f"auto      {line}")
    say(str(session.inputs.data.report))
    packed = f"; a row is a pack of at most {session.config.model.model_max_length} tokens"
    say(f"batch     {session.config.batch}{packed if session.config.data.packing else ''}")
    say(f"schedule  {session.assembly.schedule}")
    for line in session.assembly.from_python.notes(session.config):
        say(f"warning   {line}")
    for warning in session.assembly.adapter.warnings if session.assembly.adapter else ():
        say(f"warning   {warning}")
    for line in table(session.readings):
        say(line)
    if session.step >= session.total:
        say(f"resumed   after step {session.step} of {session.total}: nothing is left to train, the export is written")


def _finish(session: Session) -> RunResult:
    """Evaluate and export, possibly while the last checkpoint is still being written. A failed evaluation does not
    prevent the export, and neither prevents the checkpoint."""
    if isinstance(session.batches, StreamedBatches):
        report = session.batches.progress.account.report
        if report:
            session.progress.say(str(report))
            for warning in report_warnings(report).values():
                session.progress.say(f"warning   {warning}")
    try:
        _evaluate_last(session)
    except BaseException:
        if session.assembly.ranks.world == 1:  # other ranks would be waiting in the evaluation
            _wrap_up(session)
        raise
    memory, sample = _wrap_up(session)
    evals = tuple(session.evals)
    peak = session.meter.allocated
    loader = model_class(session.config.training.task).__name__
    is_mergeable = not ADAPTERS[session.config.peft.peft_method].is_prompt
    measured = last_line(memory)
    return RunResult(session.folder.path, session.step, evals, peak, sample, measured, loader, is_mergeable)


def _evaluate_last(session: Session) -> None:
    """Evaluate the last weights, and load those of the best evaluation if they are to be exported."""
    best = session.best
    if best.ends_run:
        times = counted(best.since, "evaluation")
        session.progress.say(f"stopped   after step {session.step}: no better {best.metric} in {times}")
    elif session.evaluate():
        session.saving.note_best()
    if best.is_kept and best.step is not None:
        exported = ", which is exported" if session.config.training.export_best else ""
        session.progress.say(f"best      {best}{exported}")
        if session.config.training.export_best and best.step != session.step:
            load_best(session.folder.path, session.folder.fallback, session.assembly, best.step)


def _export_instead(session: Session, error: SaveFailed) -> SaveFailed:
    """Export the weights of a run whose checkpoint could not be written, and return the error that says so."""
    session.settle()
    message, name = str(error), FINAL
    try:
        if session.step >= session.total:
            _finish(session)
        elif session.has_stepped:
            name = f"{UNFINISHED}{session.step:08d}"
            _export(session, name)
        else:
            return error
    except SaveFailed as second:
        return SaveFailed(f"{message}\n{second}")
    return _exported_error(session, message, name)


def _exported_error(session: Session, message: str, name: str) -> SaveFailed:
    """The error of a checkpoint that could not be written, with the place of the exported weights."""
    exported = f"The weights after step {session.step} are exported: {session.folder.path / name}"
    return SaveFailed(f"{message}\n{exported}; {_resume_hint(session)}")


def _resume_hint(session: Session) -> str:
    saved = session.saving.newest()
    return f"--resume continues from step {saved}" if saved else "there is no checkpoint to resume from"


def _wrap_up(session: Session) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """Write `memory.json`, the export and its model card. Returns the content of `memory.json` and a sample."""
    memory = session.write_memory()
    if session.assembly.adapter is not None:
        from framework.build.verify.adapter import describe_save_dtypes  # peft takes seconds to import

        for line in describe_save_dtypes(session.assembly):
            session.progress.say(line)
    if session.saving.writer.count:
        session.progress.say(f"saves     {session.saving.writer}")
    failure = _saving_failure(session) if recasts(session.assembly) else ""
    sample = _export(session)
    _write_card(session, memory)
    if failure := failure or _saving_failure(session):
        raise _exported_error(session, failure, FINAL)
    return memory, sample


def _write_card(session: Session, memory: dict[str, Any]) -> None:
    """Write the model card next to the export. A card that cannot be written is a warning."""
    folder, best = session.folder, session.best
    exported = best.step if session.config.training.export_best and best.step is not None else session.step
    places = [place / FINAL for place in (folder.path, folder.fallback) if place is not None]
    written = [place for place in places if place.is_dir()] if folder.is_written else []
    has_adapter = session.assembly.adapter is not None and session.config.peft.peft_save_mode is not PeftSaveMode.MERGED
    trained = Trained(
        session.config,
        session.inputs.data.report,
        exported,
        [values for values in session.evals if values["step"] <= exported],
        memory,
        read_environment(folder.path),
        has_adapter,
    )
    for place in written[:1]:
        try:
            write_card(place, trained)
        except SaveFailed as error:
            session.progress.say(f"warning   {error}")


def _saving_failure(session: Session) -> str:
    """Wait for the last checkpoint. Returns why it could not be written; empty if it was."""
    try:
        session.saving.finish()
    except SaveFailed as error:
        return str(error)
    return ""


def _export(session: Session, name: str = FINAL) -> tuple[str, str] | None:
    """Write the export and return a sample. The main rank does this while the others wait."""
    samples: list[tuple[str, str] | None] = [None]
    folder, tokenizer, base = session.folder, session.inputs.tokenizer, session.read.get(BASE)

    fallback = folder.fallback / name if folder.fallback is not None else None

    def write() -> str:
        exporting = partial(export, session.assembly, tokenizer, folder.path / name, base, fallback)
        if leaves_model(session.assembly):
            with ThreadPoolExecutor(1) as next_to_it:
                exported = next_to_it.submit(exporting)
                try:
                    samples.append(_sample(session))
                finally:
                    exported.result()
            return "written"
        try:
            with averaged(session.assembly):
                samples.append(_sample(session))  # before the export, which dismantles an adapted model
        finally:
            exporting()
        return "written"

    try:
        with session.coordinator.phase("exporting"):
            if session.assembly.is_in_parts:
                from framework.run.checkpoints.sharded_export import export_sharded

                export_sharded(session.assembly, tokenizer, folder.path / name, base, fallback)
                session.coordinator.shared("exported", lambda: "written")
                return None  # a completion would gather every shard for each of its tokens
            session.coordinator.shared("exported", write)
    except SaveFailed as error:
        hint = "" if fallback else "; training.fallback_dir names a second disk for files that do not fit here"
        raise SaveFailed(f"{error}\n{_resume_hint(session)}{hint}") from error
    return samples[-1]


def _prompt_of(row: Row) -> list[int]:
    """The tokens before the first supervised one; the first tokens of a row that has none."""
    unsupervised = next((at for at, label in enumerate(row["labels"]) if label != IGNORED), 0)
    return [*row["input_ids"][: unsupervised if unsupervised > 1 else SAMPLE_PROMPT_TOKENS]]


def _sample(session: Session) -> tuple[str, str] | None:
    """A completion of the prompt of a held-out row, or of a training row if none is held out: of the first rows the one
    that leaves most room for it. None for a model that does not generate text."""
    if session.config.training.task.facts.is_of_rows:
        return None
    tokenizer, data, longest = session.inputs.tokenizer, session.inputs.data, session.config.longest
    rows = data.eval or data.train
    found = (_prompt_of(rows[number]) for number in range(min(len(rows), SAMPLED_ROWS)))
    prompt = max(found, key=lambda prompt: min(longest - len(prompt), SAMPLE_NEW_TOKENS))[: longest - 1]
    new_tokens = min(SAMPLE_NEW_TOKENS, longest - len(prompt))
    written = complete(session.assembly, prompt, new_tokens, session.batches.pad_token_id, draws=True)
    return tokenizer.decode(prompt), tokenizer.decode(written, skip_special_tokens=True)
