"""`proximo view`: a local web page of one or more runs."""

import os
import re
import secrets
import socket
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from proximo.cli.arguments import refuse, refusing, take, take_list, take_switch
from proximo.config.trust.permission import is_everything_permitted
from proximo.system.memory import return_memory

USAGE = """usage: proximo view [RUN | DIR] [--port N] [--no-browser] [--load-code]
       proximo view --static OUT [RUN | DIR ...] [--steps LIST] [--load-code]

Serve a local web page about one run folder, or about all runs below a folder (default: ./runs). It shows curves of
several runs in one chart, findings, settings and every token of every rollout, and follows runs in progress.

The page is served on 127.0.0.1 only, and only at the printed address, which has a key. Ctrl-C stops it.

With --static the page is written to a folder instead. It opens from disk or from any web server, without Proximo.

--port N      port to use (default: any free port)
--no-browser  do not open a browser
--load-code   load the classes of your own that the runs' configs name, which executes their files; without it such a
              config is shown as text, and its rollouts are not replayed token by token
--static OUT  write the page to this new folder, with all curves, findings and settings, and the rollouts of some steps
--steps LIST  steps whose rollouts a static page has: all, or numbers and ranges such as 1,5,10-20 (default: 8 of each
              run, evenly spaced)

examples:
  proximo view
  proximo view runs/a --no-browser --port 8000
  proximo view --static page runs/a runs/b --steps 1,40
"""


def run(arguments: list[str]) -> int:
    """Serve the page until Ctrl-C; exit status 0."""
    port, quiet = _port(take(arguments, "--port")), take_switch(arguments, "--no-browser")
    load_code = is_everything_permitted()
    out, chosen = take(arguments, "--static"), take_list(arguments, "--steps", lambda each: each[:1].isdigit())
    steps = None if chosen is None else ",".join(chosen)
    if out is not None:
        return write_static(Path(out), arguments, steps, load_code=load_code)
    if steps is not None:
        refuse(f"--steps {steps} is for --static OUT: give that, too, or leave it out")
    root = _root(arguments)
    try:
        import torch

        from proximo.insight.page.server import bind, server
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
    print("Ctrl-C stops it", flush=True)
    if not quiet and _has_screen():
        webbrowser.open(address)
    os.nice(5)  # training on this machine has priority
    torch.set_num_threads(1)  # more threads are no faster here, and slow a concurrent run down
    return_memory()
    try:
        server(root, token=token, port=port, load_code=load_code).run(sockets=[socket_])
    except KeyboardInterrupt:  # the normal way to stop it
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
        refuse(f"proximo view takes no {unknown[0]}: proximo view [RUN | DIR] [--port N] [--no-browser] [--load-code]")
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
    """True if a graphical browser can open; a text browser would take over the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


# The page as files

MAX_STEPS = 10_000
"""Steps that a range may name."""


def write_static(out: Path, arguments: Sequence[str], steps: str | None, *, load_code: bool) -> int:
    """Write the page and say where it is; exit status 0."""
    if unknown := [each for each in arguments if each.startswith("-")]:
        refuse(f"proximo view --static takes no {unknown[0]}: proximo view --static OUT [RUN | DIR ...] [--steps LIST]")
    folders = [Path(each) for each in arguments or ["runs"]]
    if missing := [each for each in folders if not each.is_dir()]:
        refuse(f"there is no folder {missing[0]}: give run folders, or one with runs in it")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        refuse(f"--static {out}: it is there already and not empty; give a new folder, or remove it")
    wanted = None if steps in (None, "all") else chosen_steps(steps)
    from proximo.insight.page.bundle.writing import evenly, write_bundle

    choose = list if steps == "all" else evenly if wanted is None else lambda there: [n for n in there if n in wanted]
    with refusing(OSError):
        index = write_bundle(out, folders, choose, load_code=load_code)
    count = sum(len(each["steps"]) for each in index["runs"].values())
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    runs = f"{len(index['runs'])} run{'s' * (len(index['runs']) != 1)}"
    print(f"{out / 'index.html'}: {runs}, rollouts of {count} step{'s' * (count != 1)}, {size / 1e6:.1f} MB")
    for name, each in index["runs"].items():
        if wanted is not None and not each["steps"]:
            there = f"it has {each['of'][0]} to {each['of'][-1]}" if each["of"] else "it has none"
            print(f"{name}: no rollouts of the steps {steps}; {there}")
        for step, reason in each["damaged"].items():
            print(f"{name}: step {step} is left out: {reason}")
    return 0


def chosen_steps(text: str) -> frozenset[int]:
    """Example: chosen_steps("1,5,10-12") == {1, 5, 10, 11, 12}"""
    steps: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip(), re.ASCII)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not first <= last < first + MAX_STEPS:
            refuse(f"--steps {text}: give all, or numbers and ranges such as 1,5,10-20")
        steps.update(range(first, last + 1))
    return frozenset(steps)
