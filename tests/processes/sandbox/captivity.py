"""A small world with something to steal, to break and to kill, and the judgement whether a payload got at it."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from proximo.processes.sandbox import Limits, NoSandbox, Sandbox, SandboxJob
from tests.processes.sandbox.payloads import PRELUDE, Payload

WEIGHTS = "not for programs"
NOBODY = 65534


@dataclass(frozen=True)
class Outcome:
    ran: bool
    """The nonce was seen."""
    contained: bool
    detail: str


class World:
    """A run folder that anybody may write to, listening sockets, and a process of the user the programs run as: so
    that nothing but the sandbox stands between them and a program."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.canary = secrets.token_hex(8)
        (self.folder / "weights").write_text(WEIGHTS)
        os.chmod(self.folder, 0o777)
        os.chmod(self.folder / "weights", 0o666)
        environment = {"CANARY": self.canary, "PATH": os.environ.get("PATH", "")}
        user = NOBODY if os.getuid() == 0 else None
        self.victim = subprocess.Popen(["sleep", "600"], env=environment, user=user)
        self.environment = environment
        self.abstract = f"captivity-{self.canary}"
        self.listeners = [
            socket.create_server(("127.0.0.1", 0)),
            _listening(str(self.folder / "socket")),
            _listening(f"\0{self.abstract}"),
        ]
        self.mail = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.mail.bind(str(self.folder / "mail"))
        os.chmod(self.folder / "mail", 0o777)
        os.chmod(self.folder / "socket", 0o777)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.victim.kill()
        self.victim.wait()
        for each in (*self.listeners, self.mail):
            each.close()
        shutil.rmtree(self.folder)

    def program(self, payload: Payload, nonce: str) -> str:
        told = {
            "NONCE": nonce,
            "RUN": str(self.folder),
            "VICTIM": self.victim.pid,
            "PORT": self.listeners[0].getsockname()[1],
            "ABSTRACT": self.abstract,
        }
        return "".join(f"{name} = {value!r}\n" for name, value in told.items()) + PRELUDE + payload.code

    def damage(self) -> list[str]:
        """What is not as it was."""
        found = []
        if sorted(path.name for path in self.folder.iterdir()) != ["mail", "socket", "weights"]:
            found.append("the run folder has other files")
        elif (self.folder / "weights").read_text() != WEIGHTS:
            found.append("the run's file was changed")
        if self.victim.poll() is not None:
            found.append("the other process died")
        for listener in self.listeners:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                found.append("somebody connected")
        return found


def _listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    return listener


def marker() -> str:
    return "escaped"


def tried(sandbox: Sandbox, payload: Payload, world: World) -> Outcome:
    """Run it in the sandbox and look at the world."""
    nonce = secrets.token_hex(16)
    result = sandbox.run(SandboxJob(world.program(payload, nonce)))
    said = result.stdout.decode(errors="replace")
    problems = world.damage()
    if result.ended not in payload.ends:
        problems.append(f"it ended with {result.ended} {result.code}: {result.stderr[-300:].decode(errors='replace')}")
    if marker() in said or world.canary.encode() in result.stdout + result.stderr:
        problems.append(f"it got out: {said[-300:]}")
    return Outcome(said.startswith(nonce), not problems, "; ".join(problems))


def gets_out_bare(payload: Payload, world: World) -> bool:
    """Whether it succeeds where nothing holds it."""
    program = world.program(payload, "bare")
    command = [sys.executable, "-I", "-S", "-c", program]
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            command, env=world.environment, cwd=folder, capture_output=True, timeout=60, check=False
        )
    return marker().encode() in result.stdout


def left_behind(seconds: float = 10.0) -> list[int]:
    """Sandbox processes that are nobody's child, or deeper below us than a server; looked for until there are none."""
    deadline = time.monotonic() + seconds
    while (found := _strays()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _strays() -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and b"proximo.processes.sandbox.server" in (entry / "cmdline").read_bytes():
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
    servers = {number for number, parent in parents.items() if parent == os.getpid()}
    return [number for number, parent in parents.items() if parent == 1 or parent in servers]


def needs_sandbox() -> None:
    """Skip a test where this machine has no sandbox: it could not be run, which is not that it passed."""
    try:
        Sandbox(Limits()).close()
    except NoSandbox as missing:
        pytest.skip(f"not run: {missing}")
