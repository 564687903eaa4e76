"""Evaluations during a run: held-out rows, as a whole and by named set, and completions of `training.sample_prompts`
for `samples.jsonl`, progress and trackers."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from framework.activity import doing
from framework.build.averages import averaged
from framework.build.data.batches import eval_batches, rows_and_tokens
from framework.build.data.packing import on_device, pinned
from framework.build.losses.loss import Batch
from framework.run.evaluate import Abandoned, complete, metrics_of_sets, sum_up, until_asked
from framework.run.hooks import Hooks
from framework.run.inputs import TrainingBatches
from framework.run.oom.retry import EVAL, RetriedRun, attempts
from framework.run.ranks.signals import Interrupt
from framework.run.record.metrics_log import SAMPLES, MetricsLog
from framework.run.record.progress import ProgressLine
from framework.schema.evaluation import FROM_PYTHON


class EvaluatedRun(RetriedRun, Protocol):
    """The parts of a run that an evaluation needs."""

    batches: TrainingBatches
    progress: ProgressLine
    interrupt: Interrupt
    hooks: Hooks


class HeldOut:
    """Evaluation of a run's held-out rows. `shapes` are rows and tokens of each batch in the latest evaluation."""

    def __init__(self, run: EvaluatedRun) -> None:
        self._run = run
        self.shapes: list[tuple[int, int]] = []
        self._count = 0

    def evaluate(self) -> dict[str, float] | None:
        """Compute `eval_loss` and the task's metrics over all held-out rows, then those of each named set as
        `METRIC/NAME`. None without such rows, and if the user asked the run to end meanwhile."""
        run = self._run
        if run.inputs.data.eval is None:
            return None
        try:
            for attempt in attempts(run, EVAL):
                with attempt, doing(f"evaluating after step {run.step}"):
                    values = self._evaluated()
        except Abandoned:
            run.progress.say(f"step {run.step}/{run.progress.total}  evaluation skipped, as the run was asked to end")
            return None
        return values | self._from_python()

    def _from_python(self) -> dict[str, float]:
        """Call the metrics passed from Python; all ranks get the main one's numbers. One that raises ends the run like
        a failing hook, and the remaining ones are not called."""
        run, found = self._run, dict[str, float]()
        given, assembly = run.inputs.from_python.metrics, run.assembly
        if not given or run.hooks.failure is not None:
            return {}
        device = assembly.place.device
        assembly.model.eval()
        try:
            with (
                torch.no_grad(),
                assembly.autocast,
                averaged(assembly),
                torch.random.fork_rng([device] if device.type == "cuda" else []),
            ):
                for name, metric in given.items():
                    found[f"{FROM_PYTHON}{name}"] = float(metric(assembly.model, run.inputs.tokenizer))
        except Exception as error:  # of any kind
            run.hooks.failure = error
        finally:
            assembly.model.train()
        self._count += 1
        numbers = run.coordinator.shared(f"metrics/{self._count}", lambda: json.dumps(found))
        shared: dict[str, float] = json.loads(numbers)
        return shared

    def _evaluated(self) -> dict[str, float]:
        run, rows = self._run, self._run.inputs.data.eval
        assert rows is not None
        self.shapes.clear()
        sets = run.inputs.data.eval_sets or {"": range(len(rows))}
        sums = {name: sum_up(run.assembly, self._batches(chosen), run.meter.observe) for name, chosen in sets.items()}
        return metrics_of_sets(run.assembly.objective, sums)

    def _batches(self, chosen: Sequence[int]) -> Iterator[Batch]:
        run, config = self._run, self._run.config
        ranks, sharing = run.assembly.ranks, config.sharing
        rows, device = run.inputs.data.eval, run.assembly.place.device
        assert rows is not None
        made = eval_batches(
            rows,
            config.eval_rows,
            run.batches.pad_token_id,
            ranks.rank // sharing,
            ranks.world // sharing,
            config.data.padding_free,
            config.padded(1),
            chosen,
        )
        for batch in until_asked(made, run.interrupt) if ranks.world == 1 else made:  # others would wait
            self.shapes.append(rows_and_tokens(config, batch))
            yield on_device(device, pinned(device, batch))


SHOWN = 160
"""Characters of a completion shown in the progress."""


class Samples:
    """The samples of a run, written by its main process. `log` receives the texts of each evaluation by name."""

    def __init__(self, run: EvaluatedRun, log: Callable[[Mapping[str, str]], None]) -> None:
        self._run, self._track = run, log
        self._log = MetricsLog(run.folder.path, run.progress.say, SAMPLES) if run.folder.is_written else None

    def write(self) -> None:
        """Complete each prompt with the weights being evaluated. A sample that runs out of memory is skipped with a
        warning, and training continues."""
        run, texts = self._run, dict[str, str]()
        if self._log is None or not run.inputs.sample_prompts:
            return
        with averaged(run.assembly):
            for number, (asked, ids) in enumerate(
                zip(run.config.training.sample_prompts, run.inputs.sample_prompts, strict=True), 1
            ):
                try:
                    text = self._completion([*ids])
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    run.progress.say(f"warning   sample {number} is skipped: it needs more memory than there is")
                    continue
                self._log.append({"step": run.step, "prompt": asked, "completion": text})
                run.progress.say(f"sample    {number}: {' '.join(text.split())[:SHOWN]}")
                texts[f"samples/{number}"] = f"{asked}\n\n{text}"
        self._track(texts)

    def _completion(self, ids: list[int]) -> str:
        run = self._run
        new_tokens, pad = run.config.training.sample_new_tokens, run.batches.pad_token_id
        written = complete(run.assembly, ids, new_tokens, pad, draws=False)
        text: str = run.inputs.tokenizer.decode(written, skip_special_tokens=True)
        return text

    def close(self) -> None:
        """Write the lines that the disk has not accepted yet."""
        if self._log is not None:
            self._log.close(self._run.folder.fallback)
