"""Read and check YAML configurations, and plan runs. Quick to import: needs neither torch nor Composer."""
