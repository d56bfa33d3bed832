"""The files of a run: log, rollouts, ledger, checkpoints, and resuming from them."""
