"""THE table: one row for each knob that trades memory for something else. A knob without a row does not exist.

From it come the order in which a search tries moves, the advice after an out-of-memory error, the verification at
start-up, the test of every pair, and docs/levers.md. No torch.

Whoever builds a lever adds its row here and its reader to `framework.build.verify`. Figures of time carry where they
are from, those of an H200 benchmarks/results/levers_h200.json; "not measured" where there is none.
`tunesmith levers KEY` prints a row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from framework.schema.params import FrozenMapping


@dataclass(frozen=True)
class Setting:
    """One value of a lever, compared with the lever's first setting."""

    value: Any
    time: str = ""
    """What it costs in time, with the source of the figure; empty for the first setting."""
    changes: str = ""
    """What is different in the trajectory of training. Empty: nothing but rounding."""
    hardware: str = ""
    """What it runs on, of `cpu`, `cuda`, `cuda 8.9` (from that capability on) and `cuda 9.0 to 9.0`, with commas
    between; empty: anything. `framework.memory.requirements` refuses the rest before anything is loaded."""
    package: str = ""
    """Distributions that must be installed, with commas between; empty: none beyond ours."""
    beside: Mapping[str, Any] = FrozenMapping()
    """Other keys without which this value has no effect, with the values they need."""


@dataclass(frozen=True)
class Lever:
    """A knob: where it is, what each setting costs, which terms of the ledger it moves, and who reads it back."""

    key: str
    settings: tuple[Setting, ...]
    """The plain setting first, then from free to dear."""
    shrinks: tuple[str, ...]
    """Terms of `framework.memory.ledger.Terms` that get smaller."""
    reader: str
    """Name in `framework.build.verify.READERS`."""
    line: str

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(setting.value for setting in self.settings)

    @property
    def exact(self) -> bool:
        """Whether every setting follows the trajectory of the first, but for rounding."""
        return not any(setting.changes for setting in self.settings)

    def to_json(self) -> dict[str, Any]:
        settings = [
            {
                "value": setting.value,
                "time": setting.time,
                "exact": not setting.changes,
                "changes": setting.changes,
                "hardware": setting.hardware,
                "package": setting.package,
                "beside": dict(setting.beside),
            }
            for setting in self.settings
        ]
        facts = {"key": self.key, "line": self.line, "shrinks": list(self.shrinks), "exact": self.exact}
        return {**facts, "reader": self.reader, "settings": settings}


_ADAPTED = {"training.use_peft": True}
_QUANTIZED = {**_ADAPTED, "peft.q_lora": True}
_COMPILED = {"training.compile": True}
_CHECKPOINTED = {"training.enable_gradient_checkpointing": True}
_PREFERENCE = {"training.task": "preference"}
_GLOBAL_8 = {"training.global_batch_size": 8}
_UNCLIPPED = {"training.max_grad_norm": 0.0, "training.global_batch_size": None}
_SHARED = {"model.attn_implementation": "ring_attention"}
_SHARDED = {"fsdp.enable_fsdp": True}
_PURE_BF16 = {"model.torch_dtype_str": "bfloat16", "training.mixed_precision_dtype": "none"}
_ROUNDED = {"training.optimizer": "anyprecision_adamw", **_PURE_BF16}

