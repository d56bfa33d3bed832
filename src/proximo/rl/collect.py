"""Sample, grade, and keep the groups worth training on.

Dynamic sampling draws more until the step is full or its rounds are spent: it can neither hang nor end
the run. Groups kept beyond what the step needs are carried over to the next one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch

from proximo.environments.kinds import Ask, Interaction, Question, SingleTurn, play
from proximo.losses.pieces.filters import Keep, drops
from proximo.losses.pieces.protocols import KeepTraits
from proximo.models import problem_tokens
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.rl.config import TrainingOptions
from proximo.rl.grading import graded
from proximo.runs.records import Collected, DataCursor, num_tokens
from proximo.samplers.sampler import Sampler, SamplingOptions, Stream
from proximo.tasks import Task
from proximo.types import Group, Problem, Request


def is_dropped(keep: Keep, group: Group) -> bool:
    """Whether a group is dropped, by the outcomes of its completions."""
    return drops(keep, torch.tensor([rollout.grade.verdict for rollout in group.rollouts], dtype=torch.float64))


@dataclass(frozen=True)
class Collector:
    """Everything that turns problems into groups."""

    task: Task
    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingOptions
    training: TrainingOptions
    keep: Keep
    seed: int
    environment: Interaction = field(default_factory=SingleTurn)

    def collect(self, cursor: DataCursor, *, step: int, version: int) -> Collected:
        """Fill a step with groups to train on."""
        kept, dropped = list(cursor.carried), []
        next_problem, tokens, rounds, seconds = cursor.next_problem, 0, 0, 0.0
        again: list[tuple[int, Problem]] = []
        passed_over: list[tuple[int, Problem]] = []
        sampled: list[Group] = []
        while len(kept) < self.training.groups and self._may_sample(rounds, tokens):
            wanted = self._draws(len(kept), len(dropped))
            drawn = again[:wanted]
            fresh = wanted - len(drawn)
            chosen, skipped = self.chosen(next_problem, fresh, cursor.rates)
            drawn += chosen
            passed_over += skipped
            next_problem += len(chosen) + len(skipped)
            groups, waited = self._sample(drawn, step=step, version=version, round_number=rounds)
            rounds, seconds = rounds + 1, seconds + waited
            tokens += sum(num_tokens(group) for group in groups)
            sampled += groups
            again = []
            for (index, problem), group in zip(drawn, groups, strict=True):
                if self.drops(group):
                    dropped.append(group)
                    if self.training.refill == "same_prompt":
                        again.append((index, problem))
                else:
                    kept.append(group)
        full = self.training.groups
        return Collected(
            groups=tuple(kept[:full]),
            dropped=tuple(dropped),
            cursor=DataCursor(next_problem, tuple(kept[full:]), self.rates(cursor.rates, sampled)),
            passed_over=tuple(passed_over),
            rounds=rounds,
            sampled_tokens=tokens,
            grading_seconds=seconds,
        )

    def drops(self, group: Group) -> bool:
        return is_dropped(self.keep, group)

    @property
    def refills(self) -> bool:
        """Whether dropped groups are replaced."""
        return KeepTraits.read(self.keep).refills

    def _may_sample(self, rounds: int, tokens: int) -> bool:
        """Whether to sample another round: the first always, then to replace dropped groups until a limit is
        reached."""
        most = self.training.refill_tokens
        is_left = rounds < self.training.refill_rounds and (most is None or tokens < most)
        return rounds == 0 or (self.refills and is_left)

    def _draws(self, num_kept: int, num_dropped: int) -> int:
        """Number of prompts to sample now: the missing groups divided by the share kept so far."""
        missing = self.training.groups - num_kept
        if not num_dropped:
            return missing
        share = max(num_kept / (num_kept + num_dropped), 0.25)
        return min(round(missing / share), 2 * self.training.groups)

    def chosen(
        self, first: int, count: int, rates: Mapping[str, float]
    ) -> tuple[list[tuple[int, Problem]], list[tuple[int, Problem]]]:
        """The next `count` problems to sample, from this draw on, and those that a curriculum passes over."""
        chosen, skipped, index, curriculum = [], [], first, self.training.curriculum
        while len(chosen) < count:
            problem = self._problem(index)
            draws = curriculum is None or curriculum.draws(index, self.seed, rates.get(problem.id))
            (chosen if draws else skipped).append((index, problem))
            index += 1
        return chosen, skipped

    def rates(self, rates: Mapping[str, float], groups: Sequence[Group]) -> Mapping[str, float]:
        """Running pass rates after these groups; those that no grader scored change nothing."""
        if self.training.curriculum is None:
            return rates
        verdicts = [(group.problem.id, [rollout.grade.verdict for rollout in group.rollouts]) for group in groups]
        known = [(name, [each for each in found if not math.isnan(each)]) for name, found in verdicts]
        measured = [(name, sum(each >= 1 for each in found) / len(found)) for name, found in known if found]
        return self.training.curriculum.updated(rates, measured)

    def _problem(self, index: int) -> Problem:
        return self.task.problem(index, "train", self.seed)

    def _sample(
        self, drawn: Sequence[tuple[int, Problem]], *, step: int, version: int, round_number: int
    ) -> tuple[list[Group], float]:
        """One group per problem, and the seconds spent waiting for grades."""
        # A prompt that is sampled again in a later round of the same step must not use the same random numbers.
        seed = self.seed + 1_000_003 * round_number
        prompts, stream = self._asked(drawn, seed=seed, step=step, version=version)
        found = graded(self.task, [problem for _, problem in drawn], stream)
        groups = [
            Group(problem, tokens, rollouts, ordinal=index)
            for (index, problem), tokens, rollouts in zip(drawn, prompts, found.rollouts, strict=True)
        ]
        return groups, found.seconds

    def group(self, ordinal: int, problem: Problem, *, step: int, version: int, grading: Lock) -> Group:
        """One group by itself; others may be sampled and graded at the same time, and begin to be graded in turn."""
        [tokens], stream = self._asked([(ordinal, problem)], seed=self.seed, step=step, version=version)
        [rollouts] = graded(self.task, [problem], stream, lambda: grading).rollouts
        return Group(problem, tokens, rollouts, ordinal=ordinal)

    def _asked(
        self, drawn: Sequence[tuple[int, Problem]], *, seed: int, step: int, version: int
    ) -> tuple[list[tuple[int, ...]], Stream]:
        """Prompts of problems as tokens, and the completions that the environment returns."""
        prompts = [problem_tokens(self.tokenizer, problem) for _, problem in drawn]
        questions = [
            Question(problem, Request(key=index, prompt_tokens=tokens, num_samples=self.training.group_size))
            for (index, problem), tokens in zip(drawn, prompts, strict=True)
        ]
        ask = Ask(self.sampler, self.tokenizer, self.sampling, seed=seed, step=step, version=version)
        return prompts, play(self.environment, questions, ask)
