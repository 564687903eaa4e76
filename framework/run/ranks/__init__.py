"""Several processes: who this one is, coordination, signals."""
