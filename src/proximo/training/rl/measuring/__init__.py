"""Metrics of a step that need more than a mean: lengths by verdict, coverage, loops, and what the clip stopped."""
