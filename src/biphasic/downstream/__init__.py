"""Downstream datasets, which are prepared once and read by fine-tuning and evaluation."""
