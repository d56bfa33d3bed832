"""Reward functions and environments on the nodes of a Ray cluster. Ray places a listener for each process; what a
function is asked goes to it directly, and no data passes through Ray."""

import secrets
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress

from proximo.fleet.engine import EngineLost
from proximo.fleet.servers.server import Running, Starts
from proximo.rewards.starting.frames import TOKEN
from proximo.rewards.starting.places import FOLDER, NoPlace, Place

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
        self._lock = threading.Lock()

    def take(self) -> Place:
        """The next one in turn. A place that the cluster has no node for any more is left out from then on."""
        why = "all are lost"
        with self._lock:
            while self._places:
                try:
                    address = self._address(self._places[0])
                except EngineLost as error:
                    self._places.popleft()
                    why = str(error)
                else:
                    self._places.rotate(-1)
                    return Place(address, self._token)
        raise NoPlace(f"workers.processes is {self.size}, and no node has a place: {why}")

    def close(self) -> None:
        with self._lock:
            while self._listeners:
                self._listeners.popitem()[1][0].kill()

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
