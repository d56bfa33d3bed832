"""Cases that the tests already have as tables: they are run as they are, and counted by kind of fault."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proximo_lab.faults.cases import Ending, Findings

ROOT = Path(__file__).resolve().parents[3]
LONGEST = 400
"""Seconds for one file."""


@dataclass(frozen=True)
class Rule:
    """Kind of a test function's cases."""

    kind: str
    ended: Ending
    """Ending that it shows when it passes."""
    part: Callable[[str], str] | None = None
    """Part of a case's name that makes it a kind of its own."""


def first_word(name: str) -> str:
    return name.partition("-")[0].removeprefix("in_").replace("_", " ")


def all_but_last(name: str) -> str:
    """Name without the algorithm; pytest escapes what is not ASCII."""
    return name.rpartition("-")[0].encode().decode("unicode_escape")


def run_tests(
    file: str,
    rules: Mapping[str, Rule],
    controls: Mapping[str, str],
    folder: Path,
    findings: Findings,
    *,
    longest: float = LONGEST,
) -> None:
    """Run the named functions of a test file; controls are no cases, but without them nothing counts."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in _rows(file, [*controls, *rules], folder / f"{Path(file).stem}.jsonl", longest):
        function, _, rest = row["test"].rpartition("::")[2].partition("[")
        name, passed = rest.removesuffix("]") or function, row["outcome"] == "passed"
        if function in controls:
            if passed:
                findings.controls = list(dict.fromkeys([*findings.controls, controls[function]]))
            else:
                findings.add(f"control: {controls[function]}", name, _bad(row), row["reason"])
            continue
        rule = rules[function]
        kind = rule.kind if rule.part is None else f"{rule.kind}: {rule.part(name)}"
        findings.add(kind, name, rule.ended if passed else _bad(row), "" if passed else row["reason"])


def _bad(row: Mapping[str, str]) -> Ending:
    return "not run" if row["outcome"] == "skipped" else "failed"


def _rows(file: str, functions: Sequence[str], rows: Path, longest: float) -> list[dict[str, str]]:
    chosen = [f"tests/{file}::{function}" for function in functions]
    # -m "": those that `make test` leaves out because they take minutes too.
    options = ["-q", "-m", "", "-p", "no:cacheprovider", "-p", "proximo_lab.faults.counting", "--cases", str(rows)]
    command, environment = [sys.executable, "-m", "pytest", *options, *chosen], os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=longest, check=False
        )
        outcome, reason = "skipped", f"pytest ended with {done.returncode}: {done.stdout[-300:]}"
    except subprocess.TimeoutExpired:
        outcome, reason = "failed", f"no end after {longest:g} s"
    cases = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    seen = {row["test"].rpartition("::")[2].partition("[")[0] for row in cases}
    missing = [f"tests/{file}::{function}" for function in functions if function not in seen]
    return cases + [{"test": test, "outcome": outcome, "reason": reason} for test in missing]
