"""Holds proximo's numbers against TRL's and verl's own functions: `python -m proximo_lab.parity` writes docs/parity.md.

Each of the two systems lives in an environment of its own, where a worker (`against_trl`, `against_verl`)
draws random batches, calls their function and ours on each, and prints what it measured as JSON.
"""
