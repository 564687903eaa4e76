"""tunesmith: fine-tuning of language models from YAML, whose heart is GPU memory.

Import ladder (a room may import those to its right): cli > report, convert > run > build > memory > schema.
`compose` and `checks` stand beside `cli`; `errors` imports `terminal` alone, which imports nothing. No front room loads
torch.

Public names load on first use, so that `import framework` costs nothing. Only `train` loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.checks import check as check
    from framework.compose import load as load
    from framework.compose import to_yaml as to_yaml
    from framework.errors import *  # noqa: F403
    from framework.memory.explain import Explanation as Explanation
    from framework.memory.explain import explain as explain
    from framework.run.planning.fit import fit as fit
    from framework.run.planning.plan_process import plan_in_subprocess
    from framework.run.trainer import train as train
    from framework.schema.choices import *  # noqa: F403
    from framework.schema.config import *  # noqa: F403
    from framework.schema.data import *  # noqa: F403
    from framework.schema.fsdp import *  # noqa: F403
    from framework.schema.gpu import *  # noqa: F403
    from framework.schema.model import *  # noqa: F403
    from framework.schema.peft import *  # noqa: F403
    from framework.schema.training import *  # noqa: F403

    plan = plan_in_subprocess

_ROOMS = {
    "framework.schema.config": "Batch TrainingConfig",
    "framework.schema.training": "GradientCheckpointingKwargs TrainingParams",
    "framework.schema.model": "ModelParams TokenizerTraining",
    "framework.schema.peft": "PeftParams",
    "framework.schema.fsdp": "FSDPParams",
    "framework.schema.data": "DataParams DatasetParams",
    "framework.schema.gpu": "GPUParams",
    "framework.schema.choices": (
        "Attention BackwardPrefetch CompileScope MixedPrecision Mixing OnOutOfMemory Optimizer PeftMethod PeftSaveMode "
        "Quantization Rounding RowFormat Scheduler ShardingStrategy StateDictType Supervise Task TorchDtype Tracker "
        "Truncation"
    ),
    "framework.errors": (
        "BrokenRows DoesNotFit Interrupted NonFinite OutOfMemory Problem RequestError SaveFailed TrainingStopped "
        "TunesmithError VerificationFailed"
    ),
    "framework.compose": "load to_yaml",
    "framework.checks": "check",
    "framework.memory.explain": "Explanation explain",
    "framework.run.planning.plan_process": "plan=plan_in_subprocess",
    "framework.run.planning.fit": "fit",
    "framework.run.trainer": "train",
}
"""Module -> the public names it provides; `public=inside` where it has another name there."""
_LOADS_TORCH = ("framework.run.planning.fit", "framework.run.trainer")
_HOMES = {
    name.partition("=")[0]: (module, name.rpartition("=")[2])
    for module, names in _ROOMS.items()
    for name in names.split()
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'framework' has no attribute {name!r}")
    module, inside = _HOMES[name]
    if module in _LOADS_TORCH:
        from framework.versions import require_versions

        require_versions()  # else the import of a version that is not supported fails somewhere inside
    return getattr(import_module(module), inside)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
