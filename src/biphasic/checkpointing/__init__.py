"""Finding a run's checkpoints."""
