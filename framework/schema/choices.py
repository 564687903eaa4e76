"""Enumerations of a recipe's values, with accepted alternative spellings."""

from enum import StrEnum
from typing import Any, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Choice(StrEnum):
    """A value from a closed set, case-insensitive; `other_spellings` are accepted as well."""

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        """Lower-case spelling -> value."""
        return {}

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        word = cls.other_spellings().get(value.lower(), value.lower())
        return next((member for member in cls if member.value.lower() == word.lower()), None)

    @classmethod
    def parse(cls, value: object) -> Self:
        """The member for `value`. Raises a pydantic error that names all choices."""
        try:
            return cls(value)  # type: ignore[arg-type]
        except ValueError:
            choices = [member.value for member in cls]
            raise PydanticCustomError(
                "choice", "{given} is not one of: {choices}", {"given": repr(value), "choices": ", ".join(choices)}
            ) from None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(
                cls, core_schema.literal_schema([member.value for member in cls])
            ),
            python_schema=core_schema.no_info_plain_validator_function(cls.parse),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda member: str(member)),
        )


class PreferenceLoss(Choice):
    """Losses of preferences, by the names of TRL and the papers."""

    DPO = "dpo"
    IPO = "ipo"
    ORPO = "orpo"
    SIMPO = "simpo"
    KTO = "kto"

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {"sigmoid": "dpo", "apo_zero_unpaired": "kto"}


class Divergence(Choice):
    """Divergence between the next-token distributions of student and teacher."""

    FORWARD_KL = "forward_kl"
    REVERSE_KL = "reverse_kl"
    JSD = "jsd"

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {"kl": "forward_kl", "js": "jsd"}


class Rounding(Choice):
    """How bf16 weights keep updates smaller than half their last bit."""

    KAHAN = "kahan"
    STOCHASTIC = "stochastic"


class Fp8(Choice):
    """Matrix products in 8-bit floats, by the number of scales per operand."""

    NONE = "none"
    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"


class OptimizerOffload(Choice):
    """Where optimizer states are kept between steps."""

    NONE = "none"
    HOST = "host"
    NVME = "nvme"

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {"cpu": "host", "disk": "nvme"}


class EmaDevice(Choice):
    """Where the moving average of the weights is kept."""

    DEVICE = "device"
    HOST = "host"

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {"cpu": "host", "cuda": "device", "gpu": "device"}


class MixedPrecision(Choice):
    """dtype of autocast."""

    NONE = "none"
    BF16 = "bf16"
    FP16 = "fp16"

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "no": "none"} | {
            "fp32": "none",
            "float32": "none",
        }


class TorchDtype(Choice):
    """dtype of the weights; `auto` is the checkpoint's own, as in Hugging Face."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}


class Scheduler(Choice):
    """Shapes of the learning rate after warm-up."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    INVERSE_SQRT = "inverse_sqrt"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    CONSTANT = "constant"

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {"constant_with_warmup": "constant", "wsd": "warmup_stable_decay"}


class CheckpointingPolicy(Choice):
    """What a checkpointed block keeps in addition to its input."""

    FULL = "full"
    SAVE_ATTENTION = "save_attention"
    SAVE_MATMULS = "save_matmuls"


class CompileScope(Choice):
    """Unit of compilation."""

    BLOCK = "block"
    MODEL = "model"


class OnOutOfMemory(Choice):
    """Reaction to running out of memory."""

    STOP = "stop"
    SHRINK = "shrink"


class Tracker(Choice):
    """Trackers in addition to `metrics.jsonl`, by package name."""

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {"comet": "comet_ml"}

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    COMET_ML = "comet_ml"
    SWANLAB = "swanlab"
    TRACKIO = "trackio"


class Attention(Choice):
    """Attention kernels."""

    EAGER = "eager"
    SDPA = "sdpa"
    FLASH_ATTENTION_2 = "flash_attention_2"
    FLASH_ATTENTION_3 = "flash_attention_3"
    FLASH_ATTENTION_4 = "flash_attention_4"
    FLEX_ATTENTION = "flex_attention"
    RING_ATTENTION = "ring_attention"

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {
            "flash_attention2": "flash_attention_2",
            "flash_attention3": "flash_attention_3",
            "flash_attention4": "flash_attention_4",
            "flex": "flex_attention",
        }


class SdpaBackend(Choice):
    """Kernels of torch's scaled_dot_product_attention."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {"cudnn_attention": "cudnn", "flash_attention": "flash", "efficient_attention": "efficient"} | {
            "mem_efficient": "efficient"
        }


class PeftMethod(Choice):
    """Kinds of adapters."""

    LORA = "lora"
    RSLORA = "rslora"
    DORA = "dora"
    PISSA = "pissa"
    OLORA = "olora"
    LOFTQ = "loftq"
    VERA = "vera"
    IA3 = "ia3"
    OFT = "oft"
    PREFIX = "prefix"
    PROMPT = "prompt"


class LoraInit(Choice):
    """Initialization of LoRA's A matrices; B starts at 0."""

    KAIMING = "kaiming"
    GAUSSIAN = "gaussian"
    EVA = "eva"


class PeftSaveMode(Choice):
    """Contents of the export of an adapter run."""

    ADAPTER_ONLY = "adapter_only"
    ADAPTER_AND_BASE_MODEL = "adapter_and_base_model"
    MERGED = "merged"


class Quantization(Choice):
    """4-bit data types of bitsandbytes."""

    NF4 = "nf4"
    FP4 = "fp4"


class ShardingStrategy(Choice):
    """What FSDP shards over the ranks."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    HYBRID_SHARD = "HYBRID_SHARD"
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"
    NO_SHARD = "NO_SHARD"


class BackwardPrefetch(Choice):
    """When FSDP gathers the next block's weights in backward."""

    BACKWARD_PRE = "BACKWARD_PRE"
    BACKWARD_POST = "BACKWARD_POST"
    NONE = "NONE"

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {"no_prefetch": "NONE"}


class StateDictType(Choice):
    """Formats of a sharded checkpoint."""

    SHARDED_STATE_DICT = "SHARDED_STATE_DICT"
    FULL_STATE_DICT = "FULL_STATE_DICT"


class RowFormat(Choice):
    """Formats of rows."""

    TEXT = "text"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    PROMPT_COMPLETION = "prompt_completion"
    ALPACA = "alpaca"
    PREFERENCE = "preference"
    UNPAIRED = "unpaired"
    LABELLED = "labelled"
    TOKENS = "tokens"


class Mixing(Choice):
    """How sources are combined; the last two sample each row's source by weight, as `interleave_datasets` does."""

    CONCATENATE = "concatenate"
    FIRST_EXHAUSTED = "first_exhausted"
    ALL_EXHAUSTED = "all_exhausted"


class Supervise(Choice):
    """Which tokens the loss is computed on."""

    ASSISTANT = "assistant"
    LAST = "last"
    COMPLETION = "completion"
    ALL = "all"


class Truncation(Choice):
    """Handling of rows longer than `model.model_max_length`."""

    DROP = "drop"
    LEFT = "left"
    RIGHT = "right"
    ERROR = "error"
