"""Findings about a run folder and about the installation."""
