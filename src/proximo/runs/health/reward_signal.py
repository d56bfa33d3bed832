"""Rules about the training signal: groups, graders, duplicate completions."""

import math
from dataclasses import dataclass
from typing import ClassVar

from proximo.runs.health.history import EARLY, NEARLY_ALL, History, are_equal, half_width, has_risen, mean
from proximo.runs.health.rule import Rule, Severity

ANSWERS_FIRST = (
    "where the data have answers to learn from, fine-tune on them first: proximo sft FILE --model MODEL, then train on "
    "that run"
)
"""Remedy for a model that never answers right."""


@dataclass(frozen=True)
class DeadGroups:
    """Groups without gradient, except those that are all correct, which is success; if nothing is ever right, another
    rule reports that instead. Whether a task score below 1 is wrong or the best a task gives is unknown, so the
    message only says that rewards within a group are equal, which is true in both cases."""

    window: int = 10
    max_share: float = 0.5
    name: ClassVar[str] = "dead-groups"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "idle_stuck"
    show: ClassVar[str] = "dead"
    why: ClassVar[str] = (
        "completions of a group with equal rewards have no advantage: they cost sampling and teach nothing"
    )
    remedy: ClassVar[str] = (
        "easier problems or a larger training.group_size, so that some completion is right; KeepMixed in "
        f"algorithm.keep, as in DAPO, draws other prompts in their place; {ANSWERS_FIRST}"
    )

    @property
    def when(self) -> str:
        return (
            f"over {self.window} steps more than {self.max_share:.0%} of the samples gave no gradient, not counting "
            "groups that are all correct"
        )

    def evidence(self, history: History) -> str | None:
        stuck = history.typical(self.reads, self.window)
        if not stuck > self.max_share or NoReward(self.window).evidence(history) is not None:
            return None
        text = (
            f"over {self.window} steps {stuck:.0%} of the samples were in no-signal groups: rewards within a group "
            "were equal"
        )
        unsolved = 1 - history.typical("solved_by_any", self.window)
        if math.isnan(unsolved):
            return text
        right = history.typical("idle_solved", self.window)
        return (
            f"{text} (no task score reaches 1 in {unsolved:.0%} of the groups); another {right:.0%} were in groups "
            "that are all correct"
        )


@dataclass(frozen=True)
class TooEasy:
    """Prompts that are solved from the first steps on; later that is the goal of training."""

    window: int = EARLY
    max_share: float = 0.5
    name: ClassVar[str] = "too-easy"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "idle_solved"
    show: ClassVar[str] = "dead"
    why: ClassVar[str] = "the model learns nothing from problems that it could solve before training"
    remedy: ClassVar[str] = "harder problems, or leave out those that the model solves already"

    @property
    def when(self) -> str:
        return (
            f"in the first {self.window} steps and in the last {self.window}, more than {self.max_share:.0%} of the "
            "samples were in groups that are all correct"
        )

    def evidence(self, history: History) -> str | None:
        first, now = mean(history.first(self.reads)), history.typical(self.reads, self.window)
        if not min(first, now) > self.max_share:
            return None
        return (
            f"{first:.0%} of the samples of the first {self.window} steps were in groups that are all correct, "
            f"and {now:.0%} of the last {self.window}: the model could solve these before training"
        )


@dataclass(frozen=True)
class NoReward:
    window: int = 10
    name: ClassVar[str] = "no-reward"
    severity: ClassVar[Severity] = "failing"
    reads: ClassVar[str] = "outcome"
    show: ClassVar[str] = "worst"
    why: ClassVar[str] = "the grader rejects everything, or the task is too hard: there is no reward to learn from"
    remedy: ClassVar[str] = (
        "compare completions with the expected answers; then correct the grader or the prompt (`proximo selfcheck` "
        "grades the task's own answers), or start with easier problems"
    )

    @property
    def when(self) -> str:
        return (
            f"over {self.window} steps no completion has a task score above 0, all have the same reward, and "
            "task scores have not risen since the first steps"
        )

    def evidence(self, history: History) -> str | None:
        outcomes = history.last(self.reads, self.window)
        # A mean of 0 or less may hide good outcomes among bad ones: then it varies, or some are solved.
        if not outcomes or max(outcomes) > 0 or not are_equal(outcomes):
            return None
        if has_risen(
            history.first(self.reads), outcomes, 2.0
        ):  # such as a negative distance that is 0 when the task is solved
            return None
        # If rewards differ all the same, the outcome is not rewarded, or is one of several parts.
        rewards = history.last("reward_unshaped", self.window) or history.last("reward", self.window)
        if not are_equal(rewards):  # a length penalty differs where no outcome does
            return None
        if any(history.last("solved_by_any", self.window)) or any(history.last("spread", self.window)):
            return None
        asked = sum(history.last("completions", self.window))
        all_of_them = f"all {asked:.0f}" if asked else "all"
        return (
            f"over {self.window} steps no completion has a task score above 0: the task score of {all_of_them} is "
            f"{outcomes[-1]:g}"
        )


