"""Export checkpoints to folders that other libraries load, such as transformers and sentence-transformers."""
