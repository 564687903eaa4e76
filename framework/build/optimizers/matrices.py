"""The trained matrices that some optimizers treat apart from everything else."""

from torch import Tensor, nn

from framework.build.model.heads import head_layers
from framework.build.model.parts import causal_model
from framework.errors import Problem, RequestError
from framework.schema.optimizers import Optimizer, facts_of
from framework.schema.training import TrainingParams


def hidden_matrices(model: nn.Module) -> frozenset[Tensor]:
    """The trained matrices inside the blocks: two-dimensional, neither an embedding nor the head."""
    ends = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    ends |= {parameter for layer in head_layers(causal_model(model)) for parameter in layer.parameters()}
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() == 2)
    return frozenset(parameter for parameter in trained if parameter not in ends)


def matrix_parameters(training: TrainingParams, model: nn.Module) -> frozenset[Tensor]:
    """Those that `training.optimizer` orthogonalises or projects; empty for one that treats all weights alike.

    Raises RequestError where such an optimizer would find none, and train everything as AdamW does.
    """
    choice = training.optimizer
    if not facts_of(choice).of_matrices:
        return frozenset()
    hidden = hidden_matrices(model)
    if not hidden:
        message = f"{choice} is for matrices inside the blocks, and none is trained: AdamW would train everything"
        raise RequestError([Problem("training.optimizer", message, expected=str(Optimizer.ADAMW_TORCH_FUSED))])
    if not facts_of(choice).projects:
        return hidden
    rank = training.projection_rank
    projected = frozenset(matrix for matrix in hidden if min(matrix.shape) > rank)
    if not projected:
        widest = max(min(matrix.shape) for matrix in hidden)
        message = (
            f"{choice} projects matrices whose smaller side is above {rank}, and the widest that is trained has "
            f"{widest}: AdamW would train everything"
        )
        works = f"training.optimizer={Optimizer.ADAMW_TORCH_FUSED}"
        expected = f"at most {widest - 1}, or {works}" if widest > 1 else works
        raise RequestError([Problem("training.projection_rank", message, expected=expected)])
    return projected
