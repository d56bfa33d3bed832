"""Reward functions that wait for each other, for a file or for nothing; read by workers from this file."""

import asyncio
import os
import time
from pathlib import Path


def meet(completions, folder, **_):
    """Returns once the calls of both groups are running; alone, after a while."""
    here = Path(folder[0])
    (here / completions[0]).touch()
    until = time.monotonic() + (0.3 if completions[0] == "alone" else 20)
    while len(list(here.iterdir())) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    return [float(len(list(here.iterdir())) >= 3)] * len(completions)


def busy(completions, **_):
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    return [float(os.getpid())] * len(completions)


def idle(completions, **_):
    time.sleep(0.1)
    return [float(os.getpid())] * len(completions)


async def keeps_its_loop(completions, **_):
    await asyncio.sleep(0)
    return [float(id(asyncio.get_running_loop()) % 1000)] * len(completions)
