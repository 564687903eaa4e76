"""Attention kernels and context parallelism."""
