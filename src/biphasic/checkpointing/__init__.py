"""Save a run's checkpoints, and find the one that a run resumes from."""
