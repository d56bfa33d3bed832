"""Samplers: inside this process with the learner's own weights, and engines in servers beside it."""
