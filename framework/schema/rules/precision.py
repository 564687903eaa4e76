"""Rules about dtypes of weights and products, and the card's support."""

from collections.abc import Iterator

from framework.schema.choices import Fp8, MixedPrecision, PeftMethod, PeftSaveMode, TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import facts_of
from framework.schema.rules.conflict import Conflict

LEGAL_PRECISION = "float32 with none, float32 with bf16 or fp16 (float32 masters), or bfloat16 with none"


_TRAINED = {("float32", "none"), ("float32", "bf16"), ("float32", "fp16"), ("bfloat16", "none")}


_FROZEN = {*_TRAINED, ("bfloat16", "bf16"), ("float16", "fp16")}
"""A frozen base may stay in the dtype of its autocast: the adapter, not the base, holds the float32 masters."""


_UNSLOTH = "github.com/unslothai/unsloth, unsloth/models/loader.py, FORCE_FLOAT32 (2026)"
OVERFLOW_IN_FLOAT16 = {
    "gemma2": "huggingface.co/blog/gemma2: the 27B gives erratic outputs in float16",
    "gemma3": "unsloth.ai/blog/gemma3: activations above 65504 in float16 autocast",
    "gemma3n": "unsloth.ai/blog/gemma-3n",
    "gemma4": f"{_UNSLOTH}: gradient norms are NaN; github.com/unslothai/unsloth-zoo/pull/600",
    "glm4_moe": f"{_UNSLOTH}: gradient norms are NaN",
    "gpt_oss": _UNSLOTH,
    "qwen3_5": f"{_UNSLOTH}: the gated delta layers give NaN",
    "qwen3_moe": f"{_UNSLOTH}: gradient norms are NaN",
    "t5": "github.com/huggingface/transformers/pull/10956: activations of 2.8e5",
    "mt5": "as t5",
    "umt5": "as t5",
}
"""Families whose activations or gradients exceed float16's range (65504), with the source. They are computed in
bfloat16 or float32. A name includes model types that begin with it (`gemma3_text`, `qwen3_5_moe`)."""


def overflows_in_float16(model_type: object) -> bool:
    """Whether a model type belongs to a family that is known to overflow in float16."""
    kind = str(model_type)
    return any(kind == family or kind.startswith(f"{family}_") for family in OVERFLOW_IN_FLOAT16)


def precision_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Combinations of weight dtype and autocast that cannot train."""
    held, computed = config.model.torch_dtype_str, config.training.mixed_precision_dtype
    kind = config.model.architecture.get("model_type") if config.model.architecture is not None else None
    if computed is MixedPrecision.FP16 and overflows_in_float16(kind):
        keys = ("training.mixed_precision_dtype", "model.architecture")
        yield Conflict(keys, f"{kind} is known to overflow in float16", config.gpu.instead_of_float16, is_warning=True)
    if held in (None, TorchDtype.AUTO):
        return
    legal = _FROZEN if config.training.use_peft else _TRAINED
    pairs = [(str(held), str(word)) for word in ([computed] if computed else MixedPrecision)]
    if not legal.intersection(pairs):
        message = (
            f"model.torch_dtype_str {held} with training.mixed_precision_dtype {computed or 'unset'} "
            f"cannot train {'this adapter' if config.training.use_peft else 'these weights'}"
        )
        both = ("model.torch_dtype_str", "training.mixed_precision_dtype", "training.use_peft")
        yield Conflict(both, message, LEGAL_PRECISION)


def loss_scale_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Gradients that torch's scaler cannot unscale: it has no CUDA kernel for bfloat16. It refuses float16, which
    `adapter_conflicts` reports if written."""
    training, adapter = config.training, config.peft.adapter_dtype
    if training.mixed_precision_dtype is not MixedPrecision.FP16 or not training.use_peft:
        return
    held = _stored(config) if adapter is TorchDtype.AUTO else adapter
    if held == TorchDtype.BFLOAT16 or (held == TorchDtype.FLOAT16 and adapter is TorchDtype.AUTO):
        message = f"fp16 autocast scales the loss, and gradients of an adapter in {held} cannot be scaled back"
        keys = ("peft.adapter_dtype", "training.mixed_precision_dtype")
        yield Conflict(keys, message, "peft.adapter_dtype unset: float32")


SMALL_RATE = 4e-5
"""0.02 x 2^-9: half the last bit of a bfloat16 weight of 0.02, the usual standard deviation at initialization. Adam
moves a weight by about the learning rate, so a smaller one is rounded away."""
NORM_RATE = 2**-9
"""Half the last bit below a bfloat16 weight of 1.0, where norm weights begin."""


