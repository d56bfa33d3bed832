"""The pieces of an algorithm: one file for each stage."""
