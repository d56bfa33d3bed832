# pyright: reportMissingImports=false
"""Environments of gymnasium that can be played in words: a reply is an action, an observation is text."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from proximo.environments import Done, Environment, Observation
from proximo.environments.seeded_start import check_start


class Gymnasium(Environment):
    """An environment by its id. Actions are a number, one of `actions` by name, or the reply itself in a text space.

    An observation is the text that the environment renders, where it does (`render_mode="ansi"`), and else its value.
    """

    def __init__(self, name: str, actions: Sequence[str] = (), modules: Sequence[str] = (), **options: Any) -> None:
        """`actions`: names of the actions 0, 1, …; `modules`: imported before, as those that register environments;
        `options`: arguments of `gymnasium.make`."""
        import gymnasium

        import_all(modules)
        if "ansi" in _metadata(name).get("render_modes", ()):
            options.setdefault("render_mode", "ansi")
        self._actions = [action.lower() for action in actions]
        self._game = gymnasium.make(name, **options)

    @classmethod
    def before_episodes(cls, name: str, modules: Sequence[str] = (), **_: Any) -> None:
        """Import gymnasium and the module of the environment."""
        import_all(modules)
        _metadata(name)

    def start(self, seed: int) -> str:
        """The first observation after a reset with this seed."""
        seen, _ = self._game.reset(seed=seed)
        return self._text(seen)

    def reset(self, problem: dict[str, Any]) -> None:
        check_start(problem, self.start(int(problem["start"])))

    def step(self, reply: str) -> Observation | Done:
        action = self._action(reply)
        if action is None:
            return Observation(f"Reply with {self._choices()}.")
        seen, reward, ended, cut, _ = self._game.step(action)
        return Done(float(reward)) if ended or cut else Observation(self._text(seen), float(reward))

    def _action(self, reply: str) -> Any:
        space = self._game.action_space
        if self._actions:
            named = re.findall("|".join(map(re.escape, sorted(self._actions, key=len, reverse=True))), reply.lower())
            return self._actions.index(named[-1]) if named else None
        if type(space).__name__ == "Text":
            return reply if space.contains(reply) else None
        with contextlib.suppress(ValueError):
            action = int(re.findall(r"-?\d+", reply)[-1]) if re.search(r"\d", reply) else None
            return action if action is not None and space.contains(action) else None
        return None

    def _choices(self) -> str:
        return f"one of {', '.join(self._actions)}" if self._actions else f"an action of {self._game.action_space}"

    def _text(self, seen: Any) -> str:
        if isinstance(seen, str):
            return seen
        drawn = self._game.render() if self._game.render_mode == "ansi" else None
        if isinstance(drawn, str):
            return re.sub(r"\x1b\[(\d+;?)*m", _mark, drawn).strip("\n")
        return json.dumps(_plain(seen))


def import_all(modules: Sequence[str]) -> None:
    """Import gymnasium and the modules that register environments."""
    for module in ("gymnasium", *modules):
        import_module(module)


def _mark(colour: re.Match[str]) -> str:
    """Write a colour, which shows where the player is, as a bracket."""
    return "]" if colour[0] == "\x1b[0m" else "["


def _metadata(name: str) -> Mapping[str, Any]:
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    entry = gymnasium.spec(name).entry_point
    made = load_env_creator(entry) if isinstance(entry, str) else entry
    return getattr(made, "metadata", {})


def _plain(seen: Any) -> Any:
    """Replace numpy's values by numbers and lists."""
    if isinstance(seen, Mapping):
        return {str(key): _plain(value) for key, value in seen.items()}
    if isinstance(seen, tuple | list):
        return [_plain(part) for part in seen]
    return seen.tolist() if hasattr(seen, "tolist") else seen
