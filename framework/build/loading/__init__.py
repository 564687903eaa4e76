"""A model from its config or checkpoint: resolved, probed, built, loaded in shards."""
