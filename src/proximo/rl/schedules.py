"""Schedules: numbers of a run's config that change from step to step.

A schedule is a frozen value that gives a field's number at each step, from the step's index and the run's steps alone:
a resumed run, one that samples ahead and one on several ranks have the same numbers without storing any.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proximo.config.plugins import callable_elsewhere, load_function
from proximo.config.unions import check_kinds, classes
from proximo.config.vocabulary import field_of

FUNCTION = "FILE.py:NAME"
"""Form in which a function of a user's is named."""
MAX_PIECES = 5000
"""Values that a function given in Python may take, if no file holds it; a config has to hold them all."""


@dataclass(frozen=True)
class Constant:
    """One number in all steps.

    Example: Constant(0.2).values(3) == [0.2, 0.2, 0.2]
    """

    value: float

    def __post_init__(self) -> None:
        _check(self)

    def values(self, steps: int) -> list[float]:
        """The number of each step of a run."""
        return [float(self.value)] * steps

    @classmethod
    def parsed(cls, value: float) -> "Constant":
        """The schedule of the numbers behind its name in a text."""
        return cls(value)


@dataclass(frozen=True)
class Linear:
    """Way from one number to another in equal parts: the first step has `start`, the last has `end`.

    Example: Linear(0.0, 1.0).values(5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    """

    start: float
    end: float
    steps: int | None = None
    """Number of steps until `end`, which the later ones keep. None: those of the run."""

    def __post_init__(self) -> None:
        _check(self)

    def values(self, steps: int) -> list[float]:
        """The number of each step of a run."""
        return [_between(self.start, self.end, share) for share in _shares(self.steps or steps, steps)]

    @classmethod
    def parsed(cls, start: float, end: float, steps: float | None = None) -> "Linear":
        """The schedule of the numbers behind its name in a text."""
        return cls(start, end, None if steps is None else _whole(steps))


@dataclass(frozen=True)
class Cosine:
    """Way from one number to another as half a cosine, slowly at both ends.

    Example: Cosine(1.0, 0.0).values(3) == [1.0, 0.5, 0.0]
    """

    start: float
    end: float
    steps: int | None = None
    """Number of steps until `end`, which the later ones keep. None: those of the run."""

    def __post_init__(self) -> None:
        _check(self)

    def values(self, steps: int) -> list[float]:
        """The number of each step of a run."""
        shares = _shares(self.steps or steps, steps)
        return [_between(self.start, self.end, (1 - math.cos(math.pi * share)) / 2) for share in shares]

    @classmethod
    def parsed(cls, start: float, end: float, steps: float | None = None) -> "Cosine":
        """The schedule of the numbers behind its name in a text."""
        return cls(start, end, None if steps is None else _whole(steps))


@dataclass(frozen=True)
class Piecewise:
    """Numbers that each hold for some steps.

    Example: Piecewise((0.3, 0.2), at=(2,)).values(4) == [0.3, 0.3, 0.2, 0.2]
    """

    numbers: tuple[float, ...]
    at: tuple[int, ...] = ()
    """Number of steps done when each number but the first begins to hold."""

    def __post_init__(self) -> None:
        if len(self.numbers) != len(self.at) + 1:
            raise ValueError(f"{self.numbers} at {self.at}: give a step for each number but the first")
        if list(self.at) != sorted({*self.at}) or any(step < 1 for step in self.at):
            raise ValueError(f"at is {self.at}: give steps from 1 on, each later than the one before")
        _check(self)

    def values(self, steps: int) -> list[float]:
        """The number of each step of a run."""
        return [float(self.numbers[bisect_right(self.at, step)]) for step in range(steps)]

    @classmethod
    def parsed(cls, *numbers: float) -> "Piecewise":
        """The schedule of the numbers behind its name in a text: value, step, value, step, value."""
        return cls(numbers[::2], tuple(map(_whole, numbers[1::2])))


@dataclass(frozen=True)
class PythonSchedule:
    """A function of a user's, called as f(step, steps): the index of a step, from 0, and the number of all.

    It is called for all steps before the run begins, and has to give the same numbers each time.
    """

    path: str
    """Function to call: package.module:function, or path/to/file.py:function."""

    def __post_init__(self) -> None:
        source, _, name = self.path.rpartition(":") if isinstance(self.path, str) else ("", "", "")
        if not source or not name.isidentifier():
            raise ValueError(f"path is {self.path!r}: give a function, {FUNCTION} or package.module:NAME")

    def values(self, steps: int) -> list[float]:
        """The number of each step of a run."""
        return _called(self.path, load_function(self.path), steps)


Schedule = Constant | Linear | Cosine | Piecewise | PythonSchedule
Changing = Schedule | str | float | Callable[[int, int], float]
"""A schedule as Python takes it: also a text such as "linear:0.28:0.2", a number, or a function f(step, steps)."""

constant, linear, cosine, piecewise = Constant, Linear, Cosine, Piecewise


def _shares(length: int, steps: int) -> list[float]:
    """Share of the way that each step has gone: 0 at the first, 1 from the last one of `length` on."""
    return [min(step / max(length - 1, 1), 1.0) for step in range(steps)]


