"""Pretraining: configuration to a Composer Trainer."""
