"""Prompts and completions of a micro-batch as one packed row, and attention over it."""
