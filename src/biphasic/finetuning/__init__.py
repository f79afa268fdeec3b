"""Fine-tune an encoder on a downstream task and score it."""
