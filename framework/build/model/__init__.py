"""Parts of a model: head, embedding, blocks, frozen layers."""