BATCH = (
    Lever(
        "training.per_device_train_batch_size",
        (
            Setting(8),
            Setting(4, "-1.5 % tokens/s (1B); H200, 2026-11", beside={"training.global_batch_size": 8}),
            Setting(2, "not measured", beside={"training.global_batch_size": 8}),
            Setting(
                1,
                "-30 % tokens/s (1B, 2048 tokens a row); H200, 2026-11",
                beside={"training.global_batch_size": 8},
            ),
        ),
        ("activations", "logits_and_loss"),
        "micro_batches",
        "Rows per forward pass. With the same global batch the loss is the same mean over the same tokens.",
    ),
    Lever(
        "training.gradient_accumulation_steps",
        (
            Setting(1),
            Setting(
                4,
                "+3 % tokens/s, for the update is shared (1B); H200, 2026-11",
                "a larger global batch",
            ),
        ),
        (),
        "micro_batches",
        "Micro batches per optimizer step: a larger global batch at the memory of one micro batch.",
    ),
    Lever(
        "training.per_device_eval_batch_size",
        (Setting(8), Setting(1, "evaluation alone is slower (not measured)")),
        ("logits_and_loss", "temporaries"),
        "eval_batches",
        "Rows per forward pass of evaluation, which keeps no activations but builds one batch's logits.",
    ),
    Lever(
        "model.model_max_length",
        (
            Setting(2048),
            Setting(1024, "none: fewer tokens", "longer rows are cut or dropped (`data.truncation`)"),
            Setting(512, "none: fewer tokens", "longer rows are cut or dropped (`data.truncation`)"),
        ),
        ("activations", "logits_and_loss"),
        "longest_row",
        "Longest row in tokens. Activations grow in proportion to it (eager attention with its square).",
    ),
)

ROWS = (
    Lever(
        "data.packing",
        (
            Setting(False),
            Setting(
                True,
                "no padding is computed; sdpa with a mask is slower than without (not measured)",
                "a row of the batch is a pack of rows: more tokens a step, fewer steps",
            ),
        ),
        (),
        "packed_rows",
        "Rows end to end in packs of full length. Moves no memory of the worst batch but adds the mask of `eager` and "
        "`sdpa`, rows x length x length.",
    ),
    Lever(
        "data.padding_free",
        (
            Setting(False),
            Setting(True, "no padding is computed; slower in `sdpa`, whose mask is of all tokens (not measured)"),
        ),
        (),
        "rows_end_to_end",
        "Rows of a micro batch end to end in one. The worst batch has no padding to save; the mask of `eager` and "
        "`sdpa` grows with the square of all its tokens.",
    ),
    Lever(
        "data.pad_to_multiple_of",
        (Setting(None), Setting(64, "the padding; under `compile` fewer compilations (not measured)")),
        (),
        "padded_lengths",
        "Widths of micro batches in few sizes. Moves no memory of the worst batch where it divides the longest row.",
    ),
    Lever(
        "data.group_by_length",
        (Setting(False), Setting(True, "less padding is computed (not measured)", "which rows meet in a step")),
        (),
        "grouped_rows",
        "Steps of rows of about the same length. Moves no memory of the worst batch.",
    ),
)

RECOMPUTE = (
    Lever(
        "training.enable_gradient_checkpointing",
        (
            Setting(False),
            Setting(
                True,
                "-17.5 % tokens/s in full fine-tuning (1B), -42 % with LoRA (8B); H200, 2026-11",
            ),
        ),
        ("activations",),
        "checkpointed_blocks",
        "Keep each block's input alone and compute the block again in backward.",
    ),
    Lever(
        "training.gradient_checkpointing_every",
        (
            Setting(4, beside=_CHECKPOINTED),
            Setting(
                2,
                "-10 % tokens/s in full fine-tuning (1B), -28 % with LoRA (8B); H200, 2026-11",
                beside=_CHECKPOINTED,
            ),
            Setting(
                1,
                "-17.5 % tokens/s in full fine-tuning (1B), -42 % with LoRA (8B); H200, 2026-11",
                beside=_CHECKPOINTED,
            ),
        ),
        ("activations",),
        "checkpointed_blocks",
        "Checkpoint each n-th block only; the others keep their activations.",
    ),
    Lever(
        "training.gradient_checkpointing_policy",
        (
            Setting("save_matmuls", beside=_CHECKPOINTED),
            Setting(
                "save_attention",
                "against `full`: -12 % tokens/s (1B), -47 % with LoRA (8B): Python at each operator; H200, 2026-11",
                beside=_CHECKPOINTED,
            ),
            Setting(
                "full",
                "+3.4 % tokens/s against `save_matmuls` (1B); H200, 2026-11",
                beside=_CHECKPOINTED,
            ),
        ),
        ("activations",),
        "checkpointed_blocks",
        "What a checkpointed block keeps besides its input: results of its products and attention, or of attention.",
    ),
    Lever(
        "training.activation_offload",
        (
            Setting(False),
            Setting(
                True,
                "-70 % tokens/s (1B), -66 % with LoRA (8B): copies outlast the pass beside them; H200, 2026-11",
            ),
        ),
        ("activations",),
        "offloaded_activations",
        "What blocks keep goes to pinned host memory and comes back for backward; with checkpointing, their inputs.",
    ),
    Lever(
        "training.activation_memory_budget",
        (
            Setting(1.0, beside=_COMPILED),
            Setting(0.5, "-4.6 % tokens/s (1B); H100, h100_truth2.jsonl, 2026-11", beside=_COMPILED),
            Setting(0.3, "-9.4 % tokens/s (1B); H200, 2026-11", beside=_COMPILED),
        ),
        ("activations",),
        "memory_budget",
        "Share of a compiled block's activations that are kept; what is cheapest to compute again goes first.",
    ),
)

