"""`peft.q_lora` becomes a frozen base in 4 or 8 bits."""

from torch import Tensor, nn


def weight_count(parameter: Tensor) -> int:
    """Weights that a parameter stands for: two to each byte where it is packed."""
    state = getattr(parameter, "quant_state", None)
    return int(state.shape.numel()) if state is not None else parameter.numel()


def is_quantized(model: nn.Module) -> bool:
    """Whether any weight of the model is held in 4 or 8 bits."""
    return any(type(parameter).__name__ in ("Params4bit", "Int8Params") for parameter in model.parameters())


def dequantize(model: nn.Module) -> None:
    """Plain layers in place of the quantised ones."""
    raise NotImplementedError
