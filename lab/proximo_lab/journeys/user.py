"""A user: what he has, what he types and writes for a goal, and what he sees."""

import re
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from proximo_lab.journeys.environment import surroundings

PATIENCE = 1800
"""Seconds that a command may take on a busy machine."""


def effort(commands: int, lines: int) -> str:
    shown = f"{commands} command{'s' * (commands != 1)}"
    return shown + f", {lines} line{'s' * (lines != 1)}" * bool(lines)


@dataclass
class Goal:
    """Goal of a user. `commands` and `lines` are what would be excellent; `typed` and `written` what it
    took."""

    journey: int
    name: str
    commands: int
    lines: int
    typed: int = 0
    written: int = 0
    seen: list[str] = field(default_factory=list)
    left: str | None = None
    """Work that is left, in one line; None where the goal is reached."""

    @property
    def is_reached(self) -> bool:
        return self.left is None and self.typed <= self.commands and self.written <= self.lines

    @property
    def reason(self) -> str:
        """Reason why it is left."""
        return self.left or f"took {effort(self.typed, self.written)}"

    def sees(self, text: str, pattern: str) -> str:
        """The part of the text that matches, which goes into the table; fails where there is none."""
        match = re.search(pattern, text)
        assert match is not None, f"does not see {pattern!r} in {text[-1500:]!r}"
        self.seen.append(" ".join((match[1] if match.groups() else match[0]).split()))
        return match[0]


@dataclass(frozen=True)
class Output:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


class User:
    def __init__(self, journey: int, folder: Path) -> None:
        self.journey, self.folder = journey, folder
        self.goals: list[Goal] = []
        self.environment = surroundings(folder / "home")
        (folder / "home").mkdir(parents=True)

    def has(self, name: str, text: str) -> None:
        """A file that he has already, such as data or a reward function."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, command: str, code: int | None = 0) -> Output:
        """Type a command, counted by nobody: `Goal`s count through `types`."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        last = ([""] + [line for line in done.stderr.splitlines() if line.strip()])[-1]
        assert code is None or done.returncode == code, f"{command}: exit {done.returncode}: {last}"
        return Output(done.returncode, done.stdout, done.stderr)

    @contextmanager
    def wants(self, name: str, *, commands: int = 1, lines: int = 0) -> Iterator["Trying"]:
        goal = Goal(self.journey, name, commands, lines)
        self.goals.append(goal)
        print(f"  {self.journey}: {name}", flush=True)
        try:
            yield Trying(self, goal)
        except Exception as error:
            goal.left = (str(error).splitlines() or [type(error).__name__])[0][:300]
            traceback.print_exc()
        print(f"  {self.journey}: {'reached' if goal.is_reached else 'LEFT'}: {goal.left or goal.seen}", flush=True)


class Trying:
    """One goal being tried."""

    def __init__(self, user: User, goal: Goal) -> None:
        self._user, self.goal = user, goal
        self.sees, self.seen = goal.sees, goal.seen

    def types(self, command: str, code: int | None = 0) -> Output:
        self.goal.typed += 1
        return self._user.run(command, code)

    def writes(self, name: str, text: str) -> None:
        """Code that the goal needs, without empty lines, imports and functions that he had already."""
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
        self.goal.written += len(lines)
        self._user.has(name, text)
