"""Room 2: arithmetic about bytes and time. No torch."""
