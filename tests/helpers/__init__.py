"""Parts that several test modules use: servers, tiny models and data, runs in warm processes."""
