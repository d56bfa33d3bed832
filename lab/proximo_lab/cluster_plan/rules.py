"""Rules of how far ahead of the learner groups may be sampled, and which of those that are ready it takes."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Active groups are limited: `groups * (depth + 1)` are issued and not yet trained.

    `slots` is the rule of a run: the bound is hard. `aggregate` is what other systems do: the same number is issued,
    but the learner takes the first that end, so a slow group may become older than any bound.
    """

    depth: float
    """Steps that are sampled ahead of the one that is trained."""
    bound: int | None
    """The most versions that a group may be old when it is trained: the learner waits for those that are due. As large
    as the depth, groups are taken by ordinal. Larger, younger groups pass a slow one until it is due. None: no
    bound."""
    drained: bool = False
    """True if a step is sampled only when the one before has ended, so that no request sees two versions."""

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise ValueError(f"staleness is {self.depth}: give 0 or more")
        if self.bound is not None and self.bound < self.depth:
            raise ValueError(f"the bound is {self.bound}, below the depth {self.depth}: give at least the depth")

    def limit(self, version: int, groups: int) -> int:
        """Groups that may have been issued while the learner is at this version."""
        return int(round((version + 1 + self.depth) * groups, 6))

    def due(self, version: int, groups: int) -> int:
        """The ordinals below this one have to be trained at this version, if they are not yet."""
        if self.bound is None:
            return 0
        # Group g is issued at version g // groups - depth at the earliest. All that were due before are trained, so at
        # most one step's groups are due.
        return (version + 1 - (self.bound - math.ceil(self.depth))) * groups


def in_flight(staleness: int) -> Rule:
    """Weights change under running requests; slots by ordinal."""
    return Rule(staleness, staleness)


def between(staleness: int) -> Rule:
    """Weights change between steps; step s is sampled with the weights of step s - k."""
    return Rule(staleness, staleness, drained=True)


def aggregate(staleness: float) -> Rule:
    """(version + staleness + 1) * groups issued at most; the learner takes what comes."""
    return Rule(staleness, None)
