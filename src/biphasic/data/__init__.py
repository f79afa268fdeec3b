"""The data loader, from MDS shards to batches on the host, and the tokenizer."""
