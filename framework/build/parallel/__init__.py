"""Several devices: copies, shards, context and tensor parallelism."""
