"""Waits for what other processes do."""

import time
from collections.abc import Callable
from pathlib import Path

SOON = 300.0
"""Seconds after which something should have happened on the slowest machine."""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.01)
