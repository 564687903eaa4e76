"""Room 4: making it happen."""
