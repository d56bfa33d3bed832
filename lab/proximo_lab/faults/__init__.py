"""Faults that are injected for real, and what became of the run: `make faults` writes docs/reliability.md.

Each family is one module. A case ends resumed (R: the same bits as a run that nobody disturbed), continued (C: the
fault was counted and nothing else was touched), stopped (S: exit code and a hint), failed, or not run.
"""