@dataclass(frozen=True)
class ColdStart:
    """No reward in the first steps, before the rules that need more of them: the fault is then usually how the model is
    asked. Later `no-reward` and `truncation` report it."""

    window: int = 1
    steps: int = EARLY
    min_completions: int = 32
    most_right: float = 0.02
    most_cut: float = 0.95
    name: ClassVar[str] = "cold-start"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "outcome"
    show: ClassVar[str] = "worst"
    why: ClassVar[str] = "a model that is asked in a form it was not trained on, or cut off, answers nothing right"
    remedy: ClassVar[str] = (
        "read some completions: if they are not in the form that is graded, switch the model's chat template on or off "
        "(task.chat), or ask for the form in task.template or task.system; if they do not end, raise "
        f"sampling.max_tokens; {ANSWERS_FIRST}"
    )

    @property
    def when(self) -> str:
        return (
            f"in the first {self.steps - 1} steps, of {self.min_completions} completions or more none has a task score "
            f"above 0 and all have the same reward; or {self.most_cut:.0%} are cut at the limit and task scores are "
            "not above 0.5; or held-out task scores were 0 before training and those of the completions are not above "
            f"{self.most_right:g}"
        )

    def evidence(self, history: History) -> str | None:
        steps = history.seen[self.reads]
        asked = sum(history.last("completions", steps))
        if steps >= self.steps or asked < self.min_completions:
            return None
        outcome, cut = (mean(history.last(name, steps)) for name in (self.reads, "truncated"))
        before = [each for each in history.evaluations[:1] if each.after == 0]
        is_zero = bool(before) and before[0].outcome == 0 and outcome <= self.most_right
        first = f"the first {asked:.0f} completions"
        if cut >= self.most_cut and not outcome > 0.5:
            text = f"{cut:.0%} of {first} are cut at the limit; their mean task score: {outcome:g}"
        elif NoReward(steps).evidence(history) is not None:
            text = f"none of {first} has a task score above 0" + (
                f", and {cut:.0%} are cut at the limit" if cut > 0 else ""
            )
        elif is_zero:
            text = f"the mean task score of {first} is {outcome:.3g}"
        else:
            return None
        tried = [
            f"held-out task scores were {each.outcome:g} before training ({each.problems:.0f} problems)"
            for each in before
        ]
        return "; ".join([text, *tried])


@dataclass(frozen=True)
class Unscored:
    window: int = 3
    max_share: float = 0.05
    name: ClassVar[str] = "unscored"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "unscored_share"
    show: ClassVar[str] = "unscored"
    why: ClassVar[str] = (
        "ungraded completions are not trained on, and they are rarely a random sample: the rest is biased"
    )
    remedy: ClassVar[str] = "correct the grader: the `unscored` events quote what went wrong"

    @property
    def when(self) -> str:
        return f"more than {self.max_share:.0%} of the completions of {self.window} steps could not be graded"

    def evidence(self, history: History) -> str | None:
        missing, asked = (sum(history.last(name, self.window)) for name in ("unscored", "completions"))
        if not missing > self.max_share * asked:
            return None
        return f"{missing:.0f} of the {asked:.0f} completions of {self.window} steps could not be graded"


