"""Losses over logits, whole or a chunk of tokens at a time."""