def _between(start: float, end: float, share: float) -> float:
    """The number at a share of the way, exact at both ends, where start + share · (end − start) is not."""
    return float(start) if share == 0 else float(end) if share == 1 else start + share * (end - start)


def _check(schedule: object) -> None:
    """Refuse numbers that are none, or not finite, and a length below 1."""
    check_kinds(schedule)
    for name, held in vars(schedule).items():
        for number in held if isinstance(held, tuple) else [held]:
            if number is not None and (isinstance(number, str) or not math.isfinite(number)):
                raise ValueError(f"{name} is {held!r}: give finite numbers")
    if (length := vars(schedule).get("steps")) is not None and length < 1:
        raise ValueError(f"steps is {length}: give at least 1, or leave it out for those of the run")


def _whole(number: float) -> int:
    if not math.isfinite(number) or number != int(number):
        raise ValueError(f"{number:g} is no step: give a whole number")
    return int(number)


def _called(name: str, function: Callable[[int, int], Any], steps: int) -> list[float]:
    """The numbers that a function gives for each step; ValueError says for which one it gives none."""
    numbers = []
    for step in range(steps):
        try:
            number = float(function(step, steps))
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"{name}({step}, {steps}) failed, {type(error).__name__}: {error}; give a function f(step, steps) that "
                "returns a number"
            ) from error
        if not math.isfinite(number):
            raise ValueError(f"{name}({step}, {steps}) is {number}: return a finite number")
        numbers.append(number)
    return numbers


# Schedules as they are given


def schedule_of(given: Changing, steps: int) -> Schedule:
    """The schedule that a value in Python stands for; a function that no file holds is asked about all steps now.

    Example: schedule_of("linear:0.28:0.2", 100) == Linear(0.28, 0.2)
    """
    if isinstance(given, str):
        return parsed(given)
    if isinstance(given, int | float):
        return Constant(given)
    if not callable(given):
        return given
    if (path := callable_elsewhere(given)) is not None:
        return PythonSchedule(path)
    return _tabulated(_called(getattr(given, "__name__", "the schedule"), given, steps))


def _tabulated(values: Sequence[float]) -> Piecewise:
    changes = [step for step in range(1, len(values)) if values[step] != values[step - 1]]
    if len(changes) >= MAX_PIECES:
        raise ValueError(
            f"a schedule has {len(changes)} different numbers and stands in no file: write its function into one, and "
            "import it from there"
        )
    return Piecewise((values[0], *(values[step] for step in changes)), tuple(changes))


def parsed(text: str) -> Schedule:
    """The schedule that a text names: a kind with its numbers behind colons, or a function.

    Example: parsed("linear:0.28:0.2:100") == Linear(0.28, 0.2, steps=100)
    """
    name, *numbers = text.split(":")
    kind = {each.__name__.lower(): each for each in classes(Schedule) if hasattr(each, "parsed")}.get(name)
    if kind is None and not numbers:
        return Constant(_number(text))
    if kind is None:
        return PythonSchedule(text)
    try:
        return kind.parsed(*map(_number, numbers))
    except TypeError:
        raise ValueError(
            f"{text} has {len(numbers)} numbers: give constant:VALUE, linear:START:END, cosine:START:END, both with "
            ":STEPS where they end earlier, or piecewise:VALUE:STEP:VALUE"
        ) from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number, kind of schedule or {FUNCTION}") from None


def with_schedules(
    fields: Mapping[str, Changing], held: Mapping[str, Schedule] | None, steps: int
) -> dict[str, Schedule]:
    """Schedules that a config has, and those that are given for its fields, or for the words that stand for these."""
    given = {_field(name): _schedule_for(name, each, steps) for name, each in fields.items()}
    return {**(held or {}), **given}


def _schedule_for(name: str, given: Changing, steps: int) -> Schedule:
    try:
        return schedule_of(given, steps)
    except ValueError as error:
        raise ValueError(f"schedules.{name}: {error}") from None


def _field(name: str) -> str:
    """Example: _field("temperature") == "sampling.temperature"."""
    return field_of("train", name) or name


def spelled_out(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of schedules as a person may write it, with the tables that a config has: texts and numbers are
    schedules, and keys without quotes, which TOML takes for tables, are one dotted name.

    Example: spelled_out({"sampling": {"temperature": 0.9}}) ==
        {"sampling.temperature": {"type": "Constant", "value": 0.9}}
    """
    return {_field(key): _spelled_out(item) for key, item in _flat(table)}


def _flat(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, item in table.items():
        if isinstance(item, dict) and "type" not in item:
            yield from ((f"{key}.{inner}", each) for inner, each in _flat(item))
        else:
            yield key, item


def _spelled_out(item: Any) -> Any:
    """Table of a schedule that is given as a text or a number; what is another is left for the reader to refuse."""
    if not isinstance(item, str | int | float) or isinstance(item, bool):
        return item
    schedule = parsed(str(item))
    fields = {name: list(held) if isinstance(held, tuple) else held for name, held in vars(schedule).items()}
    return {"type": type(schedule).__name__} | {name: held for name, held in fields.items() if held is not None}
