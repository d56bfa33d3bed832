"""The tests of each room are in the folder of the same name."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
