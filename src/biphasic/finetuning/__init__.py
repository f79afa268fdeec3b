"""An encoder and a task in, a fine-tuned encoder out."""
