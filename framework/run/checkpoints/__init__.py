"""Checkpoints, resume, export and merge."""
