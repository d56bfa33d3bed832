"""Crash-safe files: folders that are complete or absent, append-only rows, locks that die with their owner."""
