"""The head that the task needs, and what of it no checkpoint had."""

from collections.abc import Iterator

from framework.build.assembly import Assembly
from framework.build.model.heads import answers, answers_for_rows, head_modules
from framework.build.model.parts import causal_model
from framework.build.verify.reading import Reading
from framework.schema.plural import counted


def read_head(assembly: Assembly) -> Iterator[Reading]:
    """How many answers a task of rows has, whether all of the head is trained, and which of its weights are new."""
    task, model = assembly.config.training.task, causal_model(assembly.model)
    if not task.is_of_rows:
        return
    names = answers(assembly.config)
    still = [
        f"{top}.{name}"
        for top, module in head_modules(model).items()
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad and ".original_module." not in f".{name}"
    ]
    frozen = assembly.frozen and all(any(name in item.names for item in assembly.frozen) for name in still)
    asked = f"{task}, {counted(len(names), 'output')}"
    found = f"{task}, {counted(model.config.num_labels, 'output')}" if answers_for_rows(model) else "a head of tokens"
    if still and not frozen:
        found += f", of which {still[0]} is not trained"
    new = f"; new and random: {', '.join(assembly.new_weights)}" if assembly.new_weights else ""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    trained = f"; trained in full: {', '.join(head_modules(model))}" if assembly.adapter is not None else ""
    yield Reading("training.task", asked, found, f"{type(model).__name__}: {shown}{trained}{new}")
