"""Checks before any weights are loaded: configs, prompts, graders, memory."""
