"""Trains tiny models with and without Liger's kernels, which triton's interpreter runs on the CPU (a second a step).

Prints a line of JSON a case: its name, and what was found without and with Liger.

A process of its own (`test_liger.py` starts it): TRITON_INTERPRET must be set before the kernels are defined.
"""

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

from framework.build.levers.liger import liger_kernels
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from tests.tiny import GEMMA2, LLAMA, tiny_assembly, tiny_config, unequal_rows

CHECKPOINTED = {"enable_gradient_checkpointing": True}
LORA = {"training": {"use_peft": True}, "peft": {"lora_target_modules": ["all-linear"]}}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
OLMO2 = {**LLAMA, "model_type": "olmo2"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "qwen3": (QWEN3, {}),
    "olmo2": (OLMO2, {}),
    "gemma2": ({**GEMMA2, "hidden_activation": "gelu_pytorch_tanh"}, {}),
    "chunked": (LLAMA, {"model": {"chunked_loss": 16}}),
    "checkpointed": (LLAMA, {"training": CHECKPOINTED}),
    "attention kept": (LLAMA, {"training": {**CHECKPOINTED, "gradient_checkpointing_policy": "save_attention"}}),
    "products kept": (LLAMA, {"training": {**CHECKPOINTED, "gradient_checkpointing_policy": "save_matmuls"}}),
    "offloaded": (LLAMA, {"training": {"activation_offload": True}}),
    "adapted": (LLAMA, LORA),
}


def _as_tensor(arg: Any) -> Any:
    """The interpreter hands floats to kernels as they are, a card as float32."""
    if isinstance(arg, float):
        return tl.tensor(interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
    return _convert(arg)


_convert = interpreter._implicit_cvt
interpreter._implicit_cvt = _as_tensor
libdevice.rsqrt = lambda x: 1 / tl.sqrt(x)  # functions of CUDA's own library, which is not here
libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


def train(architecture: dict[str, Any], changes: dict[str, Any], with_liger: bool) -> dict[str, Any]:
    """Losses of two steps, the second of which shows the gradients of the first, and names of weights and kernels."""
    model = {"enable_liger_kernel": with_liger, **changes.get("model", {})}
    training = {"mixed_precision_dtype": "none", "learning_rate": 1e-2, **changes.get("training", {})}
    config: TrainingConfig = tiny_config(
        architecture, model=model, training=training, **{key: changes[key] for key in ("peft",) if key in changes}
    )
    assembly = tiny_assembly(config)
    losses = [train_step(assembly, [unequal_rows(2, 8)], number, lambda phase: None).loss for number in (1, 2)]
    return {
        "losses": [float(loss) for loss in losses],
        "weights": sorted(assembly.model.state_dict()),
        "kernels": dict(liger_kernels(assembly.model)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        print(json.dumps([name, *(train(*CASES[name], with_liger=on) for on in (False, True))]), flush=True)
