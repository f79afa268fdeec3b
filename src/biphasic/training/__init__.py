"""Pretrain a language model with Composer, as a YAML configures it."""
