"""tunesmith: fine-tuning of language models from YAML, with GPU memory planned before anything is loaded.

Import ladder (a package may import those to its right): api > cli > reports, converters > run > build > memory >
schema. `compose` and `checks` are on the level of `cli`; `errors` imports only `terminal`, which imports nothing. No
package above `run` loads torch.

Public names load on first use, so that `import framework` costs nothing. `import tunesmith` gives the same names.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from framework.api import *  # noqa: F403
    from framework.build.assembly import Assembly as Assembly
    from framework.build.sources.python_rows import PythonRows as PythonRows
    from framework.build.tasks.objective import Objective as Objective
    from framework.compose import load as load
    from framework.compose import to_yaml as to_yaml
    from framework.converters import Conversion as Conversion
    from framework.errors import *  # noqa: F403
    from framework.memory.explain import Explanation as Explanation
    from framework.memory.explain import explain as explain
    from framework.memory.ledger import Plan as Plan
    from framework.memory.search.found import Found as Found
    from framework.run.checkpoints.merge import Merged as Merged
    from framework.run.evaluate_saved import Evaluated as Evaluated
    from framework.run.gguf import Exported as Exported
    from framework.run.hooks import Metrics as Metrics
    from framework.run.hooks import RunResult as RunResult
    from framework.run.publish import Pushed as Pushed
    from framework.run.step import StepResult as StepResult
    from framework.schema.architecture import *  # noqa: F403
    from framework.schema.choices import *  # noqa: F403
    from framework.schema.config import *  # noqa: F403
    from framework.schema.data import *  # noqa: F403
    from framework.schema.fsdp import *  # noqa: F403
    from framework.schema.gpu import *  # noqa: F403
    from framework.schema.model import *  # noqa: F403
    from framework.schema.objectives import *  # noqa: F403  # noqa: F403
    from framework.schema.optimizers import Optimizer as Optimizer
    from framework.schema.peft import *  # noqa: F403
    from framework.schema.training import *  # noqa: F403

_ROOMS = {
    "framework.api": "assemble check convert evaluate export_gguf fit merge plan predict push report train train_step",
    "framework.compose": "load to_yaml",
    "framework.memory.explain": "Explanation explain",
    "framework.memory.ledger": "Plan",
    "framework.memory.search.found": "Found",
    "framework.converters": "Conversion",
    "framework.run.hooks": "Metrics RunResult",
    "framework.run.checkpoints.merge": "Merged",
    "framework.run.evaluate_saved": "Evaluated",
    "framework.run.gguf": "Exported",
    "framework.run.publish": "Pushed",
    "framework.run.step": "StepResult",
    "framework.build.assembly": "Assembly",
    "framework.build.sources.python_rows": "PythonRows",
    "framework.build.tasks.objective": "Objective",
    "framework.schema.config": "Batch TrainingConfig",
    "framework.schema.training": "AllocatorParams GradientCheckpointingKwargs ParameterGroup TrainingParams",
    "framework.schema.objectives": "DistillationParams PreferenceParams TeacherParams",
    "framework.schema.model": "ModelParams TokenizerTraining",
    "framework.schema.peft": "PeftParams",
    "framework.schema.architecture": "RopeScaling RopeType",
    "framework.schema.fsdp": "FSDPParams",
    "framework.schema.data": "DataParams DatasetParams",
    "framework.schema.gpu": "GPUParams HostParams",
    "framework.schema.choices": (
        "Attention BackwardPrefetch CheckpointingPolicy CompileScope Divergence EmaDevice Fp8 LoraInit "
        "MixedPrecision Mixing OnOutOfMemory OptimizerOffload PeftMethod PeftSaveMode PreferenceLoss Quantization "
        "Rounding RowFormat Scheduler SdpaBackend ShardingStrategy StateDictType Supervise TorchDtype Tracker "
        "Truncation"
    ),
    "framework.schema.optimizers": "Optimizer",
    "framework.schema.tasks": "Task",
    "framework.errors": (
        "BrokenRows DoesNotFit Interrupted NonFinite OutOfMemory Problem RequestError SaveFailed TrainingStopped "
        "TunesmithError VerificationFailed WorkersLost"
    ),
}
"""Module -> the public names it provides."""
_LOADS_TORCH = (
    "framework.run.checkpoints.merge",
    "framework.run.evaluate_saved",
    "framework.run.gguf",
    "framework.run.publish",
    "framework.run.step",
    "framework.build.assembly",
    "framework.build.sources.python_rows",
    "framework.build.tasks.objective",
)
_HOMES = {name: module for module, names in _ROOMS.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("tunesmith")
    if name not in _HOMES:
        raise AttributeError(f"module 'framework' has no attribute {name!r}")
    module = _HOMES[name]
    if module in _LOADS_TORCH and module not in sys.modules:
        from framework.installation import require_versions

        require_versions()  # else the import of a version that is not supported fails somewhere inside
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
