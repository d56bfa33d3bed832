"""Cases that were tried and how they ended; the only thing that the report is written from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Ending = Literal["R", "C", "S", "failed", "not run"]
"""Resumed bit-equal; continued with the fault counted; stopped with exit code and hint."""
ENDINGS: tuple[Ending, ...] = ("R", "C", "S", "failed", "not run")
LONGEST = 400
"""Characters of a detail."""


@dataclass(frozen=True)
class Case:
    kind: str
    """Kind of fault; a report counts cases by it."""
    name: str
    ended: Ending
    detail: str = ""


@dataclass
class Findings:
    """Findings of one family."""

    cases: list[Case] = field(default_factory=list)
    controls: list[str] = field(default_factory=list)
    """Controls that showed that faults of this family really happen."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Numbers for the head of the report, by name."""
    gaps: list[str] = field(default_factory=list)
    """Gaps: what is known not to hold, or could not be looked at."""

    def add(self, kind: str, name: str, ended: Ending, detail: str = "") -> None:
        self.cases.append(Case(kind, name, ended, detail[:LONGEST]))
        if ended in ("failed", "not run"):
            print(f"  {ended}: {kind}, {name}: {detail[:LONGEST]}", flush=True)

    def judge(self, kind: str, name: str, wanted: Ending, wrong: str | None) -> None:
        """Ended as it should, unless something was wrong."""
        self.add(kind, name, wanted if wrong is None else "failed", wrong or "")

    def attempt(self, kind: str, name: str, wanted: Ending, happens: Callable[[], str | None]) -> None:
        """Add a case; `happens` says what was wrong; an error of the suite itself is a failure, too."""
        try:
            self.judge(kind, name, wanted, happens())
        except NotRun as reason:
            self.add(kind, name, "not run", str(reason))
        except Exception as error:
            self.add(kind, name, "failed", f"{type(error).__name__}: {error}")

    def to_dict(self) -> dict[str, Any]:
        kinds: dict[str, dict[str, Any]] = {}
        for case in self.cases:
            counts = kinds.setdefault(case.kind, dict.fromkeys(ENDINGS, 0) | {"details": []})
            counts[case.ended] += 1
            if case.detail:
                counts["details"].append(f"{case.name}: {case.detail}")
        return {"kinds": kinds, "controls": self.controls, "figures": self.figures, "gaps": self.gaps}


class NotRun(Exception):
    """A fault that could not be injected here."""


def totals(families: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Totals over all families: kinds, cases, and how many ended in each way."""
    kinds = [kind for family in families.values() for kind in family["kinds"].values()]
    count = {ending: sum(kind[ending] for kind in kinds) for ending in ENDINGS}
    tried = [kind for kind in kinds if sum(kind[ending] for ending in ENDINGS[:-1])]
    return {"kinds": len(tried), "cases": sum(count[ending] for ending in ENDINGS[:-1]), **count}
