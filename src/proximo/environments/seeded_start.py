"""Episodes that begin with something to read: an environment that draws its start from a seed, and says it."""

from typing import Any, Protocol


class Starting(Protocol):
    """An environment whose first observation is the prompt."""

    def start(self, seed: int) -> str:
        """Begin anew with this seed; returns what there is to see."""
        ...


def check_start(problem: dict[str, Any], start: str) -> None:
    """Refuse to begin differently from what the policy was asked."""
    prompt = problem["prompt"]
    asked = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
    if not asked.endswith(start):
        raise ValueError(f"seed {problem['start']} starts with {start[:80]!r} now, and the prompt ends {asked[-80:]!r}")
