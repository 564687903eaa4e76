"""Rules across keys: which settings contradict each other or have no effect."""
