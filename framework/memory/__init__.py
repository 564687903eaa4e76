"""Memory and time model: allocator replay, roofline, search and explanations. Plain arithmetic, no torch."""
