"""Biphasic: training recipes for text encoders."""