COMPILATION = (
    Lever(
        "training.compile",
        (
            Setting(False),
            Setting(
                True,
                "+27 % tokens/s (1B), +46 % with LoRA (8B); H200, 2026-11; the first step is longer by 8 s and more",
                hardware="cpu, cuda 7.0",
            ),
        ),
        ("activations", "temporaries"),
        "compiled_runs",
        "Fuse the elementwise work of the blocks: fewer kernels, and fewer activations to keep.",
    ),
    Lever(
        "training.compile_scope",
        (
            Setting("block", beside=_COMPILED),
            Setting(
                "model",
                "-13.6 % tokens/s against blocks (1B); H200, 2026-11",
                beside=_COMPILED,
            ),
        ),
        ("activations", "temporaries"),
        "compiled_regions",
        "What is compiled at once: a block, whose code all equal blocks share, or the whole model.",
    ),
)

PRECISION = (
    Lever(
        "model.torch_dtype_str",
        (
            Setting("float32"),
            Setting(
                "bfloat16",
                "+15 % tokens/s against float32 under bf16 autocast (1B); H100, SPEED.md section 3, 2026-11",
                "weights and states have 8 bits of precision: updates below half a last bit round away",
                beside={"training.mixed_precision_dtype": "none"},
            ),
        ),
        ("weights", "gradients", "optimizer", "activations", "autocast_copies"),
        "weight_dtypes",
        "dtype of the weights, and so of gradients and states: 16 bytes a parameter in float32, 8 in bfloat16 (AdamW).",
    ),
    Lever(
        "training.mixed_precision_dtype",
        (
            Setting("none"),
            Setting(
                "bf16",
                "8 times the tokens/s of float32 without tf32 (1B); H200, 2026-11",
                "matrix products round to bfloat16",
            ),
            Setting(
                "fp16",
                "8 times the tokens/s of float32 without tf32, 3 % less than bf16 (1B); H200, 2026-11",
                "matrix products round to float16; steps whose gradients overflow are skipped",
            ),
        ),
        ("activations",),
        "autocast",
        "Matrix products in half precision beside float32 weights, the masters; adds a half-precision copy of them.",
    ),
    Lever(
        "training.tf32",
        (
            Setting(False),
            Setting(
                True,
                "3.3 times the tokens/s of float32 without (1B); H200, 2026-11",
                "float32 products round their operands to 10 bits",
                hardware="cuda 8.0",
            ),
        ),
        (),
        "float32_products",
        "Speed of the products that stay in float32; memory is the same.",
    ),
)

FP8 = (
    Lever(
        "training.fp8",
        (
            Setting("none"),
            Setting(
                "tensorwise",
                "+11 % tokens/s against compiled bfloat16 (1B); H200, 2026-11",
                "operands of products round to 3 bits (gradients to 2), one scale each",
                "cuda 8.9",
                "torchao",
                beside=_PURE_BF16,
            ),
            Setting(
                "rowwise",
                "-8.4 % tokens/s against compiled bfloat16 (1B); H200, 2026-11",
                "operands of products round to 3 bits, one scale a row",
                "cuda 8.9",
                "torchao",
                beside=_PURE_BF16,
            ),
        ),
        (),
        "float8_products",
        "Linear layers of the blocks multiply in 8-bit floats; embeddings, head, norms and attention do not. Without "
        "`training.compile` the casts are kernels of their own and cost more than the products save.",
    ),
)

