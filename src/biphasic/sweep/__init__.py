"""Run a sweep: fine-tune models x tasks x learning rates x seeds, each trial once, even after crashes."""
