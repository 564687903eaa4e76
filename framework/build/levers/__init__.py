"""Memory levers on the built model: checkpointing, offload, compile, kernels, allocator."""
