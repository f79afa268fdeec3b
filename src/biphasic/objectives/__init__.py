"""From tokens to inputs and targets. Imports torch only."""
