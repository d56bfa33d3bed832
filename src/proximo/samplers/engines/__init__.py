"""Sampling on engines: processes with weights of their own, which every update must reach.

options.py is the sampler of a config, and all that a run without engines loads; fleet.py is the sampler itself.
"""
