"""Environments as their authors write them: a class with `reset` and `step`. Imports nothing heavy."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["Done", "Environment", "Observation"]

KINDS = ("Acting", "Ask", "EnvironmentOptions", "Interaction", "MultiTurn", "Question", "SingleTurn", "Starts")
"""Names of kinds.py that users' files import from here; they load torch, and only when they are asked for."""


def __getattr__(name: str) -> Any:
    if name in KINDS:
        return getattr(import_module("proximo.environments.kinds"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class Observation:
    """Text that the policy reads after a reply; the episode continues."""

    text: str
    reward: float = 0.0
    """Reward of the reply."""


@dataclass(frozen=True)
class Done:
    """The end of an episode."""

    reward: float = 0.0
    """Reward of the last reply. An episode's reward is the sum over its replies."""


class Environment:
    """An episode of several turns. Each sample of a problem has an instance of its own, which may keep what it likes.

    What `step` raises is the policy's doing, such as a reply that `int` cannot read: the episode has failed, and earned
    the lowest reward. What no reply causes leaves it unscored: files, connections and time limits (OSError, names
    such as ReadTimeout or APIConnectionError), memory, and the exceptions in `own_errors`.

    Both methods may be `async def`. Random numbers of Python, numpy and torch are seeded before each call, so that a
    resumed run repeats them.

    Example:
        class Guess(Environment):
            def reset(self, problem):
                self.number = int(problem["answer"])

            def step(self, reply):
                guess = int(reply)
                return Done(1.0) if guess == self.number else Observation("higher" if guess < self.number else "lower")
    """

    own_errors: tuple[type[Exception], ...] = ()
    """Exceptions of `step` that are the environment's own fault; (Exception,): all of them."""

    @classmethod
    def before_episodes(cls, *_: Any, **arguments: Any) -> None:
        """Import what episodes need, so that none of them does it again: called once, with the arguments of the class,
        in the process that they are forked from. Nothing that is opened here may be used by several of them."""

    def reset(self, problem: dict[str, Any]) -> Any:
        """Start an episode of a problem: its `id`, `prompt`, `answer`, and the other columns of the data by name.

        The policy is asked the problem's prompt. Return None or that prompt: the start of an episode that is another
        one cannot be trained on.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reset(problem): add it")

    def step(self, reply: str) -> Any:
        """Answer the policy's reply with an Observation or a Done."""
        raise NotImplementedError(f"{type(self).__name__} has no step(reply): add it")
