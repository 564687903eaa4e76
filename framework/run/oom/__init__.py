"""Out of memory in a run: report it, undo the step, retry with smaller batches."""
