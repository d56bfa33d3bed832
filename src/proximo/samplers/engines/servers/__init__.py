"""Servers that a run starts itself."""
