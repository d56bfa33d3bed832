"""Journeys 10 and 13: a notebook, and the package itself."""

import json

from proximo_lab.journeys.belongings import gsm8k, model
from proximo_lab.journeys.environment import INSTALLED, ROOT
from proximo_lab.journeys.user import User

CELLS = (
    'import proximo\nrun = proximo.train("my-model", "runs/n", data="gsm8k.jsonl", steps=1, quiet=True)',
    'run.metrics().column("outcome")',
    'run.plot("outcome")',
)
EXECUTE = """
import sys
import nbclient, nbformat
if len(sys.argv) > 1:
    book = nbformat.read(sys.argv[1], as_version=4)
else:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(open(f"cell{n}.py").read()) for n in range(3)])
nbclient.NotebookClient(book, timeout=1500).execute()
kinds = [kind for cell in book.cells for each in cell.get("outputs", []) for kind in each.get("data", {})]
print("executed", len(book.cells), "cells;", " ".join(sorted(set(kinds))))
"""
LOOP = """
import asyncio, threading, proximo
from dataclasses import replace
def train(folder):
    base = proximo.presets.ARITHMETIC
    small = replace(base, steps=1, training=replace(base.training, groups=2, minibatches=1),
                    evaluation=proximo.EvaluationOptions(problems=4))
    print(proximo.train(small, folder, quiet=True).checkpoint)
async def inside():
    train("runs/loop")
asyncio.run(inside())
thread = threading.Thread(target=train, args=("runs/thread",))
thread.start()
thread.join()
"""
PACKAGE = """
import importlib.resources, subprocess, sys
import proximo
print("version", proximo.__version__)
print("py.typed", (importlib.resources.files("proximo") / "py.typed").is_file())
print("torch is loaded:", "torch" in sys.modules)
"""


def notebook(user: User) -> None:
    """10."""
    model(user)
    gsm8k(user)
    user.has("execute.py", EXECUTE)
    user.has("loop.py", LOOP)
    user.has("first_run.ipynb", (ROOT / "docs/notebooks/first_run.ipynb").read_text())
    with user.wants("train, metrics and a chart in a notebook", lines=4) as goal:
        for number, cell in enumerate(CELLS):
            goal.writes(f"cell{number}.py", cell)
        done = goal.types("python execute.py")
        goal.sees(done.out, r"executed 3 cells; [^\n]*svg[^\n]*|executed 3 cells; [^\n]*html[^\n]*")
    with user.wants("the notebook of the documentation") as goal:
        done = goal.types("python execute.py first_run.ipynb")
        goal.sees(done.out, r"executed \d+ cells")
    with user.wants("a run inside a running event loop, and one in a thread") as goal:
        done = goal.types("python loop.py")
        goal.sees(done.out, r"runs/loop\S+")
        goal.sees(done.out, r"runs/thread\S+")


def package(user: User) -> None:
    """13."""
    installed = json.loads(INSTALLED.read_text())
    with user.wants("one command to install") as goal:
        goal.goal.typed += 1  # environment.install typed it
        goal.seen.append(f"{installed['packages']} packages, a wheel of {installed['wheel_bytes'] / 1e6:.1f} MB")
        goal.sees(user.run("pip check").out, r"No broken requirements found")
    user.has("package.py", PACKAGE)
    with user.wants("version, types and a light import") as goal:
        done = goal.types("python -W error package.py")
        goal.sees(done.out, r"version \S+")
        goal.sees(done.out, r"py\.typed True")
        goal.sees(done.out, r"torch is loaded: False")
    with user.wants("three steps of the demo") as goal:
        done = goal.types("proximo train --steps 3 --run runs/demo")
        goal.sees(done.text, r"held-out accuracy\s+before \S+")
        goal.sees((user.folder / "runs/demo/run.json").read_text(), r'"version": "[^"]+"')