OPTIMIZERS = (
    Lever(
        "training.optimizer",
        (
            Setting("adamw_torch_fused"),
            Setting("adamw_torch", "-3.8 % tokens/s (1B); H100, SPEED.md section 3, 2026-11"),
            Setting("sgd", "+4.0 % tokens/s (1B); H100, SPEED.md section 3, 2026-11", "another optimizer: no momentum"),
            Setting(
                "adafactor", "-19.6 % tokens/s (1B); H100, SPEED.md section 3, 2026-11", "another optimizer: factored"
            ),
            Setting(
                "schedule_free_adamw",
                "-5.5 % tokens/s (1B); H200, 2026-11",
                "another optimizer: averaged weights",
            ),
            Setting(
                "sophia",
                "-1.8 % tokens/s (1B); H200, 2026-11",
                "another optimizer: clipped by curvature",
            ),
            Setting(
                "muon",
                "-35 % tokens/s (1B, 8,192 tokens a step); H200, 2026-11",
                "another optimizer: orthogonal updates of matrices",
            ),
            Setting(
                "galore_adamw",
                "-13 % tokens/s between projections (1B); H200, 2026-11",
                "another optimizer: low-rank moments",
            ),
            Setting(
                "apollo_adamw",
                "-21.5 % tokens/s (1B); H200, 2026-11",
                "another optimizer: scaled by low-rank moments",
            ),
            Setting("lion", "-0.2 % tokens/s (1B); H200, 2026-11", "another optimizer: signs"),
            Setting(
                "lion_8bit",
                "-12.3 % tokens/s (1B); H200, 2026-11",
                "another optimizer: signs of 8-bit codes",
                "",
                "bitsandbytes",
            ),
            Setting(
                "paged_lion_8bit",
                "-14.9 % tokens/s (1B); H200, 2026-11",
                "another optimizer: signs of codes",
                "cuda",
                "bitsandbytes",
            ),
            Setting(
                "anyprecision_adamw",
                "+0.2 % tokens/s (1B); H200, 2026-11",
                "bfloat16 states, rounded stochastically",
                "cpu, cuda 8.0",
                beside=_PURE_BF16,
            ),
            Setting(
                "adamw_8bit",
                "-20 % tokens/s (1B); H200, 2026-11",
                "states are 8-bit codes",
                "",
                "bitsandbytes",
            ),
            Setting(
                "paged_adamw_32bit",
                "-16 % tokens/s (1B); H200, 2026-11",
                "",
                "cuda",
                "bitsandbytes",
            ),
            Setting(
                "paged_adamw_8bit",
                "-27 % tokens/s (1B); H200, 2026-11",
                "states are 8-bit codes",
                "cuda",
                "bitsandbytes",
            ),
            Setting(
                "adamw_torchao_8bit", "-28 % tokens/s (1B); H200, 2026-11", "states are 8-bit codes", "cuda", "torchao"
            ),
            Setting(
                "adamw_torchao_4bit", "-30 % tokens/s (1B); H200, 2026-11", "states are 4-bit codes", "cuda", "torchao"
            ),
        ),
        ("optimizer", "temporaries"),
        "optimizer",
        "Bytes of state a parameter: docs/optimizers.md. AdamW holds two copies of the trained weights; `adamw_torch` "
        "temporaries of their size too. Paged states leave torch's counters, not the card, until it is full.",
    ),
    Lever(
        "training.rounding",
        (
            Setting("kahan", beside=_ROUNDED),
            Setting(
                "stochastic",
                "+1.2 % tokens/s (1B); H200, 2026-11",
                "rounds at random instead of carrying the rest",
                beside=_ROUNDED,
            ),
        ),
        ("optimizer",),
        "rounding",
        "How `anyprecision_adamw` keeps updates below half a last bit: a compensation of 2 bytes each, or chance.",
    ),
    Lever(
        "training.optimizer_in_backward",
        (
            Setting(False, beside=_UNCLIPPED),
            Setting(True, "-3.3 % tokens/s (1B); H200, 2026-11", beside=_UNCLIPPED),
        ),
        ("gradients", "temporaries"),
        "optimizer_in_backward",
        "Update each weight when its gradient is ready and free it: no gradients outlive backward.",
    ),
    Lever(
        "training.optimizer_offload",
        (
            Setting("none"),
            Setting(
                "host",
                "-52 % tokens/s (1B, 8,192 tokens a step): two copies of the states over the link; H200, 2026-11",
            ),
            Setting(
                "nvme",
                "-86 % tokens/s (1B, 8,192 tokens a step): two copies over link and disk; H200, 2026-11",
                beside={"training.optimizer_offload_folder": "/tmp"},
            ),
        ),
        ("optimizer",),
        "offloaded_states",
        "Optimizer states stay in host memory or in a file; one weight's states at a time come to the device.",
    ),
)

