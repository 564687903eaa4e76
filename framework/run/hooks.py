"""What a program has of a run: functions that it calls as it goes on, and the result. Loads no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from framework.schema.plural import counted

Metrics = Mapping[str, float | None]
"""One line of `metrics.jsonl`."""


@dataclass
class Hooks:
    """Called in the main process alone, after what they tell of; the device may be at the next step by then.

    An exception of one does not lose work: no hook is called again, the run saves, ends after its step, and the
    exception goes on to the caller of `train`.
    """

    on_step: Callable[[Metrics], None] | None = None
    on_eval: Callable[[Metrics], None] | None = None
    on_save: Callable[[Path], None] | None = None
    """Given the folder of a checkpoint that is complete."""
    failure: Exception | None = field(default=None, init=False)
    """The exception that a hook has raised."""

    def call(self, hook: Callable[[Any], None] | None, told: object) -> None:
        """Call one of them, unless one has failed before."""
        if hook is None or self.failure is not None:
            return
        try:
            hook(told)
        except Exception as error:
            self.failure = error

    def raise_failure(self, note: str) -> None:
        """Raise the exception of a hook, if there is one, with a note of what became of the run."""
        if self.failure is not None:
            self.failure.add_note(note)
            raise self.failure


@dataclass(frozen=True)
class RunResult:
    """Where a run is and what came of it. `sample` is (prompt, completion) from the trained model."""

    folder: Path
    steps: int
    evals: tuple[dict[str, float], ...]
    peak_bytes: int
    sample: tuple[str, str] | None
    memory: str
    """Peak memory measured and predicted, in one sentence."""
    loader: str = "AutoModelForCausalLM"
    """The transformers class that loads the final model."""
    is_mergeable: bool = True
    """Whether what was trained can become part of the weights: tokens before the row cannot."""

    def __repr__(self) -> str:
        evaluated = self.evals[-1] if self.evals else {}
        numbers = "".join(f", {name} {value:.4g}" for name, value in evaluated.items() if name != "step")
        return f"<RunResult: {counted(self.steps, 'step')} in {self.folder}{numbers}>"
