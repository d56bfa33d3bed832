"""Commands on what a run has written."""