KERNELS = (
    Lever(
        "model.attn_implementation",
        (
            Setting("eager"),
            Setting("sdpa", "+51 % tokens/s (1B, 1024 tokens); H200, 2026-11"),
            Setting(
                "flex_attention",
                "+45 % tokens/s (1B, 1024 tokens), compiled at the first step; H200, 2026-11",
                hardware="cuda",
                package="triton",
            ),
            Setting("flash_attention_2", "as `sdpa` (not measured)", hardware="cuda 8.0", package="flash-attn"),
            Setting("flash_attention_3", "not measured", hardware="cuda 9.0 to 9.0", package="flash-attn-3"),
            Setting("flash_attention_4", "not measured", hardware="cuda 9.0 to 10.3", package="flash-attn-4"),
        ),
        ("activations",),
        "attention_kernel",
        "`eager` keeps sequence x sequence scores of every head; fused kernels keep none.",
    ),
    Lever(
        "model.sdpa_backend",
        (
            Setting("math"),
            Setting("efficient", "faster (not measured)", hardware="cuda"),
            Setting("flash", "+85 % tokens/s (1B, 1024 tokens); H200, 2026-11", hardware="cpu, cuda 8.0"),
            Setting(
                "cudnn",
                "+84 % tokens/s (1B, 1024 tokens); torch's own choice on Hopper; H200, 2026-11",
                hardware="cuda 8.0",
            ),
        ),
        ("activations",),
        "sdpa_kernel",
        "Which kernel `sdpa` must take; unset, torch picks by card, dtype and head width. `math` keeps all scores.",
    ),
    Lever(
        "model.enable_liger_kernel",
        (
            Setting(False),
            Setting(
                True,
                "+24 % tokens/s in full fine-tuning (1B), +11 % with LoRA (8B); H200, 2026-11",
                hardware="cuda 7.0",
                package="liger-kernel, triton",
            ),
        ),
        ("activations", "temporaries"),
        "liger_kernels",
        "Norms, MLPs and rotary positions as one Triton kernel each, which keep less for backward. Not the loss: "
        "`model.chunked_loss` never builds the logits, faster than Liger's own.",
    ),
    Lever(
        "model.chunked_loss",
        (
            Setting(False),
            Setting(1024, "-5.1 % tokens/s (1B), -1.2 % with LoRA (8B); H200, 2026-11"),
            Setting(256, "-9 % tokens/s (1B); H200, 2026-11"),
        ),
        ("logits_and_loss",),
        "chunked_loss",
        "Head and cross entropy over this many tokens at a time, so that the logits never exist in full.",
    ),
)

