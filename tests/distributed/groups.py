"""Groups of processes for tests."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start_group(module: str, arguments: Sequence[str], folder: Path, ranks: int = 2) -> None:
    """Run a module in a group of processes; their output is in RANK.log in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path}
        with (folder / f"{rank}.log").open("wb") as log:
            command = [sys.executable, "-m", module, *arguments]
            started.append(subprocess.Popen(command, env={**os.environ, **place, **own}, stdout=log, stderr=log))
    found = [each.wait(900) for each in started]
    assert not any(found), "\n".join((folder / f"{rank}.log").read_text()[-2000:] for rank in range(ranks))
