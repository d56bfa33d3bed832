"""A plan before weights: what a run would hold in memory, what fits on a device, and how long a step would take."""
