"""Tests of the sandbox: a program that must run, and escapes that must fail, tried for real."""

import os
import secrets
import tempfile
from pathlib import Path

from proximo.processes.sandbox.client import SandboxServer
from proximo.processes.sandbox.limits import SandboxJob

_PROGRAM = """
import ctypes, os, socket, threading

print(NONCE)
thread = threading.Thread(target=lambda: print("thread"))
thread.start()
thread.join()
libc = ctypes.CDLL(None, use_errno=True)

def tried(what, attempt):
    try:
        attempt()
    except OSError:
        return
    print(what)

def new_namespace():
    if libc.unshare(0x10000000) != 0:
        raise OSError

tried("read a file outside", lambda: open(OUTSIDE).read())
tried("write a file outside", lambda: open(OUTSIDE, "a"))
tried("list the folders of others", lambda: os.listdir(os.path.dirname(OUTSIDE)))
tried("open a socket", socket.socket)
tried("make a process", lambda: os.fork() or os._exit(0))
tried("signal another process", lambda: os.kill(OTHER, 0))
tried("make a namespace", new_namespace)
"""


def escapes(server: SandboxServer) -> list[str]:
    """Forbidden things that a program could do; or that no program can run at all, which would look safe."""
    nonce = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        outside = Path(folder) / "outside"
        outside.write_text("not for programs")
        for path in (folder, outside):  # so that the file's own permissions are not what blocks it
            os.chmod(path, 0o755)
        constants = {"NONCE": nonce, "OUTSIDE": str(outside), "OTHER": os.getpid()}
        program = "".join(f"{name} = {value!r}\n" for name, value in constants.items()) + _PROGRAM
        result = server.run(SandboxJob(program), nonce)
    first, _, rest = result.stdout.decode(errors="replace").partition("\n")
    if not result.finished or first != nonce or not rest.startswith("thread\n"):
        output = result.stderr.decode(errors="replace").strip()[-300:]
        return [f"a harmless program does not run: {result.ended} {result.code}, {output or 'no output'}"]
    return [f"a wall: a program could {what}" for what in rest.splitlines()[1:]]
