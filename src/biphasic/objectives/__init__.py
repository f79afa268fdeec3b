"""Training objectives, which turn tokens into inputs and targets."""
