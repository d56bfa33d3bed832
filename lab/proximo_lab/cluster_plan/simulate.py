"""A discrete-event simulation of steps: engines decode, a learner takes groups, a rule says how far ahead."""

import math
from dataclasses import dataclass

import numpy as np

from proximo_lab.cluster_plan.outcome import PUSH, UPDATE, Outcome, Span
from proximo_lab.cluster_plan.pool import Engines, Pool
from proximo_lab.cluster_plan.rules import Rule

SAMPLES = 100
"""Points of the curve of requests in flight, for each step."""


@dataclass(frozen=True)
class Learner:
    """Costs of an update."""

    fixed: float
    """Seconds of a step whatever its tokens."""
    per_token: float = 0.0
    """Seconds for each token, of prompts too."""
    chunks: int = 1
    """Parts of a step, each trained as soon as its groups are ready."""


@dataclass(frozen=True)
class Work:
    """Work of a step: what it samples, and what new weights cost."""

    groups: int
    group_size: int
    prompt_tokens: int
    push: float = 0.0
    """Seconds in which engines and learner stand still for new weights."""
    recompute: bool = True
    """True if requests in flight read their context again after a push."""


def groups_needed(work: Work, rule: Rule, steps: int) -> int:
    """Groups that a simulation of this many steps may issue."""
    return rule.limit(steps - 1, work.groups)


def simulate(
    engines: Engines, learner: Learner, work: Work, rule: Rule, lengths: np.ndarray, *, steps: int, first: int = 0
) -> Outcome:
    """Run `steps` steps, of which those from `first` on are measured. `lengths` [groups_needed, group_size] are the
    tokens of each request, groups by ordinal."""
    assert lengths.shape[0] >= groups_needed(work, rule, steps)
    assert lengths.shape[1] == work.group_size
    assert first < steps
    assert work.groups % learner.chunks == 0
    run = _Simulation(engines, learner, work, rule, np.maximum(lengths, 1.0), first)
    for _ in range(steps):
        run.step()
    return run.out


class _Simulation:
    """A simulation at the end of a step."""

    def __init__(
        self, engines: Engines, learner: Learner, work: Work, rule: Rule, lengths: np.ndarray, first: int
    ) -> None:
        self.learner, self.work, self.rule, self.lengths = learner, work, rule, lengths
        self.pool = Pool(engines, work.prompt_tokens, work.groups, drained=rule.drained)
        self.totals = lengths.sum(1)
        self.unsampled = self.totals
        """Of each group, tokens that were not sampled when the version began."""
        self.out = Outcome(engines.number, first, per_step=work.groups)
        self.version, self.issued = 0, 0
        self.born = np.full(len(lengths), -1)
        """The version with which each group began."""
        self.ready = np.full(len(lengths), math.inf)
        """When each group ended, or will end."""
        self.trained = np.zeros(len(lengths), bool)
        self.sampled: list[np.ndarray] = []
        """With each version, the tokens that were sampled of each group."""

    def step(self) -> None:
        """Issue what the rule allows, train a step's groups, push the weights."""
        limit = self.rule.limit(self.version, self.work.groups)
        self.pool.issue(range(self.issued, limit), self.lengths)
        self.issued = limit
        self._foresee()
        now, taken = self.pool.now, 0
        if self.version:
            self.out.spans.append(Span(PUSH, self.version, now, now + self.work.push))
            now += self.work.push
        for _ in range(self.learner.chunks):
            now, taken = self._train(now, taken)
        self._push(now)

    def _foresee(self) -> None:
        held, ends = self.pool.held.group, self.pool.ends
        self.ready[np.unique(held)] = -math.inf
        np.maximum.at(self.ready, held, ends)

    def _train(self, free: float, taken: int) -> tuple[float, int]:
        """Train a chunk once enough groups are ready, and the rest of the step has places for those that are due."""
        size = self.work.groups // self.learner.chunks
        open_groups = np.flatnonzero(~self.trained[: self.issued])
        ready = self.ready[open_groups]
        start = max(free, np.partition(ready, size - 1)[size - 1])
        due = ready[open_groups < self.rule.due(self.version, self.work.groups)]
        room = self.work.groups - taken - size
        if len(due) > room:  # so many of them must not be left
            start = max(start, np.partition(due, len(due) - room - 1)[len(due) - room - 1])
        chosen = open_groups[ready <= start][:size]
        self.trained[chosen] = True
        born = self._began(chosen)
        self._count_tokens(chosen, born)
        self.out.staleness += (self.version - born).tolist()
        seconds = self.learner.fixed / self.learner.chunks + self.learner.per_token * (
            self.totals[chosen].sum() + size * self.work.prompt_tokens
        )
        self.out.spans.append(Span(UPDATE, self.version, start, start + seconds))
        return start + seconds, taken + size

    def _began(self, chosen: np.ndarray) -> np.ndarray:
        """The version with which each group began; a step that is sampled between others has the same for all."""
        if self.rule.drained:
            return np.maximum(chosen // self.work.groups - math.ceil(self.rule.depth), 0)
        return np.where(self.born[chosen] < 0, self.version, self.born[chosen])

    def _count_tokens(self, chosen: np.ndarray, born: np.ndarray) -> None:
        """Tokens by their age: those of this version are what earlier ones left."""
        if self.version < self.out.first:
            return
        if self.rule.drained:
            tokens = np.bincount(born, weights=self.totals[chosen]).tolist()
        else:
            tokens = [each[chosen].sum() for each in self.sampled] + [self.unsampled[chosen].sum()]
        for version, number in enumerate(tokens):
            if number > 0:
                age = self.version - version
                self.out.tokens[age] = self.out.tokens.get(age, 0.0) + float(number)

    def _push(self, at: float) -> None:
        out, pool = self.out, self.pool
        kept = pool.at <= at
        every = max(1, int(kept.sum()) // SAMPLES)
        out.live += list(zip(pool.at[kept][::every].tolist(), pool.live[kept][::every].tolist(), strict=True))
        begun, occupied, decoded = pool.advance(at)
        self.born[begun[self.born[begun] < 0]] = self.version
        left = np.zeros(len(self.ready))
        np.add.at(left, pool.held.group, pool.held.left)
        left[self.issued :] = self.totals[self.issued :]
        self.sampled.append(self.unsampled - left)
        self.unsampled = left
        if self.version >= out.first:
            out.occupied += occupied
            out.decoded += decoded
        pool.push(self.work.push, recompute=self.work.recompute)
        out.ends.append(float(at))
        self.version += 1
