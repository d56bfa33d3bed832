"""A plan for many GPUs: bytes of a rank, a simulation of steps, the best split, and files that start it."""
