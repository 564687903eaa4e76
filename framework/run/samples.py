"""Completions of `training.sample_prompts` at each evaluation: in `samples.jsonl`, in the progress and in trackers."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from framework.build.assembly import Assembly
from framework.build.averages import averaged
from framework.run.completions import complete
from framework.run.inputs.inputs import Inputs
from framework.run.inputs.training_batches import TrainingBatches
from framework.run.record.metrics_log import SAMPLES, MetricsLog
from framework.run.record.progress import ProgressLine
from framework.run.record.run_folder import RunFolder
from framework.schema.config import TrainingConfig

SHOWN = 160
"""Characters of a completion in the progress."""


class SampledRun(Protocol):
    """What writing samples reads of a run."""

    config: TrainingConfig
    folder: RunFolder
    inputs: Inputs
    assembly: Assembly
    batches: TrainingBatches
    progress: ProgressLine
    step: int


class Samples:
    """The samples of a run, which its main process writes. `tell` is given the texts of each evaluation by name."""

    def __init__(self, run: SampledRun, tell: Callable[[Mapping[str, str]], None]) -> None:
        self._run, self._tell = run, tell
        self._log = MetricsLog(run.folder.path, run.progress.say, SAMPLES) if run.folder.is_written else None

    def write(self) -> None:
        """Complete each prompt with the weights as they are evaluated. What memory does not suffice for is said, and
        is left out: training goes on."""
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
                    run.progress.say(f"warning   sample {number} is left out: it needs more memory than there is")
                    continue
                self._log.append({"step": run.step, "prompt": asked, "completion": text})
                run.progress.say(f"sample    {number}: {' '.join(text.split())[:SHOWN]}")
                texts[f"samples/{number}"] = f"{asked}\n\n{text}"
        self._tell(texts)

    def _completion(self, ids: list[int]) -> str:
        run = self._run
        new_tokens, pad = run.config.training.sample_new_tokens, run.batches.pad_token_id
        written = complete(run.assembly, ids, new_tokens, pad, draws=False)
        text: str = run.inputs.tokenizer.decode(written, skip_special_tokens=True)
        return text

    def close(self) -> None:
        """Write what the disk has not taken yet."""
        if self._log is not None:
            self._log.close(self._run.folder.fallback)
