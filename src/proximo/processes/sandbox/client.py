"""Server process of a sandbox, from the trainer's side."""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from proximo.processes.sandbox.limits import DEVICES, NOBODY, Limits, ProgramResult, SandboxFailed, SandboxJob
from proximo.processes.sandbox.protocol import receive, send

# The parent packages are named but not imported: they would load torch.
_BOOT = """
import sys, types
folder, number, root_is_made = sys.argv[1:]
for name in ("proximo", "proximo.processes", "proximo.processes.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder + "/" + name.replace(".", "/")]
from proximo.processes.sandbox.server import main
main(int(number), root_is_made == "True")
"""
_START_SECONDS = 60.0
_GRACE_SECONDS = 30.0
"""Seconds beyond the program's own time for set-up and communication on a busy machine."""


class SandboxServer:
    """Runs one program after another. It is started on first use, and again after a failure."""

    def __init__(self, limits: Limits, through_bubblewrap: bool = False) -> None:
        self._limits = limits
        self._through_bubblewrap = through_bubblewrap
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def start(self) -> dict[str, str]:
        """Start it; returns missing mechanisms by name, with the reason. SandboxFailed if it does not run at all."""
        self.close()
        with tempfile.TemporaryFile() as complaints:
            try:
                self._launch(complaints)
                header, _ = self._answer(_START_SECONDS, "its first word")
            except (SandboxFailed, OSError) as error:
                self.close()
                complaints.seek(0)
                output = complaints.read()[-500:].decode(errors="replace").strip()
                raise SandboxFailed(f"{error}: {output}" if output else str(error)) from None
        return header["missing"]

    def _launch(self, complaints: IO[bytes]) -> None:
        self._connection, theirs = map(_clear, socket.socketpair())
        with theirs:
            self._process = subprocess.Popen(
                self._command(theirs.fileno()),
                # The hash seed is fixed, so that the order of sets is the same in every run.
                # One arena: an arena per thread would take 64 MB of address space each.
                env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "TZ": "UTC", "MALLOC_ARENA_MAX": "1"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def run(self, job: SandboxJob, nonce: str) -> ProgramResult:
        """Run a program; `nonce` marks this run, and results with another mark are rejected."""
        try:
            return self._run(job, nonce)
        except BaseException:  # including a stop request: a late answer must not be read by the next run
            self.close()
            raise

    def _run(self, job: SandboxJob, nonce: str) -> ProgramResult:
        if self._connection is None:
            self.start()
        assert self._connection is not None
        header = asdict(job) | {"limits": asdict(self._limits), "nonce": nonce}
        try:
            self._connection.settimeout(_GRACE_SECONDS)
            send(self._connection, header)
        except OSError as error:
            raise SandboxFailed(f"a sandbox server is gone: {error}") from None
        answer, payloads = self._answer(self._limits.seconds + _GRACE_SECONDS, "the end of a program")
        if "failed" in answer:
            raise SandboxFailed(f"a program was not run: {answer['failed']}")
        if answer["nonce"] != nonce:
            raise SandboxFailed("a sandbox server answered for another program")
        stdout, stderr, answers = payloads
        return ProgramResult(answer["ended"], answer["code"], stdout, stderr, answers, answer["seconds"])

    def close(self) -> None:
        """End the server and all it runs: a keeper dies with its server, a program with its keeper."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None

    def _answer(self, seconds: float, what: str) -> tuple[dict[str, Any], list[bytes]]:
        assert self._connection is not None
        try:
            self._connection.settimeout(seconds)
            return receive(self._connection)
        except (OSError, EOFError, ValueError) as error:
            raise SandboxFailed(f"a sandbox server did not answer, waiting for {what}: {error}") from None

    def _command(self, number: int) -> list[str]:
        folder = str(Path(__file__).resolve().parents[3])
        # Like -I, but with the hash seed from the environment, which we set.
        interpreter = os.path.realpath(sys.executable)
        command = [interpreter, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOT]
        arguments = [folder, str(number), str(self._through_bubblewrap)]
        return [*(_bubblewrap(folder, interpreter) if self._through_bubblewrap else []), *command, *arguments]


def _clear(end: socket.socket) -> socket.socket:
    """Move the socket away from the descriptors of the standard streams, which may be free."""
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def has_bubblewrap() -> bool:
    return shutil.which("bwrap") is not None


def _bubblewrap(folder: str, interpreter: str) -> list[str]:
    """Bubblewrap's command line: own namespaces, and a root with the interpreter and our code, without /proc."""
    user = ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", *user, "--new-session"]
    shown = {os.path.dirname(interpreter), os.path.join(folder, "proximo", "processes", "sandbox"), "/etc/ld.so.cache"}
    shown |= {os.path.join(prefix, name) for prefix in ("/", "/usr", sys.base_prefix) for name in ("lib", "lib64")}
    for path in sorted(path for path in shown if os.path.exists(path)):
        is_link = os.path.islink(path) and os.path.isdir(path)
        command += ["--symlink", os.readlink(path), path] if is_link else ["--ro-bind", path, path]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    return [*command, "--remount-ro", "/", "--chdir", "/", "--"]
