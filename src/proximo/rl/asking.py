"""Dynamic sampling without rounds: prompts are asked for while earlier ones are still sampled.

    asked    0 1 2 3 4 5 6 7 8 9    the sampler works on all of them, on the first of them first
    ended    0 1 2 . 4 . 6 . . .    in any order
    graded   0 1 2 . 4 .            those alone that the step certainly needs, see `_is_needed`
    judged   0 1 2                  in the order in which they were asked: kept or dropped

A step takes the first groups that are kept, in the order of their prompts, exactly those that it would have if it
waited for all. How many prompts are asked for follows from the verdicts on those before them, one after the other
(`Demand`). So neither depends on how long anything takes, on the order in which groups end, or on the number of slots,
and short or easy groups are not preferred.

The sampler is looked at each time that another eighth of a step's groups has ended. It then waits for the grades of
what has ended, so that equal runs ask at the same token.

What was asked for beyond the last group of the step is given up, ungraded and untold: the cursor stands behind that
group, and the next step asks for the same prompts anew, with its own weights.
"""

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Protocol

from proximo.environments.protocol import LaterQuestions, Question
from proximo.rl.config import TrainingOptions
from proximo.rl.grading import StepGrader
from proximo.runs.records import Collected, DataCursor, num_tokens
from proximo.samplers.sampler import Stream
from proximo.types import Completion, Group, Problem, Rollout

LOWEST_SHARE = 1 / 16
"""Share of kept groups that is expected at least."""
LOOKS = 8
"""Number of times that a step is looked at while as many groups end as it has."""


@dataclass(frozen=True)
class Demand:
    """Number of prompts that a step asks for: a function of the verdicts so far, in the order of the prompts."""

    groups: int
    """Groups of a step."""
    missing: int
    """Groups that the step has to sample: all of them, but for those that were carried over to it."""
    rounds: int
    """Bound on the prompts of a step, in rounds: a first one of `missing`, later ones of twice the step's groups."""
    share: float
    """Share of groups that earlier steps kept."""

    @property
    def limit(self) -> int:
        return self.missing + 2 * self.groups * (self.rounds - 1)

    def asked(self, judged: int, kept: int) -> int:
        """Number of prompts that are asked for in all when this many groups were judged and kept: never more than twice
        a step's beyond those that are judged."""
        missing = self.missing - kept
        share = max(self.share_after(judged, kept), LOWEST_SHARE)
        # What is expected to be needed, and a standard deviation more: a step that lacks one group waits for it alone.
        ahead = math.ceil((missing + math.sqrt(missing * (1 - share))) / share)
        return min(judged + min(ahead, 2 * self.groups), self.limit)

    def share_after(self, judged: int, kept: int) -> float:
        """Share of groups that are kept, in which earlier steps weigh as much as one step's groups."""
        return (self.share * self.groups + kept) / (self.groups + judged)

    def rounds_of(self, judged: int) -> int:
        """Number of rounds that this many prompts are."""
        return min(judged, 1) + max(0, math.ceil((judged - self.missing) / (2 * self.groups)))


class AskedSource(Protocol):
    """Draws problems, and has them sampled and graded."""

    @property
    def training(self) -> TrainingOptions: ...

    def chosen(
        self, first: int, count: int, rates: Mapping[str, float]
    ) -> tuple[list[tuple[int, Problem]], list[tuple[int, Problem]]]:
        """The next problems to sample, and those that a curriculum passes over."""
        ...

    def questions(self, drawn: Sequence[tuple[int, Problem]]) -> list[Question]: ...

    def played(self, questions: Sequence[Question], later: LaterQuestions, *, step: int, version: int) -> Stream:
        """Completions of questions, and of those that come later, as they end."""
        ...

    def grader(self) -> AbstractContextManager[StepGrader]: ...

    @property
    def grades_along(self) -> bool:
        """True if groups may be graded while others are sampled."""
        ...

    def rates(self, rates: Mapping[str, float], groups: Sequence[Group]) -> Mapping[str, float]: ...


