"""What a run did, read from its folder alone: curves, tokens, other algorithms' views, comparisons, findings."""
