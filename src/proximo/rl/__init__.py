"""Reinforcement learning: collect rollouts, assemble a batch, update, evaluate, repeat."""
