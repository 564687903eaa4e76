"""Interface of a run to the calling program: callbacks during the run, and its result. Loads no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from framework.schema.plural import counted

Metrics = Mapping[str, float | None]
"""One line of `metrics.jsonl`."""


@dataclass
class Hooks:
    """Callbacks, called in the main process only, after the event; the device may already run the next step.

    If one raises, no work is lost: no hook is called again, the run saves, ends after its step, and the exception
    reaches the caller of `train`.
    """

    on_step: Callable[[Metrics], None] | None = None
    on_eval: Callable[[Metrics], None] | None = None
    on_save: Callable[[Path], None] | None = None
    """Receives the folder of a complete checkpoint."""
    failure: Exception | None = field(default=None, init=False)
    """The exception that a hook raised."""

    def call(self, hook: Callable[[Any], None] | None, event: object) -> None:
        """Call a hook with `event`, unless a hook has failed before."""
        if hook is None or self.failure is not None:
            return
        try:
            hook(event)
        except Exception as error:
            self.failure = error

    def raise_failure(self, note: str) -> None:
        """Raise the exception of a failed hook, if there is one, with a note about the state of the run."""
        if self.failure is not None:
            self.failure.add_note(note)
            raise self.failure


@dataclass(frozen=True)
class RunResult:
    """Folder and results of a run. `sample` is (prompt, completion) from the trained model."""

    folder: Path
    steps: int
    evals: tuple[dict[str, float], ...]
    peak_bytes: int
    sample: tuple[str, str] | None
    memory: str
    """Peak memory measured and predicted, in one sentence."""
    loader: str = "AutoModelForCausalLM"
    """Name of the transformers class that loads the final model."""
    is_mergeable: bool = True
    """Whether the adapter can be merged into the weights; virtual tokens (prompt tuning and the like) cannot."""

    def __repr__(self) -> str:
        evaluated = self.evals[-1] if self.evals else {}
        numbers = "".join(f", {name} {value:.4g}" for name, value in evaluated.items() if name != "step")
        return f"<RunResult: {counted(self.steps, 'step')} in {self.folder}{numbers}>"
