"""What training may have changed of a model."""

from torch import Tensor, nn

from framework.build.model.parts import is_of_adapter


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that training may have changed: all of a model, but only the trained ones next to an adapter.

    LoRA's A matrices are among them also where they are frozen: they were drawn, or found from rows, for this run.
    """
    adapted = hasattr(model, "peft_config")
    parameters = {
        name: parameter.detach().contiguous()
        for name, parameter in model.named_parameters()
        if not adapted or is_of_adapter(name, parameter)
    }
    kept = set() if adapted else set(model.state_dict())
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in kept}
    return {**parameters, **buffers}
