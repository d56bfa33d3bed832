"""The nodes of a Ray cluster, on which processes are placed. No data passes through Ray."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import logging
from typing import Any

from proximo.samplers.engines.servers.server import free_port

ANSWER = 30.0
"""Seconds for a node to say how a process is; one that does not is lost."""


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


def own_place() -> tuple[str, int]:
    """On a node: its address, and a port that is free there."""
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
