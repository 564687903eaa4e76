"""Rows and batches: read, cut, packed, streamed, cached."""
