"""The run folder and its metrics: what is written while a run trains."""
