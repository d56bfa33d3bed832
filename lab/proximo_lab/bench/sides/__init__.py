"""Both sides of a benchmark: ours and TRL's."""
