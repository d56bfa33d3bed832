"""Servers on the nodes of a Ray cluster. Ray places them and tells when one is lost; requests and weights go to them
directly, and no data passes through Ray."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from proximo.samplers.engines.engine import EngineLost
from proximo.samplers.engines.servers.nodes import asked, connect, own_place
from proximo.samplers.engines.servers.server import Listening, Running, Server


class ServerOnNode:
    """Runs on a node: one server, which ends with this process."""

    def place(self) -> tuple[str, int]:
        return own_place()

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._server = Server(command, environment)

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
        made = ray.remote(num_cpus=1, num_gpus=self._gpus, max_restarts=0, scheduling_strategy="SPREAD")(ServerOnNode)
        actor = made.remote()
        try:
            address, port = ray.get(actor.place.remote(), timeout=deadline)
            ray.get(
                actor.start.remote(list(command(address, port)), environment),
                timeout=max(1.0, until - time.monotonic()),
            )
        except (GetTimeoutError, RayError) as error:
            with suppress(Exception):
                ray.kill(actor)
            room = {kind: ray.available_resources().get(kind, 0) for kind in ("CPU", "GPU")}
            raise EngineLost(
                f"no node started a server within {deadline:g} s ({type(error).__name__}); free in the cluster: {room}"
            ) from error
        return RayServer(actor), f"{address}:{port}"
