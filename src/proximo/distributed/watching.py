"""Ranks watch each other: one that is stopped or frozen answers nothing, and the others would wait for it for ever.

Inside a pass the group's own timeout sees it. Between passes a rank may rightly wait for hours, while another one
grades or samples; so each rank shows in the group's store that it is alive, from a thread of its own.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from proximo.distributed.launching import GROUP_FAILED, LAUNCHER

BEATS = 10
"""Signs of life within the time after which a rank counts as lost."""


class RankWatch:
    """Shows the other ranks that this one is alive, and ends this process if one of them is not for `timeout` seconds:
    with the stack of each thread on stderr, and the status by which the launcher starts all of them again."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self._rank, self._others, self._timeout = rank, [each for each in range(size) if each != rank], timeout
        self._over = threading.Event()
        store: Any = _get_default_store()
        self._store = store.clone()  # a connection of its own: the main thread waits on its own
        self._store.set_timeout(timedelta(seconds=timeout))
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        beat, seen = 0, {rank: (b"", time.monotonic()) for rank in self._others}
        while not self._over.wait(self._timeout / BEATS):
            beat += 1
            if self._rank == 0 and os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
                os.kill(os.getpid(), signal.SIGTERM)  # no launcher is left to start us again: save, and end
                return
            try:
                self._store.set(_key(self._rank), str(beat))
                signs = {rank: self._store.get(_key(rank)) for rank in self._others}
            except (dist.DistError, RuntimeError):
                if not self._over.is_set():
                    self._end("the store of the group")
                return
            now = time.monotonic()
            seen = {rank: seen[rank] if seen[rank][0] == each else (each, now) for rank, each in signs.items()}
            for rank, (_, last) in seen.items():
                if now - last > self._timeout:
                    self._end(f"rank {rank}")

    def _end(self, what: str) -> None:
        faulthandler.dump_traceback(all_threads=True)
        print(f"rank {self._rank}: no sign of life from {what} for {self._timeout:g} s", file=sys.stderr, flush=True)
        os._exit(GROUP_FAILED)


def _key(rank: int) -> str:
    return f"alive/{rank}"
