"""Many fine-tunings: models x tasks x learning rates x seeds, each once, whatever dies in between."""
