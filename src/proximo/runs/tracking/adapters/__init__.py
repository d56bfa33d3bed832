"""One file per tracker. Each imports its package when it is opened."""
