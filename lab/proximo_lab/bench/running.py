"""Measure, save and print one table, or write the page of all readings."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from proximo.models import pick_device
from proximo_lab.bench import page
from proximo_lab.bench.memory import release
from proximo_lab.bench.options import VLLM, BenchOptions, parsed
from proximo_lab.bench.report import Row, rendered, save
from proximo_lab.bench.session import Session
from proximo_lab.bench.sides import trl
from proximo_lab.bench.tables import TABLES, BenchTable
from proximo_lab.bench.timing import clock_of, surroundings

PAGE = "page"


def main(arguments: Sequence[str], prog: str = "python -m proximo_lab.bench") -> int:
    """Exit status: 0 done, whatever the verdicts; 1 if a row is refused (numbers differ, no memory); 2 bad input."""
    if arguments[:1] == [PAGE]:
        return page.main(arguments[1:], f"{prog} {PAGE}")
    name, options = parsed(arguments, [(table.name, table.what) for table in TABLES], prog)
    table = next(each for each in TABLES if each.name == name)
    try:
        rows, path, session = measured(table, options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not trl.is_there() and set(options.peers) - {VLLM} and not options.ablate:
        print(trl.MISSING)
    print(f"written to {path}\n\n{title(table, session)}\n{rendered(rows, figures=session.on_gpu or table.absolute)}")
    return 1 if any(row.refused for row in rows) else 0


def measured(table: BenchTable, options: BenchOptions) -> tuple[list[Row], Path, Session]:
    """Measure the rows, saving each at once, since a later one may fail."""
    device = pick_device(options.device)
    if torch.device(device).type == "cpu":
        torch.set_num_threads(options.threads)
    session = Session(options, device, clock_of(device), _say)
    rows, path = [], Path()
    for line in table.lines(session):
        session.say(f"{table.name} {line.name}")
        around = _around(table, session)
        try:
            fresh = line.run(session)
        except torch.OutOfMemoryError:
            fresh = [Row(line.name, note="out of memory", refused=True)]
        release(device)
        if not session.on_gpu and options.threads > 1:  # another row than that of one thread
            fresh = [replace(row, name=f"{row.name}, {options.threads} threads") for row in fresh]
        path = save(Path(options.results), table.name, _slug(session), around, fresh)
        rows += fresh
    return rows, path, session


def title(table: BenchTable, session: Session) -> str:
    """The conditions of the measurement, for the heading."""
    around = _around(table, session)
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items() if version)
    load = ", ".join(f"{each:.1f}" for each in around["load"])
    conditions = f"{around['device']}, {around['clock']}, {around['threads']} threads, load {load}; {versions}"
    return f"{table.name}: {table.what}\n{conditions}"


def _around(table: BenchTable, session: Session) -> dict[str, Any]:
    """Options and machine, to be stored with each row."""
    around = {"options": asdict(session.options), **surroundings(session.device)}
    if table.absolute:
        around["clock"] = "seconds on the wall"
    return around | ({"commit": session.options.commit} if session.options.commit else {})


def _slug(session: Session) -> str:
    name = torch.cuda.get_device_name(session.device) if session.on_gpu else "cpu"
    return "-".join(name.lower().removeprefix("nvidia ").split())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
