"""Convert text to MDS shards of packed rows."""
