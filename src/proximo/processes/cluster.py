"""Processes on the nodes of a Ray cluster. Ray places them and tells when one is lost; requests, weights and what a
reward function is asked go to them directly, and no data passes through Ray."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from proximo.processes import remote
from proximo.processes.child import NodePlace
from proximo.processes.failures import GraderFailed
from proximo.processes.server import Listening, Running, ServerLost, ServerProcess, Starts, free_port

ANSWER = 30.0
"""Seconds for a node to say how a process is; one that does not is lost."""
LISTENER_SECONDS = 120.0
"""Seconds for a node to start a listener."""
CONNECT_SECONDS = 5.0


def need_ray(options: str) -> None:
    """ValueError where Ray, which these options name, is not installed."""
    try:
        import ray  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ValueError(f'{options}.cluster is "ray", which this Python lacks: pip install "proximo[ray]"') from error


def connect(options: str, address: str, *, shows_output: bool) -> None:
    """Join the cluster at an address. ValueError where Ray is not installed or no cluster answers; `options` are those
    that named it, such as ranks. `shows_output`: whether what processes print on nodes is printed here."""
    need_ray(options)
    import ray

    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=shows_output, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ValueError(f"{options}.address is {address!r}, where no Ray cluster answers: `ray start` one") from error


def local_address() -> tuple[str, int]:
    """Address of this node, and a port that is free on it."""
    import ray

    return ray.util.get_node_ip_address(), free_port("")


def asked(method: Any, *arguments: Any, lost: Any) -> Any:
    """The answer of a process on a node; `lost` where it or its node is gone."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return ray.get(method.remote(*arguments), timeout=ANSWER)
    except (GetTimeoutError, RayError):
        return lost


# Servers


class ServerOnNode:
    """Runs on a node: one server, which ends with this process."""

    def address(self) -> tuple[str, int]:
        return local_address()

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._server = ServerProcess(command, environment)

    def is_running(self) -> bool:
        return self._server.is_running

    def last_lines(self) -> str:
        return self._server.last_lines()

    def kill(self) -> None:
        self._server.kill()


class RayServer:
    """A server on a node as its engine sees it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @property
    def is_running(self) -> bool:
        return bool(asked(self._actor.is_running, lost=False))

    def last_lines(self) -> str:
        return asked(self._actor.last_lines, lost="its node is gone")

    def kill(self) -> None:
        import ray

        asked(self._actor.kill, lost=None)
        with suppress(Exception):  # it is gone already
            ray.kill(self._actor)


class OnRay:
    """Starts servers on the nodes of a cluster, each with its own GPUs where the cluster has any."""

    def __init__(self, options: str, address: str, gpus: int) -> None:
        """`gpus` of each server. ValueError where Ray is not installed, or no cluster answers; `options` are those that
        named it."""
        connect(options, address, shows_output=False)
        import ray

        self._gpus = gpus if ray.cluster_resources().get("GPU") else 0

    def __call__(self, command: Listening, environment: dict[str, str], deadline: float) -> tuple[Running, str]:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        until = time.monotonic() + deadline
        launcher = ray.remote(num_cpus=1, num_gpus=self._gpus, max_restarts=0, scheduling_strategy="SPREAD")(
            ServerOnNode
        )
        actor = launcher.remote()
        try:
            address, port = ray.get(actor.address.remote(), timeout=deadline)
            ray.get(
                actor.start.remote(list(command(address, port)), environment),
                timeout=max(1.0, until - time.monotonic()),
            )
        except (GetTimeoutError, RayError) as error:
            with suppress(Exception):
                ray.kill(actor)
            free = {kind: ray.available_resources().get(kind, 0) for kind in ("CPU", "GPU")}
            raise ServerLost(
                f"no node started a server within {deadline:g} s ({type(error).__name__}); free in the cluster: {free}"
            ) from error
        return RayServer(actor), f"{address}:{port}"


# Workers


class NoPlace(GraderFailed):
    """Error where no node of the cluster answers."""


class Nodes:
    """The places of a cluster for reward functions and environments; at each a listener, which is started when it is
    first needed and again where it is lost."""

    def __init__(self, starts: Starts, size: int) -> None:
        self.size = size
        self._starts, self._token = starts, secrets.token_hex(32)
        self._listeners: dict[int, tuple[Running, str]] = {}
        self._places = deque(range(size))
        self._lock, self._starting = threading.Lock(), [threading.Lock() for _ in range(size)]
        self._is_closed, self._owner = False, os.getpid()

    def take(self) -> NodePlace:
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
                    return NodePlace(self._address(number), self._token)
            except ServerLost as error:
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
        """Address of a place's listener. ServerLost if there is none and none can be started."""
        if number in self._listeners:
            running, address = self._listeners[number]
            if running.is_running:
                return address
            del self._listeners[number]
            running.kill()
        running, address = self._starts(
            lambda host, port: [sys.executable, "-I", remote.__file__, host, str(port)],
            {remote.TOKEN: self._token},
            LISTENER_SECONDS,
        )
        self._listeners[number] = running, address
        if self._is_closed:
            running.kill()
        _wait_for(running, address)
        return address


def _wait_for(running: Running, address: str) -> None:
    """Wait until a listener lets connections in."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + LISTENER_SECONDS
    while running.is_running and time.monotonic() < until:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS):
            return
        time.sleep(0.05)
    raise ServerLost(f"the listener at {address} did not start: {running.last_lines()}")
