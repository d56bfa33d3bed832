"""The learner: forward and backward passes, the optimizer, and the guard around every update."""
