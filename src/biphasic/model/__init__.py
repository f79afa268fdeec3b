"""The network: attention over packed segments, the backbone, losses without logits."""
