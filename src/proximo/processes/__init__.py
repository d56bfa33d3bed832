"""Processes that are started, watched and ended: the sandbox, and workers on other machines."""
