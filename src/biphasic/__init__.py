"""Biphasic."""
