"""The neural network: backbone, attention over packed segments, heads, and a loss without full logits."""
