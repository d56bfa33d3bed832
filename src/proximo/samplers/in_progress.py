"""Completions that are not finished: what a checkpoint keeps of them, so that a resumed run continues each of them."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal


@dataclass(frozen=True)
class Begun:
    """One sample of one turn: all of its tokens so far. Its next random number follows from their count."""

    key: int
    """Key of its random numbers: the request's, with its turn mixed in."""
    sample: int
    prompt: str
    """Digest of the prompt. After a resume an environment may answer otherwise, and then these tokens do not follow."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Updates that the policy had seen at each token."""
    finish: Literal["stop", "length", "abort"]
    """`abort`: it was interrupted and continues."""


class BegunRequests:
    """Keeps what groups have sampled so far, from `open` to `close`. A sampler notes it, a checkpoint stores it.

    A group is known by the index of the step at which it was drawn and by its key. Turns of an episode that have ended
    are kept too: after a resume the environment is played again with the same replies.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        """`interrupt` makes the sampler note the tokens of all that it samples; requests continue after it."""
        self.interrupt = interrupt
        self._groups: dict[tuple[int, int], dict[tuple[int, int], Begun]] = {}
        self._lock = threading.Lock()

    def open(self, step: int, key: int, begun: Iterable[Begun] = ()) -> None:
        """Keep what this group samples; `begun`: what it has sampled before a resume."""
        with self._lock:
            self._groups[step, key] = {(each.key, each.sample): each for each in begun}

    def close(self, step: int, key: int) -> None:
        """The group has ended, or was given up."""
        with self._lock:
            self._groups.pop((step, key), None)

    def of_group(self, step: int, key: int) -> tuple[Begun, ...]:
        """Samples of a group so far, as far as they are noted."""
        with self._lock:
            return tuple(self._groups.get((step, key), {}).values())

    def find(self, step: int, key: int, drawn: tuple[int, int], prompt: Sequence[int]) -> Begun | None:
        """Known part of the sample with this key of random numbers and this number; None where it begins."""
        with self._lock:
            known = self._groups.get((step, key), {}).get(drawn)
        return known if known is not None and known.prompt == digest(prompt) else None

    def note(self, step: int, key: int, begun: Begun) -> None:
        """Keep this in the place of what was known of the sample, if the group is kept at all."""
        with self._lock:
            if (group := self._groups.get((step, key))) is not None:
                group[begun.key, begun.sample] = begun


def digest(prompt: Sequence[int]) -> str:
    return blake2b(" ".join(map(str, prompt)).encode(), digest_size=12).hexdigest()
