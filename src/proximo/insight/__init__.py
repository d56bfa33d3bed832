"""Inspection of runs from their folders alone: curves, tokens, replays, comparisons, findings."""
