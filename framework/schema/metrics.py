"""The metrics of an evaluation, by task, and which way each of them is better."""

from framework.schema.choices import Task

FROM_PYTHON = "python/"
"""Before the names of metrics that a program hands over."""
LOWER_IS_BETTER = frozenset({"eval_loss", "perplexity", "router_loss", "divergence", "mse", "mae"})
"""Of all others more is better."""

METRICS = {
    Task.SFT: ("eval_loss", "perplexity", "token_accuracy", "router_loss"),
    Task.PRETRAIN: ("eval_loss", "perplexity", "token_accuracy", "router_loss"),
    Task.PREFERENCE: ("eval_loss", "reward_accuracy", "reward_margin"),
    Task.REWARD: ("eval_loss", "reward_accuracy", "reward_margin"),
    Task.CLASSIFICATION: ("eval_loss", "accuracy", "macro_f1", "micro_f1"),
    Task.REGRESSION: ("eval_loss", "mse", "mae", "r2", "pearson"),
    Task.DISTILLATION: ("eval_loss", "divergence", "perplexity", "token_accuracy"),
}
"""Those by which the best checkpoint can be chosen. `router_loss` is there with a router loss, `micro_f1` where a row
has several classes, `reward_accuracy` where answers come in pairs."""
