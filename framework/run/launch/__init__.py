"""Processes of a run or a sweep, started and watched."""
