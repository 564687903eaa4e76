"""Rows of the embedding and the head: those made for added tokens, and those that an adapter trains one by one."""

from collections.abc import Iterator

import torch

from framework.build.assembly import Assembly
from framework.build.loading.model import embedding_rows
from framework.build.loading.vocabulary import changes_rows, new_rows, token_matrices
from framework.build.model.parts import causal_model
from framework.build.text.tokenizer import vocabulary_of
from framework.build.verify.reading import Reading
from framework.schema.plural import counted


def read_vocabulary(assembly: Assembly) -> Iterator[Reading]:
    """How many rows there are, and whether those of added tokens start where they should; of whole matrices alone."""
    config = assembly.config
    if not changes_rows(config.model):
        return
    found, (stored, rows) = vocabulary_of(config.model), embedding_rows(config)
    model = causal_model(assembly.model)
    size = model.config.get_text_config().vocab_size
    yield Reading("rows of the embedding", f"{rows:,}", f"{size:,}", "model.config")
    if assembly.is_in_parts:
        return
    matrices = [matrix.detach() for matrix in token_matrices(model)]
    expected = [new_rows(matrix, found, stored) for matrix in matrices]
    started = sum(
        all(torch.equal(item[number], values[number].to(item)) for item, values in zip(matrices, expected, strict=True))
        for number in found.ids
    )
    source = f"{counted(len(matrices), 'matrix', 'matrices')} with {matrices[0].shape[0]:,} rows"
    asked, is_so = (f"{count} at the mean of their parts" for count in (len(found.added), started))
    yield Reading("model.added_tokens", asked, is_so, source)


def read_trained_tokens(assembly: Assembly) -> Iterator[Reading]:
    """The rows that peft trains one by one."""
    asked = assembly.config.peft.trainable_token_indices
    if assembly.adapter is None or not asked:
        return
    from peft.tuners.trainable_tokens import TrainableTokensLayer  # takes seconds to import

    layers = {
        name: module for name, module in assembly.model.named_modules() if isinstance(module, TrainableTokensLayer)
    }
    held = {tuple(layer.token_indices["default"]) for layer in layers.values()}
    found = ", ".join(map(str, *held)) if len(held) == 1 else counted(len(held), "list")
    names = ", ".join(name.removeprefix("base_model.model.").removesuffix(".token_adapter") for name in layers)
    yield Reading("peft.trainable_token_indices", ", ".join(map(str, sorted(set(asked)))), found, f"rows of {names}")