ADAPTERS = (
    Lever(
        "training.use_peft",
        (Setting(False), Setting(True, "faster: frozen weights get no gradient (not measured)", "trains an adapter")),
        ("gradients", "optimizer", "temporaries"),
        "adapter",
        "Train a small adapter; the base gets neither gradients nor optimizer states. Activations do not shrink.",
    ),
    Lever(
        "peft.lora_r",
        (
            Setting(8, beside=_ADAPTED),
            Setting(4, "none (not measured)", "an adapter of lower rank", beside=_ADAPTED),
        ),
        ("gradients", "optimizer"),
        "adapter_rank",
        "Rank of the adapter: its trained parameters grow in proportion.",
    ),
    Lever(
        "peft.lora_target_modules",
        (
            Setting(("all-linear",), beside=_ADAPTED),
            Setting(
                ("q_proj", "v_proj"),
                "+53 % tokens/s (8B); H200, 2026-11",
                "fewer matrices are adapted",
                beside=_ADAPTED,
            ),
        ),
        ("activations", "gradients", "optimizer"),
        "adapter_targets",
        "Which matrices are adapted; each keeps its input for backward.",
    ),
    Lever(
        "peft.lora_dropout",
        (
            Setting(0.1, beside=_ADAPTED),
            Setting(0.0, "+5.5 % tokens/s (8B); H200, 2026-11", "less regularisation", beside=_ADAPTED),
        ),
        ("activations",),
        "adapter_dropout",
        "Above 0 it keeps a mask and one more copy of each adapted input.",
    ),
    Lever(
        "peft.peft_method",
        (
            Setting("lora", beside=_ADAPTED),
            Setting("rslora", "none", "the update is scaled by alpha / root of rank", beside=_ADAPTED),
            Setting("pissa", "a decomposition of each matrix at the start", "another start", beside=_ADAPTED),
            Setting(
                "olora",
                "-1.7 % tokens/s (1B); a decomposition of each matrix at the start; H200, 2026-11",
                "another start",
                beside=_ADAPTED,
            ),
            Setting("vera", "-0.6 % tokens/s (1B); H200, 2026-11", "trains vectors alone", beside=_ADAPTED),
            Setting("ia3", "-5.8 % tokens/s (1B); H200, 2026-11", "trains vectors alone", beside=_ADAPTED),
            Setting(
                "prompt",
                "+6.3 % tokens/s (1B); H200, 2026-11",
                "trains tokens before the row",
                beside=_ADAPTED,
            ),
            Setting(
                "prefix",
                "-8.7 % tokens/s (1B); H200, 2026-11",
                "trains tokens before the row",
                beside=_ADAPTED,
            ),
            Setting("dora", "-9.9 % tokens/s (1B); H200, 2026-11", "learns lengths", beside=_ADAPTED),
        ),
        ("gradients", "optimizer", "activations"),
        "adapter",
        "Kind of adapter. `vera` and `ia3` train the fewest weights; `dora` builds each adapted matrix in forward.",
    ),
    Lever(
        "peft.adapter_dtype",
        (
            Setting("float32", beside=_ADAPTED),
            Setting(
                "bfloat16",
                "+18 % tokens/s (8B); H200, 2026-11",
                "small updates round away",
                beside=_ADAPTED,
            ),
        ),
        ("weights", "gradients", "optimizer"),
        "adapter_dtype",
        "dtype of the adapter's weights, and so of their gradients and states.",
    ),
    Lever(
        "peft.q_lora",
        (
            Setting(False, beside=_ADAPTED),
            Setting(
                True,
                "-8.1 % tokens/s (8B, 4 bits); H200, 2026-11",
                "the base is rounded to 4 or 8 bits",
                package="bitsandbytes",
                beside=_ADAPTED,
            ),
        ),
        ("weights",),
        "quantized",
        "Linear layers of the frozen base in 4 or 8 bits; embeddings, head, norms and experts stay as they are.",
    ),
    Lever(
        "peft.q_lora_bits",
        (
            Setting(8, beside=_QUANTIZED),
            Setting(
                4,
                "1.9 times the tokens/s of 8 bits (8B); H200, 2026-11",
                "the base is rounded to 4 bits",
                beside=_QUANTIZED,
            ),
        ),
        ("weights",),
        "quantized",
        "Bits a frozen weight. Of sharded ones 4.",
    ),
    Lever(
        "peft.bnb_4bit_quant_type",
        (
            Setting("nf4", beside=_QUANTIZED),
            Setting("fp4", "none", "another rounding", beside=_QUANTIZED),
        ),
        (),
        "quantized",
        "Code of the 4-bit numbers. Moves no memory.",
    ),
    Lever(
        "peft.use_bnb_nested_quant",
        (
            Setting(False, beside=_QUANTIZED),
            Setting(
                True,
                "+2.3 % tokens/s (8B); H200, 2026-11",
                "the scales are rounded too",
                beside=_QUANTIZED,
            ),
        ),
        ("weights",),
        "quantized",
        "Scales of the 4-bit blocks in 8 bits: 0.37 bits a weight less.",
    ),
    Lever(
        "peft.lora_plus_lr_ratio",
        (Setting(None), Setting(16.0, "none", "B matrices learn faster", beside=_ADAPTED)),
        (),
        "faster_matrices",
        "LoRA+: a higher rate for the B matrices. Moves no memory.",
    ),
    Lever(
        "peft.lora_modules_to_save",
        (
            Setting(("lm_head",), beside=_ADAPTED),
            Setting((), "+6 % tokens/s (1B); H200, 2026-11", "the module is not trained", beside=_ADAPTED),
        ),
        ("weights", "gradients", "optimizer"),
        "adapter_saved_modules",
        "Modules trained in full beside the adapter: a copy, gradients and states of each.",
    ),
)

