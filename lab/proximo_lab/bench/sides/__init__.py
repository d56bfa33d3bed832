"""Sides of a benchmark: ours and TRL's."""
