"""Result of a run. Loads no torch."""

from dataclasses import dataclass
from pathlib import Path

from framework.schema.plural import counted


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
