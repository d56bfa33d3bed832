"""Environments and tools given in Python, as a config holds them."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from proximo.config.plugins import place_of
from proximo.environments.multi_turn import MultiTurn
from proximo.environments.protocol import Interaction

Tool = str | Callable[..., Any]


def given_environment(environment: Any, tools: Sequence[Tool], max_turns: int | None) -> Interaction | None:
    """The config's value for an environment, which is a class with `reset` and `step`, an instance of one, its path or
    a config's own value, and for tools, which are functions or their paths; None where nothing is given."""
    changes: dict[str, Any] = {} if max_turns is None else {"max_turns": max_turns}
    if tools:
        changes["tools"] = tuple(_path("tools", tool) for tool in tools)
    if isinstance(environment, MultiTurn):
        return replace(environment, **changes)
    if isinstance(environment, Interaction) and not isinstance(environment, type):
        if changes:
            raise ValueError(
                f"environment is a {type(environment).__name__}, which has turns and tools of its own: leave "
                f"{' and '.join(changes)} out"
            )
        return environment
    if environment is not None:
        kind, arguments = _made(environment)
        return MultiTurn(_path("environment", kind), arguments, **changes)
    if "tools" in changes:
        return MultiTurn(**changes)
    if changes:
        raise ValueError(
            f"max_turns is {max_turns}, but there is no environment and no tools: give one, or leave it out"
        )
    return None


def _made(environment: Any) -> tuple[Any, dict[str, Any]]:
    """The class of an environment, and the arguments that make it."""
    if isinstance(environment, str | type):
        return environment, {}
    if not callable(getattr(environment, "step", None)):
        raise ValueError(
            f"environment is {environment!r}: give a class with reset(problem) and step(reply), or its path"
        )
    if dataclasses.is_dataclass(environment):
        names = [field.name for field in dataclasses.fields(environment) if field.init]
        return type(environment), {name: getattr(environment, name) for name in names}
    if vars(environment):
        raise ValueError(
            f"environment is a {type(environment).__name__} with {', '.join(vars(environment))}, and each episode gets "
            "an instance of its own: give the class, or MultiTurn(path, arguments={...})"
        )
    return type(environment), {}


def _path(name: str, thing: Any) -> str:
    if isinstance(thing, str):
        return thing
    path = place_of(thing)
    if path is None or path.rpartition(":")[0].endswith("__main__"):
        raise ValueError(
            f"{name} has {thing!r}, which another process cannot find: write it at the top level of a file, and give "
            "'path/to/file.py:Name'"
        )
    return path
