"""Reward functions and environments on the nodes of a Ray cluster. Ray places a listener for each process; what a
function is asked goes to it directly, and no data passes through Ray."""

import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress

from proximo.processes.remote.frames import TOKEN
from proximo.processes.remote.places import FOLDER, NoPlace, Place
from proximo.samplers.engines.engine import EngineLost
from proximo.samplers.engines.servers.server import Running, Starts

START_SECONDS = 120.0
"""For a node to start a listener."""
CONNECT_SECONDS = 5.0


class Nodes:
    """The places of a cluster; at each a listener, started when it is first needed and again where it is lost."""

    def __init__(self, starts: Starts, size: int) -> None:
        self.size = size
        self._starts, self._token = starts, secrets.token_hex(32)
        self._listeners: dict[int, tuple[Running, str]] = {}
        self._places = deque(range(size))
        self._lock, self._starting = threading.Lock(), [threading.Lock() for _ in range(size)]
        self._is_closed, self._owner = False, os.getpid()

    def take(self) -> Place:
        """The next one in turn. A place that the cluster has no node for any more is left out from then on."""
        why = "all are lost"
        while True:
            with self._lock:
                if not self._places or self._is_closed:
                    raise NoPlace(f"workers.processes is {self.size}, and no node has a place: {why}")
                number = self._places[0]
                self._places.rotate(-1)
            try:
                with self._starting[number]:  # several are started at the same time
                    return Place(self._address(number), self._token)
            except EngineLost as error:
                why = str(error)
                with self._lock, suppress(ValueError):  # another thread may have left it out
                    self._places.remove(number)

    def close(self) -> None:
        """A process that was forked off leaves them alone."""
        if self._owner != os.getpid():
            return
        with self._lock:
            self._is_closed = True
        for running, _ in list(self._listeners.values()):
            running.kill()

    def _address(self, number: int) -> str:
        """Of the listener at a place. EngineLost if there is none and none can be started."""
        if number in self._listeners:
            running, address = self._listeners[number]
            if running.is_running:
                return address
            del self._listeners[number]
            running.kill()
        script = str(FOLDER / "listener.py")
        running, address = self._starts(
            lambda host, port: [sys.executable, "-I", script, host, str(port)], {TOKEN: self._token}, START_SECONDS
        )
        self._listeners[number] = running, address
        if self._is_closed:
            running.kill()
        _wait_for(running, address)
        return address


def _wait_for(running: Running, address: str) -> None:
    """Until a listener lets connections in."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + START_SECONDS
    while running.is_running and time.monotonic() < until:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS):
            return
        time.sleep(0.05)
    raise EngineLost(f"the listener at {address} did not start: {running.last_lines()}")
