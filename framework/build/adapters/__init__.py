"""Adapters and quantized bases."""
