"""Longer studies: separate commands whose results go into docs/."""