class OpenRound:
    """The groups of one step, from one round that stays open: in the order in which their prompts were asked."""

    def __init__(self, source: AskedSource, cursor: DataCursor, *, step: int, version: int) -> None:
        self._source, self._training, self._cursor = source, source.training, cursor
        self._step, self._version = step, version
        groups = self._training.groups
        missing = max(groups - len(cursor.carried), 0)
        self._demand = Demand(groups, missing, self._training.refill_rounds, cursor.kept_share)
        self._asked: list[tuple[int, Question]] = []
        """Ordinals and questions."""
        self._passed_over: list[tuple[int, Problem]] = []
        self._next = cursor.next_problem
        self._sent = 0
        """Number of questions that the sampler has been given."""
        self._later = LaterQuestions([])
        self._held: dict[int, tuple[Completion, ...]] = {}
        """Groups that have ended and are not graded, by their place among those asked."""
        self._graded: Mapping[int, tuple[Rollout, ...]] = {}
        self._ended = 0
        """Number of groups that have ended since the last look."""
        self._judged: list[Group] = []
        self._kept, self._dropped = list(cursor.carried), list[Group]()
        self._tokens, self._seconds = 0, 0.0

    # The step

    def groups(self) -> Iterator[Group]:
        if self._is_over:
            return
        with self._source.grader() as grader:
            self._ask()
            while not self._is_over:
                yield from self._stream(grader)

    def drop(self, group: Group, *, refill: bool) -> None:
        assert refill, "groups that are not replaced need no other prompts"
        self._kept = [kept for kept in self._kept if kept is not group]
        self._dropped.append(group)

    def collected(self) -> Collected:
        full, judged = self._training.groups, len(self._judged)
        after = self._asked[judged - 1][0] + 1 if judged else self._cursor.next_problem
        return Collected(
            groups=tuple(self._kept[:full]),
            dropped=tuple(self._dropped),
            cursor=DataCursor(
                after,
                tuple(self._kept[full:]),
                self._source.rates(self._cursor.rates, self._judged),
                self._demand.share_after(judged, self._num_kept),
            ),
            passed_over=tuple((index, problem) for index, problem in self._passed_over if index < after),
            rounds=self._demand.rounds_of(judged),
            sampled_tokens=self._tokens,
            grading_seconds=self._seconds,
            unneeded=len(self._asked) - judged,
        )

    @property
    def _num_kept(self) -> int:
        """Groups kept of those that were judged."""
        return len(self._judged) - len(self._dropped)

    @property
    def _is_over(self) -> bool:
        """True once the step is full, or no more may be asked for."""
        judged, tokens = len(self._judged), self._training.refill_tokens
        is_spent = judged >= self._demand.limit or (tokens is not None and self._tokens >= tokens)
        return len(self._kept) >= self._training.groups or (judged >= self._demand.missing and is_spent)

    # Prompts

    def _ask(self) -> None:
        count = self._demand.asked(len(self._judged), self._num_kept) - len(self._asked)
        if count <= 0:
            return
        chosen, skipped = self._source.chosen(self._next, count, self._cursor.rates)
        self._next += len(chosen) + len(skipped)
        self._passed_over += skipped
        questions = self._source.questions(chosen)
        self._asked += [(ordinal, question) for (ordinal, _), question in zip(chosen, questions, strict=True)]
        self._later.add(questions)

    def _stream(self, grader: StepGrader) -> Iterator[Group]:
        """Sample what was asked for, and what is asked for meanwhile, until all has ended or the step is over."""
        first, questions = self._sent, [question for _, question in self._asked[self._sent :]]
        self._later = LaterQuestions(questions)
        every = max(1, self._training.groups // LOOKS)
        played = self._source.played(questions, self._later, step=self._step, version=self._version)
        with closing(_closable(played)) as stream:  # what is not needed is given up
            for number, completions in stream:
                self._end(grader, first + number, completions)
                if self._source.grades_along and self._ended >= every:
                    yield from self._look(grader)
                if self._is_over:
                    return
        self._sent = first + len(self._later.requests)
        yield from self._look(grader)

    # Groups

    def _end(self, grader: StepGrader, number: int, completions: tuple[Completion, ...]) -> None:
        self._ended += 1
        if self._is_needed(number):
            grader.give(number, self._asked[number][1].problem, completions)
        else:
            self._held[number] = completions

    def _is_needed(self, number: int) -> bool:
        """True if the step needs the verdict on this group, whatever those on the groups before it are."""
        return number < len(self._judged) + self._training.groups - len(self._kept)

    def _look(self, grader: StepGrader) -> Iterator[Group]:
        """Judge what can be: groups whose predecessors have all ended; and ask for what is needed then."""
        self._ended, before = 0, -1
        while before != len(self._judged) and not self._is_over:
            before = len(self._judged)
            start = time.perf_counter()
            self._graded = grader.settled()
            self._seconds += time.perf_counter() - start
            while len(self._judged) in self._graded and not self._is_over:
                yield self._judge()
                self._ask()
            for number in [number for number in sorted(self._held) if self._is_needed(number)]:
                grader.give(number, self._asked[number][1].problem, self._held.pop(number))

    def _judge(self) -> Group:
        """The next group in turn, which may be dropped once it is out."""
        number = len(self._judged)
        ordinal, question = self._asked[number]
        group = Group(question.problem, question.request.prompt_tokens, self._graded[number], ordinal=ordinal)
        self._judged.append(group)
        self._kept.append(group)
        self._tokens += num_tokens(group)
        return group


def _closable(stream: Stream) -> Generator[tuple[int, tuple[Completion, ...]], None, None]:
    """The same stream; closing it closes what it comes from."""
    yield from stream
