"""`proximo view`: the page of one run or of many, on this machine."""

import os
import secrets
import socket
import sys
import webbrowser
from pathlib import Path

from proximo.cli.flags import refuse, take, take_switch

USAGE = """usage: proximo view [RUN | DIR] [--port N] [--no-browser]

A page that reads one run's folder, or all of those below a folder (./runs where none is given), and follows runs that
are going on: curves of several runs on one another, findings, settings, and every token of every rollout.

It is there for this machine alone, and for those who have the address that is printed. --port N takes that port,
otherwise a free one is. A browser is opened where there is a screen, unless --no-browser is given. Ctrl-C ends it.
"""


def run(arguments: list[str]) -> int:
    """0 when it is ended."""
    if set(arguments) & {"-h", "--help"}:
        print(USAGE, end="")
        return 0
    port, quiet = _port(take(arguments, "--port")), take_switch(arguments, "--no-browser")
    root = _root(arguments)
    try:
        import torch

        from proximo.insight.view.server import bind, server
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        refuse('the page needs a small web server: pip install "proximo[view]"')
    try:
        socket_ = bind(port)
    except OSError as error:
        refuse(f"--port {port}: {error.strerror}; give another one, or leave it out and a free one is taken")
    port, token = socket_.getsockname()[1], secrets.token_urlsafe(24)
    address = f"http://127.0.0.1:{port}/#token={token}"
    print(f"{address}\n", flush=True)
    print(f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, and the same address there")
    print("Ctrl-C ends it", flush=True)
    if not quiet and _has_screen():
        webbrowser.open(address)
    os.nice(10)  # a run on this machine goes first
    torch.set_num_threads(1)  # and a step is looked at no faster with more, beside a run far slower
    try:
        server(root, token=token, port=port).run(sockets=[socket_])
    except KeyboardInterrupt:  # how it is ended
        print(file=sys.stderr)
    return 0


def _port(given: str | None) -> int:
    if given is None:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) <= 5 and int(given) < 65536):
        refuse(f"--port {given}: give a number from 0 to 65535; 0 takes a free one")
    return int(given)


def _root(arguments: list[str]) -> Path:
    if unknown := [each for each in arguments if each.startswith("-")]:
        refuse(f"proximo view takes no {unknown[0]}: proximo view [RUN | DIR] [--port N] [--no-browser]")
    if len(arguments) > 1:
        refuse(f"proximo view takes one folder, not {len(arguments)}: give the one that they are in")
    root = Path(arguments[0] if arguments else "runs")
    if not root.is_dir():
        remedy = (
            "give a run's folder or one with runs in it"
            if arguments
            else "start a run (proximo train), or give a folder"
        )
        refuse(f"there is no folder {root}: {remedy}")
    return root


def _has_screen() -> bool:
    """A browser of the terminal would take the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
