"""Environments that were written for TRL's `environment_factory`: a class whose methods are tools."""

import inspect
import random
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from proximo.environments import Done, Environment

SEED = "start_seed"
"""Column of the seed that `reset` has for its random numbers."""


def environment_of(factory: Callable[[], Any]) -> tuple[type[Environment], dict[str, Callable[..., Any]]]:
    """The environment, and its methods as tools by name.

    The class has `reset(**row)`, methods that the policy calls, and `get_reward()`, which is asked when a reply calls
    none of them. Each episode runs in a process of its own, with an instance of its own. A class that draws its task in
    `reset` draws the same one for all samples of a row that `started` has made.

    Example, in a file whose names a config gives:
        Game, tools = environment_of(TheirEnvironment)
        globals().update(tools)
    """
    playing: list[Any] = []

    class Wrapped(Environment):
        own_errors = tuple(getattr(factory, "own_errors", ()))

        def reset(self, problem: dict[str, Any]) -> None:
            playing[:] = [factory()]
            _check_opening(_reset(playing[0], problem), problem)

        def step(self, reply: str) -> Any:
            return _done(playing[0].get_reward())

    members = inspect.getmembers(type(factory()), predicate=inspect.isfunction)
    names = [name for name, _ in members if name not in ("reset", "get_reward") and not name.startswith("_")]
    return Wrapped, {name: _function(method, playing) for name, method in members if name in names}


def started(factory: Callable[[], Any], rows: Iterable[dict[str, Any]] | int) -> list[dict[str, Any]]:
    """The rows with what `reset` returns at the end of their prompts, which is where TRL puts it; or so many rows for a
    class that needs no data, since its `reset` returns the prompt."""
    given = [{"prompt": [{"role": "user", "content": ""}]} for _ in range(rows)] if isinstance(rows, int) else rows
    starts = []
    for number, row in enumerate(given):
        row = {**row, SEED: number}
        opening, prompt = _reset(factory(), row), row["prompt"]
        if opening is not None and isinstance(prompt, str):
            prompt += opening
        elif opening is not None:
            *others, last = prompt
            prompt = [*others, {**last, "content": last["content"] + opening}]
        starts.append({**row, "prompt": prompt})
    return starts


def _reset(environment: Any, row: dict[str, Any]) -> Any:
    """Start an episode as TRL does, with the random numbers of the row if it has them."""
    if SEED in row:
        random.seed(row[SEED])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(row[SEED])
    return environment.reset(**{name: value for name, value in row.items() if name != SEED})


def _check_opening(opening: Any, problem: dict[str, Any]) -> None:
    prompt = problem["prompt"]
    asked = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
    if opening is not None and not asked.endswith(opening):
        raise ValueError(
            f"reset returned {opening[:80]!r}, which the prompt does not end with: give started(factory, rows)"
        )


def _done(reward: Any) -> Any:
    if not inspect.isawaitable(reward):
        return Done(float(reward))

    async def waited() -> Done:
        return Done(float(await reward))

    return waited()


def _function(method: Callable[..., Any], playing: list[Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(**arguments: Any) -> Any:
        return method(playing[0], **arguments)

    its = inspect.signature(method)
    vars(call)["__signature__"] = its.replace(parameters=list(its.parameters.values())[1:])
    del call.__wrapped__
    return call
