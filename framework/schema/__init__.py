"""Room 1: what may be asked for. pydantic and the standard library only; knows no reader of it."""
