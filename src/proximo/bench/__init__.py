"""Benchmarks: our side beside TRL's GRPOTrainer on the same work, and beside what the machine could do.

Example: python -m proximo.bench step --only c-tiny --steps 3
"""
