"""Optimizers that torch does not have. Each keeps its states per parameter, so that checkpoints and plans see them."""