FREEZING = (
    Lever(
        "model.freeze_first_blocks",
        (Setting(0), Setting(1, "faster (not measured)", "the blocks are not trained")),
        ("gradients", "optimizer", "temporaries", "activations"),
        "frozen_modules",
        "The first n blocks are not trained; with frozen embeddings before them they keep no activations either.",
    ),
    Lever(
        "model.freeze_layers",
        (
            Setting(()),
            Setting(
                ("embed_tokens", "layers.0"),
                "+10 % tokens/s (1B); H200, 2026-11",
                "the layers are not trained",
            ),
        ),
        ("gradients", "optimizer", "temporaries", "activations"),
        "frozen_modules",
        "Modules that are not trained, by dotted name or glob: no gradients and no states.",
    ),
)

TASKS = (
    Lever(
        "training.preference.precompute_reference",
        (
            Setting(False, beside=_PREFERENCE),
            Setting(
                True,
                "+34 % tokens/s (1B), and an evaluation of all rows before the first step; H200, 2026-11",
                beside=_PREFERENCE,
            ),
        ),
        ("weights",),
        "known_reference",
        "What a preference's reference says of every row is asked once and kept: no frozen copy of the weights.",
    ),
)

CACHES = (
    Lever(
        "model.offload_frozen_base",
        (
            Setting(False, beside=_ADAPTED),
            Setting(
                True,
                "-0.5 % tokens/s with LoRA (1B, 4 x 2048 tokens), -51 % (8B, 1 x 2048); H200, 2026-11",
                beside=_ADAPTED,
            ),
        ),
        ("weights",),
        "offloaded_base",
        "Frozen weights of the blocks stay in host memory; the device holds two blocks of them at a time.",
    ),
    Lever(
        "training.allocator.expandable_segments",
        (Setting(False), Setting(True, "-0.4 % tokens/s (1B); H200, 2026-11", hardware="cuda")),
        ("fragmentation",),
        "allocator_settings",
        "One growing segment a pool instead of many of fixed sizes: less is reserved beyond what is allocated.",
    ),
    Lever(
        "training.allocator.max_split_size_mb",
        (Setting(None), Setting(512, "-0.3 % tokens/s (1B); H200, 2026-11", hardware="cuda")),
        ("fragmentation",),
        "allocator_settings",
        "Blocks from this size on are not split. Helps where small tensors pin large blocks, else reserves more.",
    ),
    Lever(
        "training.allocator.garbage_collection_threshold",
        (Setting(None), Setting(0.8, "-0.7 % tokens/s (1B); H200, 2026-11", hardware="cuda")),
        ("fragmentation",),
        "allocator_settings",
        "Above this share of the card, cached blocks that were not used lately are returned. Planned as without it.",
    ),
    Lever(
        "training.empty_device_cache_steps",
        (
            Setting(None),
            Setting(10, "-0.1 % tokens/s (1B); H200, 2026-11"),
            Setting(1, "-30 % tokens/s (1B): all of it is asked for again; H200, 2026-11"),
        ),
        ("fragmentation",),
        "emptied_cache",
        "Returns blocks that nothing uses, between steps. The allocated peak is the same; reserved may even rise.",
    ),
)

