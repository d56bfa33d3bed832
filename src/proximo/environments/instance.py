"""One episode: an environment and tools, asked by messages. Runs in a process of its own, and imports nothing heavy."""

import inspect
import json
import math
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from proximo.environments import Done, Observation

CUT = " ... (cut)"
"""Mark behind an answer that was longer than is read."""
OWN_ERRORS = (OSError, MemoryError, NotImplementedError)
"""Exceptions that no reply causes, of every environment."""
_OF_A_NETWORK = re.compile(
    "(Timeout|Connect|Connection|Transport|Network)(Error|Exception|Expired|Closed|Lost|Refused|Reset)?(Error|OK)?$"
)
"""Endings of names of network errors, whose library need not derive them from OSError. Not NetworkXNoPath's, which a
reply causes."""


class Instance:
    """An episode's environment and tools. `finish` awaits what an `async def` returns."""

    def __init__(
        self,
        make: Callable[[], Any] | None,
        tools: Mapping[str, Callable[..., Any]],
        finish: Callable[[Any], Any],
        max_characters: int,
    ) -> None:
        self._environment = None if make is None else make()
        self._tools, self._finish, self._max_characters = tools, finish, max_characters

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a message asks for, and return plain values; whatever the environment raises is raised."""
        match message["do"]:
            case "reset":
                return self._reset(message["problem"])
            case "step":
                return self._step(message["reply"])
            case _:
                return self._call(message["name"], message["arguments"])

    def _reset(self, problem: Mapping[str, Any]) -> dict[str, Any]:
        start = None if self._environment is None else self._finish(self._environment.reset(problem))
        prompt = problem["prompt"]
        if start is not None and start not in (prompt, prompt if isinstance(prompt, str) else prompt[-1]["content"]):
            raise ValueError(
                f"reset returned {_short(start)}: return None, or the prompt, with which the policy starts"
            )
        return {"started": True}

    def _step(self, reply: str) -> dict[str, Any]:
        assert self._environment is not None
        try:
            outcome = self._finish(self._environment.step(reply))
        except (Exception, SystemExit) as error:  # argparse ends a process over what it cannot read
            if is_own(error, tuple(getattr(self._environment, "own_errors", ()))):
                raise
            return {"done": True, "error": type(error).__name__[:80], "message": _described(error)}
        if isinstance(outcome, Done):
            return {"done": True, "reward": _number(outcome.reward)}
        if isinstance(outcome, Observation) and isinstance(outcome.text, str):
            return {"text": self._cut(outcome.text), "reward": _number(outcome.reward)}
        raise TypeError(f"step returned {_short(outcome)}: return an Observation with a text, or a Done")

    def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a tool, and return its result as text. What it raises is told to the policy, which may do better."""
        try:
            inspect.signature(self._tools[name]).bind(**arguments)
            result = self._finish(self._tools[name](**arguments))
            text = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
        except Exception as error:
            return {"text": self._cut(f"Error: {type(error).__name__}: {error}"), "failed": type(error).__name__}
        return {"text": self._cut(text)}

    def _cut(self, text: str) -> str:
        return text if len(text) <= self._max_characters else text[: self._max_characters] + CUT


def is_own(error: BaseException, declared: tuple[type[Exception], ...] = ()) -> bool:
    """Tell whether an error is the environment's own, and not what the policy's reply has caused. `declared`: those
    that it says are."""
    names = (kind.__name__ for kind in type(error).__mro__)
    if isinstance(error, (*OWN_ERRORS, *declared)) or any(map(_OF_A_NETWORK.search, names)):
        return True
    return error.__cause__ is not None and is_own(error.__cause__, declared)


def _described(error: BaseException) -> str:
    """An error and the line that raised it."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ may be what is broken
        text = type(error).__name__
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{text[:500]} ({Path(last.filename).name}, line {last.lineno})"


def allowed(seconds: float, calls: int, cores: float) -> float:
    """Seconds until calls that run at once must have answered: each may need a core for `seconds`."""
    return min(seconds * math.ceil(calls / cores), 1e6)  # poll takes no more than 2**31 milliseconds


def _number(reward: Any) -> float:
    number = float(reward)
    if not -1e6 <= number <= 1e6:
        raise ValueError(f"a reward of {number}: give a finite number, at most a million")
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]} …"
