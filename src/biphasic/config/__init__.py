"""What a YAML may say, reading it, and what it would do. Imports neither torch nor Composer, so that it answers at once."""
