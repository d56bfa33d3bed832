"""A server that this run starts: its command, environment, log, and end."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from proximo.processes import tree
from proximo.system import version

PACKAGE = Path(version.__file__).parents[1]
KEEPER = [sys.executable, "-P", tree.__file__]
"""Start of a command that ends with whoever started it."""
LAST_LINES = 5
"""Lines of the log that an error shows."""


class ServerLost(Exception):
    """A server could not be started, or is gone."""


class Running(Protocol):
    """A server that was started, on this machine or on a node of a cluster."""

    @property
    def is_running(self) -> bool: ...

    def last_lines(self) -> str: ...

    def kill(self) -> None: ...


Listening = Callable[[str, int], Sequence[str]]
"""The command of a server, given the address and the port at which it is to listen."""
Starts = Callable[[Listening, dict[str, str], float], tuple[Running, str]]
"""Starts a server, given its command, environment and the seconds there are for it; with it, address and port."""


def start_here(command: Listening, environment: dict[str, str], deadline: float) -> tuple[Running, str]:
    """Start it on this machine, for this machine alone."""
    address, port = "127.0.0.1", free_port("127.0.0.1")
    return ServerProcess(command(address, port), environment), f"{address}:{port}"


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]


class ServerProcess:
    """A command that runs until `kill`, or until this process ends in whatever way."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="proximo-engine-"))
        self.log = self._folder / "log.txt"
        paths = [str(_plugin_folder(self._folder)), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self.log.open("wb") as log:
            self._keeper = subprocess.Popen(
                [*KEEPER, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), tree.FOLDER: str(self._folder)} | environment,
                start_new_session=True,  # a Ctrl-C is for the run, which ends its servers itself
            )

    @property
    def is_running(self) -> bool:
        return self._keeper.poll() is None

    def last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return " | ".join(line.strip() for line in lines[-LAST_LINES:])

    def kill(self) -> None:
        """End the server and everything that it started."""
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()
        self._keeper.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _plugin_folder(folder: Path) -> Path:
    """A folder that makes this package and its plugin known to another Python, and nothing else of ours."""
    path = folder / "plugin"
    about = path / f"proximo-{version.__version__}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: proximo\nVersion: {version.__version__}\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nproximo = proximo.samplers.engines.plugin:register\n"
    )
    (path / PACKAGE.name).symlink_to(PACKAGE)
    return path
