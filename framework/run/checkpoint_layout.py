"""Names within a checkpoint that more than one module reads or writes."""

PARTS = "parts"
"""Folder of a checkpoint of sharded weights, into which every rank has written its part."""