SHARDING = (
    Lever(
        "fsdp.enable_fsdp",
        (Setting(False), Setting(True, "within 3 % of copies (1B, two cards, of two calls); H200, 2026-11")),
        ("weights", "gradients", "optimizer"),
        "sharding",
        "Weights, gradients and states are split over the devices; each block is gathered when it runs.",
    ),
    Lever(
        "fsdp.sharding_strategy",
        (
            Setting("SHARD_GRAD_OP", beside=_SHARDED),
            Setting("FULL_SHARD", "-5 % tokens/s (1B, two cards): gathers again; H200, 2026-11", beside=_SHARDED),
            Setting("HYBRID_SHARD", "as FULL_SHARD within a machine, one more sum between them", beside=_SHARDED),
        ),
        ("communication", "weights"),
        "sharding",
        "SHARD_GRAD_OP keeps gathered weights from forward to backward; the hybrid ones split within a machine only.",
    ),
    Lever(
        "fsdp.cpu_offload",
        (
            Setting(False, beside=_SHARDED),
            Setting(
                True, "-80 % tokens/s (1B, two cards, two threads a rank); H200, 2026-11", "", "cuda", "", _SHARDED
            ),
        ),
        ("weights", "gradients", "optimizer"),
        "offloaded_shards",
        "Each device's part stays in pinned host memory, where the optimizer steps; the device holds gathered blocks.",
    ),
    Lever(
        "fsdp.forward_prefetch",
        (
            Setting(True, beside=_SHARDED),
            Setting(False, "+1.7 % tokens/s (1B, two cards); H200, 2026-11", "", beside=_SHARDED),
        ),
        ("communication",),
        "prefetch",
        "Gathers the next block while one computes. Helps where the host is slow; holds one more gathered block.",
    ),
    Lever(
        "fsdp.backward_prefetch",
        (
            Setting("BACKWARD_PRE", beside=_SHARDED),
            Setting("BACKWARD_POST", "+2.3 % tokens/s (1B, two cards); H200, 2026-11", beside=_SHARDED),
            Setting("NONE", "-2.9 % tokens/s (1B, two cards); H200, 2026-11", beside=_SHARDED),
        ),
        ("communication",),
        "prefetch",
        "When backward gathers the next block: before the gradients of this one, after them, or when it is needed.",
    ),
    Lever(
        "fsdp.context_parallel_size",
        (
            Setting(1),
            Setting(2, "keys and values cross the link in each layer, twice (not measured)", "", beside=_SHARED),
        ),
        ("activations", "logits_and_loss"),
        "context",
        "Devices that share each row: each computes its tokens, and attention goes over all of them.",
    ),
    Lever(
        "fsdp.tensor_parallel_size",
        (
            Setting(1),
            Setting(2, "two sums over the devices in each block, in each pass, are waited for (not measured)"),
        ),
        ("weights", "gradients", "optimizer", "activations"),
        "shared_matrices",
        "Devices that share the matrices of each block, as transformers' plan says: each has a part of the heads.",
    ),
)

LEVERS = (
    *BATCH,
    *ROWS,
    *RECOMPUTE,
    *COMPILATION,
    *PRECISION,
    *FP8,
    *OPTIMIZERS,
    *KERNELS,
    *ADAPTERS,
    *FREEZING,
    *TASKS,
    *CACHES,
    *SHARDING,
)


def lever(key: str) -> Lever:
    """The row of `key`. Raises KeyError for a key without one."""
    return {row.key: row for row in LEVERS}[key]


def every_setting() -> Iterator[tuple[Lever, Setting]]:
    """All settings of all levers, in the order of the table."""
    return ((row, setting) for row in LEVERS for setting in row.settings)


def word(value: Any) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(word, value))}]"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
