"""Ranks on the nodes of a Ray cluster. Ray places a process for each rank and tells when one is lost; the ranks find
each other as they do under torchrun, and no data passes through Ray."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from proximo.distributed.launching import LAUNCHER, NOTES, Processes, Start
from proximo.learner.ranks import Ranks
from proximo.processes import tree
from proximo.processes.cluster import asked, connect, local_address
from proximo.processes.server import KEEPER

PLACED = 600.0
"""Seconds until a cluster that has no place for all ranks, or does not start them, is given up."""
LOST = -signal.SIGKILL
"""Status of a rank whose node is gone."""


class RankProcess:
    """Runs on a node: one rank in a process of its own, which ends with this one."""

    def meeting_place(self) -> tuple[str, int]:
        return local_address()

    def start(self, command: Sequence[str], environment: dict[str, str], output: int | None, folder: str) -> None:
        """`folder`: where the launcher was started, since a command names files from there."""
        self._keeper = subprocess.Popen(
            [*KEEPER, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            cwd=folder,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Status as of a child: negative where a signal ended it, of which the keeper's status is the rest of 256."""
        status = self._keeper.poll()
        return status if status is None or status < 256 - signal.NSIG else status - 256

    def signal(self, number: int) -> None:
        """Send it to the rank itself."""
        tree.signal_kept(self._keeper.pid, number)


class RayRank:
    """A rank as the launcher sees it."""

    def __init__(self, actor: Any, release: Callable[[], None]) -> None:
        """`release` gives the places of all ranks back."""
        self.actor, self._release = actor, release
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = asked(self.actor.poll, lost=LOST)
        return self.returncode

    def send_signal(self, sig: int, /) -> None:
        asked(self.actor.signal, int(sig), lost=None)

    def kill(self) -> None:
        """The keeper ends what it started when its pipe closes."""
        import ray

        with suppress(Exception):  # it is gone already
            ray.kill(self.actor)
        self.returncode = LOST if self.returncode is None else self.returncode

    def wait(self) -> int:
        assert self.returncode is not None, "the launcher waits for ranks that have ended, or that it has killed"
        self.kill()
        self._release()
        return self.returncode


@contextmanager
def starting(ranks: Ranks) -> Iterator[Start | None]:
    """Give the function that starts ranks where the options say; None: on this machine."""
    if ranks.cluster == "local":
        yield None
        return
    connect("ranks", ranks.address, shows_output=True)
    import ray

    try:
        yield start_on_ray
    finally:
        ray.shutdown()


def start_on_ray(command: Sequence[str], ranks: int, more: dict[str, str], output: int | None) -> Processes:
    """A group of ranks, one in each place of a placement group: a GPU each where the cluster has GPUs."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    group = placement_group([{"CPU": 1, **({"GPU": 1} if gpus else {})}] * ranks, strategy="PACK")
    if not group.wait(PLACED):
        remove_placement_group(group)
        there = {kind: ray.cluster_resources().get(kind, 0) for kind in ("CPU", "GPU")}
        raise ValueError(f"ranks.processes is {ranks}, but the cluster has {there}: start more nodes, or fewer ranks")

    def release() -> None:
        with suppress(Exception):  # once for all of them
            remove_placement_group(group)

    made = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(RankProcess)
    actors = [
        made.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        ).remote()
        for rank in range(ranks)
    ]
    address, port = ray.get(actors[0].meeting_place.remote(), timeout=PLACED)
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    # A plan of a rank that ran out of memory would be left on its own node, and the launcher is not its parent.
    shared |= {key: each for key, each in more.items() if key not in (NOTES, LAUNCHER)}
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    folder = os.getcwd()
    for rank, actor in enumerate(actors):  # Ray shows each actor its own GPU
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": "0"}
        ray.get(actor.start.remote(list(command), environment, output, folder), timeout=PLACED)
    return [RayRank(actor, release) for actor in actors]
