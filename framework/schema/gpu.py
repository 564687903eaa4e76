"""`gpu`: facts of the card that a run has to fit, from a preset or a calibration."""

from typing import Annotated

from pydantic import Field

from framework.schema.params import FrozenMapping, Number, Params
from framework.schema.training import Count, Positive

Rate = Annotated[Number, Field(gt=0)]
Capability = Annotated[str, Field(pattern=r"^\d+\.\d+$")]


class HostParams(Params):
    """Times of the host processor relative to those that the planner was fitted on; no memory. `tunesmith doctor
    --calibrate` measures them, also without a card."""

    python: Rate = 1.0
    """Calls of modules and hooks, and launches by Python code (triton, bitsandbytes)."""
    operator: Rate = 1.0
    """Operators of torch in forward, in a recomputation, in the optimizer's step and in compiled code."""
    view: Rate = 1.0
    """Operators that launch nothing."""
    backward: Rate = 1.0
    """Nodes of autograd."""
    graph: Rate = 1.0
    """Entering a compiled graph."""


class GPUParams(Params):
    """One kind of card and how many of them. Rates are dense peaks; bytes are bytes."""

    name: str = "cpu"
    """Name of the card, as `tunesmith list gpus` shows it."""
    count: Positive = 1
    """Number of cards; the world size of the run."""
    capacity_bytes: Count | None = None
    """Memory the driver reports as total (`torch.cuda.mem_get_info()[1]`)."""
    usable_bytes: Count | None = None
    """Memory free on an idle card, before any context: capacity minus the driver's own memory."""
    capability: Capability | None = None
    """CUDA compute capability, for example `"8.9"`. Unset: not a CUDA card."""
    multiprocessors: Positive | None = None
    """Streaming multiprocessors; sizes some kernel workspaces."""
    bandwidth_bytes_per_second: Rate | None = None
    """Device memory bandwidth."""
    fp32_flops: Rate | None = None
    """Dense float32 rate without tensor cores."""
    tf32_flops: Rate | None = None
    """Dense tf32 tensor-core rate."""
    bf16_flops: Rate | None = None
    """Dense bfloat16 tensor-core rate. Unset: the card has no native bfloat16."""
    fp16_flops: Rate | None = None
    """Dense float16 tensor-core rate."""
    fp8_flops: Rate | None = None
    """Dense fp8 tensor-core rate. Unset: the card has none."""
    product_seconds: Annotated[Number, Field(ge=0)] | None = None
    """Start and end of a matrix product on the card. Unset: as measured on an H200."""
    link_bytes_per_second: Rate | None = None
    """Card-to-card bandwidth, one direction."""
    host_link_bytes_per_second: Rate | None = None
    """Card-to-host bandwidth, one direction."""
    context_bytes: Count | None = None
    """Device memory of a CUDA context with the kernels of a training step loaded, not seen by torch's counters."""
    cublas_workspace_bytes: Count | None = None
    """Workspace that cuBLAS holds per handle and stream."""
    l2_cache_bytes: Count = 62914560
    """Size of the L2 cache. The first step of compiled code allocates as much while it times kernels. Unset: an
    H200's."""
    host: HostParams | None = None
    """Speed of the host processor. Unset: step times are the mean over hosts of several speeds."""
    sources: FrozenMapping = FrozenMapping()
    """Field -> source of its value (data sheet, or measurement with driver, torch version and date). `others` holds for
    all fields without an entry."""

    @property
    def lacks_bfloat16(self) -> bool:
        """Whether it is a CUDA card without bfloat16 products: T4, V100 and older."""
        return self.capability is not None and int(self.capability.partition(".")[0]) < 8

    @property
    def instead_of_float16(self) -> str:
        """Alternatives to fp16 for `training.mixed_precision_dtype`, for a message."""
        return "none (this card has no bfloat16)" if self.lacks_bfloat16 else "bf16, or none"
