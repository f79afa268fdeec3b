"""Read and check YAML configurations, and plan runs. Imports neither torch nor Composer, so that importing it is fast."""
