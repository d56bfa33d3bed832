"""Rollouts: graded groups for a run's steps, one by one, and three ways in which they come.

`Synchronous` samples a step in rounds and then waits for its updates; `OneStepAhead` samples later steps while one is
trained; `InFlight` samples all the time, also while weights change. The loop asks none of them which it is.

Dynamic sampling draws more until the step is full or its rounds are spent: it can neither hang nor end the run. New
prompts are asked for while others are sampled (`OpenRound`). The same prompts again have to wait for a round's grades
(`Rounds`); groups kept beyond what the step needs are then carried over to the next one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar

import torch

from proximo.environments.kinds import Ask, Interaction, Question, SingleTurn, play
from proximo.environments.protocol import LaterQuestions
from proximo.learner.guard import Notice
from proximo.losses.pieces.filters import Keep, drops
from proximo.losses.pieces.protocols import KeepTraits
from proximo.models import problem_tokens
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.rl.asking import OpenRound
from proximo.rl.config import TrainingOptions
from proximo.rl.grading import StepGrader, graded, opened_grader
from proximo.runs.checkpointer import OlderWeights
from proximo.runs.records import Collected, DataCursor, Pending, num_tokens
from proximo.samplers.sampler import SampledPolicy, Sampler, SamplingOptions, Stream, WeightHistory
from proximo.system.phases import phase
from proximo.tasks import Task
from proximo.types import Group, Problem, Request

Result = TypeVar("Result")
Draws = list[tuple[int, Problem]]


class Delivers(Protocol):
    """Graded groups of a step, one by one."""

    def groups(self) -> Iterator[Group]:
        """Groups of the step that has begun, as they are graded. Between two of them `drop` may be called; groups that
        are asked for there come later. It ends when the step is full or no more may be drawn."""
        ...

    def drop(self, group: Group, *, refill: bool) -> None:
        """Leave a group out of the step that has begun; with `refill`, sample another in its place."""
        ...

    def collected(self) -> Collected:
        """The whole step, once its groups have come."""
        ...


class Rollouts(Delivers, Protocol):
    """Graded groups of a run, step by step.

    Each step begins with the policy's weights. Then its groups come one by one, as they are graded; whoever takes them
    may drop one and ask for another in its place. A class that lists this one as its base inherits what it does not do
    differently: nothing is sampled for later steps, and so there is nothing to store, to tell or to end.
    """

    history: WeightHistory | None = None
    """Older weights that the sampler itself keeps for later steps; None: it keeps none."""

    @property
    def older_weights(self) -> OlderWeights:
        """Older weights that are kept, which later steps are sampled with."""
        return "none" if self.history is None else "all"

    def begin_step(self, policy: SampledPolicy, version: int, cursor: DataCursor, step: int) -> int:
        """Take the policy's weights, which have seen `version` updates, and begin the step of this index at this place
        of the data; returns the version of the oldest weights that its groups may have begun with."""
        ...

    def evaluate(self, sampler: Sampler, policy: SampledPolicy, version: int, work: Callable[[int], Result]) -> Result:
        """Do work that samples with the policy's weights of now and grades, such as an evaluation; nothing of a step
        is in its way. It is given the version of the weights."""
        ...

    def take_notices(self) -> list[Notice]:
        """Notices of what happened since the last call."""
        return []

    def queue(self) -> dict[str, object]:
        """Numbers of what is sampled for later steps, for the time line."""
        return {}

    def pending(self) -> Pending:
        """Groups that are sampled for later steps, between two steps."""
        return Pending(older_weights=() if self.history is None else tuple(self.history.kept()))

    def newest(self, pending: Pending, *, interrupt: bool) -> Pending:
        """The same with all that is sampled of it by now; `interrupt`: first make the sampler say what that is."""
        return pending

    def refuse(self, pending: Pending, checkpoint: Path) -> None:
        """Raise ValueError if these rollouts cannot go on with what a checkpoint has."""
        if pending.active:
            raise ValueError(
                f"{checkpoint} has {len(pending.active)} groups that were being sampled, whose prompts would be lost: "
                'keep ahead.switch = "in_flight" and ahead.staleness, or use a checkpoint of a run without'
            )

    def restore(self, pending: Pending) -> None:
        """Put back what `pending` returned, before the first step."""
        if self.history is not None:
            self.history.load(pending.older_weights)

    def close(self) -> None:
        """Stop all sampling."""


class DropRule(Protocol):
    """Decides which groups are dropped."""

    @property
    def refills(self) -> bool:
        """True if dropped groups are replaced."""
        ...

    def drops(self, group: Group) -> bool: ...


def collect(rollouts: Delivers, rule: DropRule) -> Collected:
    """A whole step: its groups are judged as they come, and others asked for in the place of those that are dropped."""
    for group in rollouts.groups():
        if rule.drops(group):
            rollouts.drop(group, refill=rule.refills)
    return rollouts.collected()


def is_dropped(keep: Keep, group: Group) -> bool:
    """Tell whether a group is dropped, by the task scores of its completions."""
    return drops(keep, torch.tensor([sample.grade.verdict for sample in group.samples], dtype=torch.float64))


@dataclass(frozen=True)
class Collector:
    """Turns problems into groups: samples and grades them."""

    task: Task
    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingOptions
    training: TrainingOptions
    keep: Keep
    seed: int
    environment: Interaction = field(default_factory=SingleTurn)
    sampling_at: Callable[[int], SamplingOptions] | None = None
    """Sampling options of the step of an index, where they change. None: `sampling` in all steps."""

    def collect(self, cursor: DataCursor, *, step: int, version: int) -> Collected:
        """Fill a step with groups to train on."""
        return collect(self.begun(cursor, step=step, version=version), self)

    def begun(self, cursor: DataCursor, *, step: int, version: int) -> Delivers:
        """A step that begins at this place of the data. The same prompts again have to wait for their grades; where no
        group is replaced there is one round."""
        asks = self.refills and self.training.refill == "new_prompts"
        return (OpenRound if asks else Rounds)(self, cursor, step=step, version=version)

    def drops(self, group: Group) -> bool:
        return is_dropped(self.keep, group)

    @property
    def refills(self) -> bool:
        """True if dropped groups are replaced."""
        return KeepTraits.read(self.keep).refills

    def chosen(self, first: int, count: int, rates: Mapping[str, float]) -> tuple[Draws, Draws]:
        """The next `count` problems to sample, from this draw on, and those that are passed over: by a curriculum,
        or because the run cannot use them."""
        chosen, skipped, index, curriculum = [], [], first, self.training.curriculum
        while len(chosen) < count:
            problem = self._problem(index)
            draws = curriculum is None or curriculum.draws(index, self.seed, rates.get(problem.id))
            (chosen if draws and not problem.unusable else skipped).append((index, problem))
            index += 1
        return chosen, skipped

    def rates(self, rates: Mapping[str, float], groups: Sequence[Group]) -> Mapping[str, float]:
        """Running pass rates after these groups; those that no grader scored change nothing."""
        if self.training.curriculum is None:
            return rates
        verdicts = [(group.problem.id, [sample.grade.verdict for sample in group.samples]) for group in groups]
        known = [(name, [verdict for verdict in group if not math.isnan(verdict)]) for name, group in verdicts]
        measured = [(name, sum(verdict >= 1 for verdict in group) / len(group)) for name, group in known if group]
        return self.training.curriculum.updated(rates, measured)

    def _problem(self, index: int) -> Problem:
        return self.task.problem(index, "train", self.seed)

    def sample(
        self, drawn: Sequence[tuple[int, Problem]], *, step: int, version: int, round_number: int
    ) -> tuple[list[Group], float]:
        """One group per problem, and the seconds spent waiting for grades."""
        # A prompt that is sampled again in a later round of the same step must not use the same random numbers.
        seed = self.seed + 1_000_003 * round_number
        with phase("prompts"):
            questions = self.questions(drawn)
            stream = self._played(questions, seed=seed, step=step, version=version)
        done = graded(self.task, [problem for _, problem in drawn], stream)
        groups = [
            Group(problem, question.request.prompt_tokens, rollouts, ordinal=index)
            for (index, problem), question, rollouts in zip(drawn, questions, done.rollouts, strict=True)
        ]
        return groups, done.seconds

    def group(self, ordinal: int, problem: Problem, *, step: int, version: int, grading: Lock) -> Group:
        """One group by itself; others may be sampled and graded at the same time, and begin to be graded in turn."""
        [question] = questions = self.questions([(ordinal, problem)])
        stream = self._played(questions, seed=self.seed, step=step, version=version)
        [rollouts] = graded(self.task, [problem], stream, lambda: grading).rollouts
        return Group(problem, question.request.prompt_tokens, rollouts, ordinal=ordinal)

    def questions(self, drawn: Sequence[tuple[int, Problem]]) -> list[Question]:
        """Questions to the environment, one for each problem."""
        return [
            Question(problem, Request(index, problem_tokens(self.tokenizer, problem), self.training.group_size))
            for index, problem in drawn
        ]

    def played(self, questions: Sequence[Question], later: LaterQuestions, *, step: int, version: int) -> Stream:
        """Completions of questions, and of those that come later, as they end."""
        return self._played(questions, seed=self.seed, step=step, version=version, later=later)

    def grader(self) -> AbstractContextManager[StepGrader]:
        return opened_grader(self.task)

    @property
    def grades_along(self) -> bool:
        """True if groups may be graded while others are sampled."""
        return self.task.while_sampling

    def _played(
        self,
        questions: Sequence[Question],
        *,
        seed: int,
        step: int,
        version: int,
        later: LaterQuestions | None = None,
    ) -> Stream:
        """The completions that the environment returns."""
        sampling = self.sampling if self.sampling_at is None else self.sampling_at(step)
        ask = Ask(self.sampler, self.tokenizer, sampling, seed=seed, step=step, version=version, later=later)
        return play(self.environment, questions, ask)


class Rounds:
    """The groups of one step, sampled and graded in rounds: what is asked for in a round comes in the next."""

    def __init__(self, collector: Collector, cursor: DataCursor, *, step: int, version: int) -> None:
        self._collector, self._training, self._cursor = collector, collector.training, cursor
        self._step, self._version = step, version
        self._kept, self._dropped = list(cursor.carried), list[Group]()
        self._sampled: list[Group] = []
        self._passed_over: Draws = []
        self._again: Draws = []
        """Prompts to sample once more."""
        self._next, self._tokens, self._rounds, self._seconds = cursor.next_problem, 0, 0, 0.0
        self._refills = False

    def groups(self) -> Iterator[Group]:
        while len(self._kept) < self._training.groups and self._may_sample():
            for group in self._round():
                self._kept.append(group)
                yield group

    def drop(self, group: Group, *, refill: bool) -> None:
        self._kept = [kept for kept in self._kept if kept is not group]
        self._dropped.append(group)
        self._refills |= refill
        if self._training.refill == "same_prompt" and group.ordinal is not None:
            self._again.append((group.ordinal, group.problem))

    def collected(self) -> Collected:
        full = self._training.groups
        rates = self._collector.rates(self._cursor.rates, self._sampled)
        return Collected(
            groups=tuple(self._kept[:full]),
            dropped=tuple(self._dropped),
            cursor=DataCursor(self._next, tuple(self._kept[full:]), rates),
            passed_over=tuple(self._passed_over),
            rounds=self._rounds,
            sampled_tokens=self._tokens,
            grading_seconds=self._seconds,
        )

    def _round(self) -> list[Group]:
        count = self._draws()
        drawn, self._again = self._again[:count], []
        chosen, skipped = self._collector.chosen(self._next, count - len(drawn), self._cursor.rates)
        drawn += chosen
        self._passed_over += skipped
        self._next += len(chosen) + len(skipped)
        groups, seconds = self._collector.sample(
            drawn, step=self._step, version=self._version, round_number=self._rounds
        )
        self._rounds, self._seconds = self._rounds + 1, self._seconds + seconds
        self._tokens += sum(num_tokens(group) for group in groups)
        self._sampled += groups
        return groups

    def _may_sample(self) -> bool:
        """Tell whether to sample another round: the first always, then to replace dropped groups up to a limit."""
        limit = self._training.refill_tokens
        is_left = self._rounds < self._training.refill_rounds and (limit is None or self._tokens < limit)
        return self._rounds == 0 or (self._refills and is_left)

    def _draws(self) -> int:
        """Number of prompts to sample now: the missing groups divided by the share kept so far."""
        kept, dropped = len(self._kept), len(self._dropped)
        missing = self._training.groups - kept
        if not dropped:
            return missing
        share = max(kept / (kept + dropped), 0.25)
        return min(round(missing / share), 2 * self._training.groups)


class Synchronous(Rollouts):
    """Samples a step when it begins, with the weights of then, while nothing is trained."""

    def __init__(self, collector: Collector, history: WeightHistory | None = None) -> None:
        self.collector, self.history = collector, history

    def begin_step(self, policy: SampledPolicy, version: int, cursor: DataCursor, step: int) -> int:
        version = self.collector.sampler.refresh(policy, version)
        self._now = self.collector.begun(cursor, step=step, version=version)
        return version

    def groups(self) -> Iterator[Group]:
        return self._now.groups()

    def drop(self, group: Group, *, refill: bool) -> None:
        self._now.drop(group, refill=refill)

    def collected(self) -> Collected:
        return self._now.collected()

    def evaluate(self, sampler: Sampler, policy: SampledPolicy, version: int, work: Callable[[int], Result]) -> Result:
        return work(sampler.refresh(policy, version))
