"""Evaluate an encoder on mteb's tasks and on local retrieval datasets."""
