"""Saving a run's checkpoints, and finding them again."""
