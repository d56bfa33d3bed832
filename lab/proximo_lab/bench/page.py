"""`page`: writes the tables of docs/performance.md from the stored readings. The text around them is written by hand.

A table stands between two comments, `<!-- bench TABLE on MACHINE -->` and `<!-- bench end -->`, where MACHINE is the
name of a GPU, or CPU; `bench TABLE on MACHINE, ablated` is of our own techniques switched off one by one.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proximo.planning import workloads
from proximo.planning.workloads import Workload
from proximo_lab.bench.readings import Reading, current, read_results
from proximo_lab.bench.tables import TABLES
from proximo_lab.bench.tables.comparing import described

SECTION = re.compile(r"<!-- bench (\w+) on ([^,\n]+?)(, ablated)? -->\n.*?<!-- bench end -->", re.DOTALL)
PAGE, RESULTS = "docs/performance.md", "benchmarks/results"
EMPTY = "Not measured yet."


def main(arguments: Sequence[str], prog: str) -> int:
    """Write the page's tables anew; 2 if a file cannot be read."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write the tables of a page from the stored readings: of each machine and row the newest, and the "
        "newest with each peer.",
        epilog=f"example:\n  {prog} --page {PAGE} --results {RESULTS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--page", default=PAGE, metavar="FILE", help=f"page to write (default: {PAGE})")
    parser.add_argument("--results", default=RESULTS, metavar="DIR", help=f"readings (default: {RESULTS})")
    given = parser.parse_args(list(arguments))
    page, results = Path(given.page), Path(given.results)
    try:
        if not page.is_file() or not results.is_dir():
            missing = page if not page.is_file() else results
            raise ValueError(f"{missing} is not there: give --page FILE and --results DIR")
        page.write_text(filled(page.read_text(), read_results(results)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written to {page}")
    return 0


def filled(text: str, readings: Sequence[Reading]) -> str:
    """The page with its tables written anew. ValueError for a section of a table that is not there."""
    shown = current(readings)

    def written(section: re.Match[str]) -> str:
        table, section_name, ablated = section.groups()
        if table not in {*_names(), *(reading.table for reading in readings)}:
            raise ValueError(f"the page has a section for table {table!r}: there are {', '.join(_names())}")
        chosen = [
            each
            for each in shown
            if (each.table, each.section, each.is_ablation) == (table, section_name, bool(ablated))
        ]
        head = section.group(0).partition("\n")[0]
        return f"{head}\n\n{section_text(chosen)}\n\n<!-- bench end -->"

    return SECTION.sub(written, text)


def section_text(readings: Sequence[Reading]) -> str:
    """A table, and the versions that its rows were measured with."""
    if not readings:
        return EMPTY
    readings = sorted(readings, key=_order)
    seconds = readings[0].on_gpu or any(table.absolute for table in TABLES if table.name == readings[0].table)
    columns = [*dict.fromkeys(name for each in readings for name in each.stored["figures"])] if seconds else []
    columns += dict.fromkeys(name for each in readings for name in each.stored["ratios"])
    lines = [["row", "work", *columns, "target", "reached", "note", "machine", "when"]]
    several = len({each.machine for each in readings}) > 1
    for each in readings:
        targets, reached = (
            zip(*(verdict.cells() for verdict in each.verdicts), strict=True) if each.verdicts else ((), ())
        )
        values = [each.columns.get(name, "") for name in columns]
        machine, when = each.machine if several else "", " ".join(filter(None, [each.date, each.commit]))
        note = f"refused: {each.stored['note']}" if each.stored["refused"] else each.stored["note"]
        lines.append([each.name, work_of(each), *values, "; ".join(targets), "; ".join(reached), note, machine, when])
    return f"{markdown(lines)}\n\n{versions(readings)}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table; columns that are empty below their heading are left out."""
    kept = [column for column in range(len(lines[0])) if any(line[column] for line in lines[1:])]
    cells = [[line[column].replace("|", "\\|") for column in kept] for line in lines]
    head, *rows = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([head, "|" + "---|" * len(kept), *rows])


def versions(readings: Sequence[Reading]) -> str:
    """One line for each machine and set of versions, with the days."""
    days: dict[str, list[str]] = {}
    for reading in readings:
        around = reading.around
        used = ", ".join(f"{name} {version}" for name, version in around.get("versions", {}).items() if version)
        parts = [reading.machine, around.get("clock"), used or None, around.get("source")]
        days.setdefault("; ".join(filter(None, parts)), []).append(reading.date)
    return "\n".join(f"- {', '.join(sorted(set(dates)))}: {stated}." for stated, dates in days.items())


def work_of(reading: Reading) -> str:
    """The model, completions and lengths of a reading, as stored; of a phase as the workload of its name has them."""
    stored = reading.stored["details"].get("workload") or _known(reading.name)
    return "" if stored is None else _work(stored)


def _work(stored: Mapping[str, Any]) -> str:
    completion = stored["completion"]
    tokens, longest, rows = completion["tokens"], completion["longest"], completion["rows"]
    even = tokens == longest * rows
    limit = completion.get("limit", longest)
    length = f"R={longest:,}" if even else f"R={tokens / rows:,.0f} on average, {limit:,} at most"
    adapter = f", LoRA of rank {stored['adapter']['rank']}" if stored.get("adapter") else ""
    return (
        f"{stored['shape']['name']}{adapter}, {stored['groups']}×{stored['siblings']}, P={stored['prompt']:,}, {length}"
    )


def _known(name: str) -> dict[str, Any] | None:
    """The workload that a row's name begins with."""
    begun = [
        workload
        for workload in vars(workloads).values()
        if isinstance(workload, Workload) and _begins(name, workload.name)
    ]
    return described(begun[0]) if begun else None


def _begins(name: str, workload: str) -> bool:
    return name == workload or name.startswith((f"{workload} ", f"{workload},"))


def _order(reading: Reading) -> int:
    """Order of the benchmark's own tables; other rows come after them."""
    lines = [line.name for table in TABLES if table.name == reading.table for line in (*table.gpu, *table.cpu)]
    return next((number for number, line in enumerate(lines) if _begins(reading.name, line)), len(lines))


def _names() -> list[str]:
    return [table.name for table in TABLES]