@dataclass(frozen=True)
class Duplicates:
    """Equal right completions are not a fault. If it is unknown what is right, equal completions are one."""

    window: int = 10
    max_share: float = 0.9
    least_unsolved: float = 0.2
    name: ClassVar[str] = "duplicates"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "repeated"
    show: ClassVar[str] = "duplicates"
    why: ClassVar[str] = "identical wrong completions explore nothing: one of them would be enough"
    remedy: ClassVar[str] = "raise sampling.temperature, or go back to a checkpoint from before they became identical"

    @property
    def when(self) -> str:
        return (
            f"over {self.window} steps more than {self.max_share:.0%} of the pairs of completions in a group are "
            f"identical, counting only groups that are not all correct, if these are more than "
            f"{self.least_unsolved:.0%} of all groups"
        )

    def evidence(self, history: History) -> str | None:
        same = history.typical(self.reads, self.window)
        unsolved = 1 - history.typical("solved_by_all", self.window)
        if not same > self.max_share or unsolved <= self.least_unsolved:
            return None
        where = "" if math.isnan(unsolved) else f", in the {unsolved:.0%} of the groups that are not all correct"
        return f"over {self.window} steps {same:.0%} of the pairs of completions in a group are identical{where}"


@dataclass(frozen=True)
class NothingTrained:
    """Groups whose rewards are equal have no gradient either; `dead-groups` reports those."""

    window: int = 5
    min_steps: int = 3
    name: ClassVar[str] = "nothing-trained"
    severity: ClassVar[Severity] = "failing"
    reads: ClassVar[str] = "untrained"
    show: ClassVar[str] = "gap"
    why: ClassVar[str] = "a step whose tokens are all left out of the loss costs sampling and teaches nothing"
    remedy: ClassVar[str] = (
        "where tokens are rejected: wider bounds in algorithm.correct, newer weights (a lower ahead.staleness) or a "
        "lower training.learning_rate; where they are masked: a higher sampling.max_tokens, or "
        "algorithm.keep.truncated = true"
    )

    @property
    def when(self) -> str:
        return (
            f"in {self.min_steps} of {self.window} steps {NEARLY_ALL:.0%} of the tokens or more are rejected by the "
            "correction or masked away, or the gradient is 0 although rewards in some group differ"
        )

    def evidence(self, history: History) -> str | None:
        steps = history.last(self.reads, self.window)
        if sum(steps) < self.min_steps:
            return None
        shares = [(name, history.last(name, 1)) for name in ("rejected", "masked")]
        causes = [f"{value[0]:.0%} of the tokens {name}" for name, value in shares if value and value[0] >= NEARLY_ALL]
        last = f"; the last: {' and '.join(causes)}" * bool(causes)
        return f"in {sum(steps):.0f} of {self.window} steps nothing was trained{last or ': the gradient was 0'}"


@dataclass(frozen=True)
class Selection:
    """Groups with equal rewards teach nothing, so that dropping them, as in DAPO, selects nothing."""

    window: int = 10
    share: float = 0.1
    size: float = 0.1
    name: ClassVar[str] = "selection"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "lost"
    show: ClassVar[str] = ""
    why: ClassVar[str] = "the policy is trained on a selection: what is long or hard to it is left out, and gets worse"
    remedy: ClassVar[str] = (
        "give up less: a longer ahead.expire or none, a larger ahead.window, and an algorithm.keep that does not look "
        "at length or difficulty"
    )

    @property
    def when(self) -> str:
        return (
            f"over {self.window} steps more than {self.share:.0%} of the groups that would have taught something are "
            f"given up because they took too long, or are dropped and differ from those kept in length by more than "
            f"{self.size:.0%} or in task score by more than {self.size:g}, and the 95 % interval over steps leaves "
            "out 0"
        )

    def evidence(self, history: History) -> str | None:
        lost, late, kept = (history.last(name, self.window) for name in (self.reads, "expired", "groups"))
        whole = sum(lost) + sum(kept)
        if not lost or not sum(lost) > self.share * whole:
            return None
        if sum(late) > self.share * whole:
            return f"over {self.window} steps {sum(late) / whole:.0%} of the groups were given up as they took too long"
        share = f"over {self.window} steps {sum(lost) / whole:.0%} of the groups were dropped though rewards differed"
        differences = [("longer_lost", "tokens as a share of those kept"), ("easier_lost", "the task score")]
        for name, what in differences:
            values = history.last(name, self.window)
            if len(values) > 1 and abs(mean(values)) > max(self.size, half_width(values)):
                return f"{share}; their difference in {what} is {mean(values):+.2f} ± {half_width(values):.2f}"
        return None


RULES: tuple[Rule, ...] = (
    NoReward(),
    ColdStart(),
    DeadGroups(),
    TooEasy(),
    Unscored(),
    Duplicates(),
    NothingTrained(),
    Selection(),
)