def rounding_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Updates that bfloat16 weights round away."""
    training, rate = config.training, config.training.learning_rate
    if facts_of(training.optimizer).keeps_small_updates:
        return
    if training.use_peft:
        adapter = config.peft.adapter_dtype
        held = _stored(config) if adapter == TorchDtype.AUTO else adapter
        if held == TorchDtype.BFLOAT16 and rate < SMALL_RATE:
            message = (
                f"a learning rate of {rate:g} is below {SMALL_RATE:g}: most updates of a bfloat16 adapter round away"
            )
            keys = ("peft.adapter_dtype", "training.learning_rate")
            expected = "peft.adapter_dtype unset: float32, or training.optimizer=anyprecision_adamw"
            yield Conflict(keys, message, expected, is_warning=True)
    elif _stored(config) == TorchDtype.BFLOAT16 and rate < NORM_RATE:
        weights, limit = ("most updates of", SMALL_RATE) if rate < SMALL_RATE else ("small updates of", NORM_RATE)
        message = (
            f"a learning rate of {rate:g} is below {limit:.3g}: {weights} bfloat16 weights round away, and norm "
            "weights of 1.0 never move"
        )
        masters = "model.torch_dtype_str=float32 (masters: 8 bytes a parameter more with AdamW)"
        expected = f"{masters}, or training.optimizer=anyprecision_adamw (none more: rounds up or down at random)"
        yield Conflict(("model.torch_dtype_str", "training.learning_rate"), message, expected, is_warning=True)


def _stored(config: TrainingConfig) -> str | None:
    """The dtype of the weights as far as the recipe states it; `auto` is the checkpoint's."""
    held = config.model.torch_dtype_str
    if held != TorchDtype.AUTO:
        return held
    written = config.model.architecture
    found = written and (written.get("dtype") or written.get("torch_dtype"))
    return str(found) if found else None


def fp8_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Settings that conflict with fp8 products."""
    training, key = config.training, "training.fp8"
    if training.fp8 not in (Fp8.TENSORWISE, Fp8.ROWWISE):
        return
    if training.use_peft:
        yield from _float8_base_conflicts(config)
    held, computed = config.model.torch_dtype_str, training.mixed_precision_dtype
    in_float32 = held == TorchDtype.FLOAT32 and computed == MixedPrecision.NONE
    if computed == MixedPrecision.FP16 or in_float32:
        keys = (key, "training.mixed_precision_dtype", "model.torch_dtype_str")
        yield Conflict(keys, "fp8 products take and give bfloat16", "bf16 autocast, or bfloat16 weights")
    if training.compile is False:
        message = "without compilation the casts to fp8 are separate kernels, and cost more than is saved"
        yield Conflict((key, "training.compile"), message, "training.compile=true", is_warning=True)


def _float8_base_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Settings that conflict with a frozen base in fp8, which has no half-precision weights."""
    key, peft, held = "training.fp8", config.peft, config.model.torch_dtype_str
    if peft.q_lora:
        message = "the base is already quantized to 4 or 8 bits"
        yield Conflict((key, "peft.q_lora"), message, "peft.q_lora: false, or fp8: none")
    if peft.peft_method is PeftMethod.DORA:
        message = "dora needs norms of the base's full-precision weights at each step"
        yield Conflict((key, "peft.peft_method"), message, "lora, or fp8: none")
    if peft.peft_save_mode is not PeftSaveMode.ADAPTER_ONLY:
        message = "the exported base would be the one in 8 bits"
        works = "adapter_only, and `tunesmith merge` afterwards, which uses the base's original weights"
        yield Conflict((key, "peft.peft_save_mode"), message, works)
    if config.model.offload_frozen_base is True:
        message = "an 8-bit base in host memory is not tested"
        yield Conflict((key, "model.offload_frozen_base"), message, "false: in 8 bits it takes half the memory")
    if config.gpu.count > 1 and not config.fsdp.is_sharded:
        yield Conflict((key, "gpu.count"), "copies of an 8-bit base on several GPUs are not tested", "fp8: none")
    if held in (TorchDtype.FLOAT16, TorchDtype.FLOAT32):
        message = f"products of an 8-bit base are bfloat16, and the base is {held}"
        yield Conflict((key, "model.torch_dtype_str"), message, "bfloat16")


def card_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """bfloat16 on cards without it; not in `framework.memory.requirements`, since it depends on combinations."""
    card = config.gpu
    if not card.lacks_bfloat16:
        return
    named = f"{card.name} has capability {card.capability}"
    if config.training.mixed_precision_dtype == MixedPrecision.BF16:
        keys = ("training.mixed_precision_dtype", "gpu.name")
        works = "none" if config.fsdp.is_sharded else "fp16 (with float32 weights), or none"
        yield Conflict(keys, f"bf16 needs capability 8.0, and {named}", works)
    if config.model.torch_dtype_str == TorchDtype.BFLOAT16:
        keys = ("model.torch_dtype_str", "gpu.name")
        yield Conflict(keys, f"bfloat16 needs capability 8.0, and {named}", "float32")


def wide_base_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """A frozen base in float32 under autocast, which computes with a half-precision copy anyway."""
    is_computed_wide = config.training.mixed_precision_dtype == MixedPrecision.NONE or config.gpu.name == "cpu"
    if config.training.use_peft and config.model.torch_dtype_str == TorchDtype.FLOAT32 and not is_computed_wide:
        message = "a frozen base in float32 takes 2 bytes a parameter more than in half precision, for no benefit"
        expected = "model.torch_dtype_str unset: the checkpoint's dtype; the adapter is float32 anyway"
        yield Conflict(("model.torch_dtype_str", "training.use_peft"), message, expected, is_warning=True)
