"""Text to rows of token ids, rows to batches."""
