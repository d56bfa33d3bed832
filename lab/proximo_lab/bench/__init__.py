"""Benchmarks: Proximo compared with TRL's GRPOTrainer on the same work, and with the machine's limits.

Example: python -m proximo_lab.bench step --only c-tiny --steps 3
"""
