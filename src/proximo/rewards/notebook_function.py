"""A reward function given in Python that stands in no file: a lambda, a notebook's cell, a bound method."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

from proximo.processes.failures import Failure, GraderFailed, checked, plain
from proximo.processes.worker import Junk, described
from proximo.rewards.calling import Adapted, MetricLog, adapted, is_async, to_number
from proximo.rewards.function import check_range, columns_of
from proximo.rewards.grading import Grading, grading
from proximo.rewards.protocol import Waiting
from proximo.rewards.scoring import Answer, ask, groups, noted
from proximo.rewards.workers import Columns, Scored
from proximo.types import Completion, Problem

AT_ONCE = 64
"""Maximum calls of an `async def` function at the same time."""
Function = Callable[..., Any]
"""Function in the form of TRL, verl or verifiers; TRL's f(prompts=…, completions=…, **columns) returns numbers."""


@dataclass(frozen=True)
class GivenFunction:
    """A function that `proximo.train(..., rewards=[f])` was given and that no other process could import.

    It is called as a PythonFunction is, but in the trainer's own process: without a time or memory limit, with the
    process's own random numbers, and with whatever state it keeps. Groups are scored one after the other; the calls of
    an `async def` function wait together. An exception leaves its completions unscored. A
    config file holds its name and a fingerprint only, so a resume needs the same function again.
    """

    name: str
    """Name of the function, which names its part of the reward."""
    code: str
    """Fingerprint of the function's code. A resume with another function is refused unless that is allowed."""
    siblings: bool = False
    """True if the function compares the completions of a group. If it fails, the whole group is unscored."""
    reward_range: tuple[float, float] | None = None
    """Rewards of a wrong and of a right answer, such as 0 and 1, for length penalties. None: not known."""

    needs_answer = False

    def __post_init__(self) -> None:
        check_range(self.reward_range)

    @classmethod
    def of(cls, function: Function, **fields: Any) -> "GivenFunction":
        """The reward that calls this function.

        Example: GivenFunction.of(lambda completions, **columns: [float(len(text)) for text in completions])
        """
        made = cls(name=name_of(function), code=fingerprint(function), **fields)
        object.__setattr__(made, "_function", function)  # no field: a config file cannot hold it
        return made

    @property
    def function(self) -> Function | None:
        """The function itself; None where only a config file was read."""
        return vars(self).get("_function")

    @property
    def label(self) -> str:
        """Name of its part of the reward."""
        return self.name

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        with grading():
            return self.begin(problems, completions)()

    def begin(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Waiting[list[float | None]]:
        if self.function is None:
            raise GraderFailed(
                f"the reward function {self.name!r} was given in Python, and no file holds it: give it again, "
                f"proximo.train(config, run, rewards=[{self.name}])"
            )
        try:
            function = adapted(self.function)
        except ValueError as error:
            raise GraderFailed(f"the reward function {self.name!r} cannot be called: {error}") from None
        caller, begun = _InProcess(function), []
        with grading() as active:
            active.forms[self.name] = function.described
            for asked, answers in groups(problems, completions):
                work = partial(ask, caller, columns_of(asked, answers), alone=not self.siblings)
                begun.append((self._begun(work, active), answers))

        def finish() -> list[float | None]:
            return [score for answer, siblings in begun for score in noted(answer(), siblings, grader=self.name)]

        return finish

    def _begun(self, work: Waiting[Answer], active: Grading) -> Waiting[Answer]:
        """Begin a call: those of an `async def` wait together, those of another function come one after the other."""
        if is_async(self.function):
            return active.threads(self, AT_ONCE).begin(work)
        answer = work()
        return lambda: answer

    def reference(self, problem: Problem) -> str | None:
        """Return None: only the function knows what it likes."""
        return None


@dataclass(frozen=True)
class _InProcess:
    """Calls a function here."""

    function: Adapted

    def call(self, columns: Columns, constants: Mapping[str, Any]) -> Scored | Failure:
        count = len(next(iter(columns.values())))
        # Copies: what a function does to its arguments must not reach the problems of a later step.
        arguments = deepcopy({name: list(column) for name, column in columns.items()} | dict(constants))
        try:
            scores = self.function.scored(arguments, count, log := MetricLog())
        except Junk as error:
            return Failure("junk", plain(str(error)))
        except (
            Exception
        ) as error:  # not BaseException: Ctrl-C and sys.exit end the program that the function is part of
            return Failure(type(error).__name__, plain(described(error)))
        return Scored([checked(to_number(score)) for score in scores], log.means)


def name_of(function: Function) -> str:
    inner = function.func if isinstance(function, partial) else function
    name = getattr(inner, "__name__", None) or type(inner).__name__
    return "".join(letter if letter.isalnum() else "_" for letter in name).strip("_") or "function"


def fingerprint(function: object) -> str:
    """SHA-256 of what a function does: its code, constants, defaults and bound arguments, not where it is written or
    what it calls. Another version of Python may give another."""
    return hashlib.sha256(repr(_content(function)).encode()).hexdigest()[:16]


def _content(value: object) -> object:
    if isinstance(value, partial):
        return "partial", _content(value.func), _steady(value.args), _steady(value.keywords)
    inner = getattr(value, "__func__", value)  # of a bound method, the function
    code = getattr(inner, "__code__", None)
    if isinstance(code, CodeType):
        defaults = getattr(inner, "__defaults__", None), getattr(inner, "__kwdefaults__", None)
        return _code_content(code), _steady(defaults), [_steady(cell.cell_contents) for cell in _cells(inner)]
    call = vars(type(value)).get("__call__")  # of an object that can be called
    if isinstance(getattr(call, "__code__", None), CodeType):
        return type(value).__qualname__, _content(call)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _code_content(code: CodeType) -> object:
    constants = [_code_content(part) if isinstance(part, CodeType) else _steady(part) for part in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames


def _cells(function: Any) -> Sequence[Any]:
    return [cell for cell in function.__closure__ or () if _is_filled(cell)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (asking is what raises)
    except ValueError:
        return False
    return True


def _steady(value: object) -> object:
    """Leave what is the same in every process: plain values as they are, of others the type."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, tuple | list):
        return [_steady(part) for part in value]
    if isinstance(value, dict):
        return sorted((str(key), repr(_steady(part))) for key, part in value.items())
    if isinstance(value, set | frozenset):
        return sorted(repr(_steady(part)) for part in value)
    return type(value).__qualname__
