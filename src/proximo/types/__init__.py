"""The nouns that flow through Proximo.

Problem ─sample─▶ Completion ─grade─▶ Rollout ─gather─▶ Group ─assemble─▶ Batch ─update─▶ Stats
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

Message = Mapping[str, str]
"""One turn of a conversation: role and content."""


@dataclass(frozen=True)
class Problem:
    """A question whose answers can be checked.

    Example: Problem(id="add-7", prompt="12+7=", answer="19")
    """

    id: str
    """The same problem has the same id in every run."""
    prompt: str | tuple[Message, ...]
    """Text that is used as it is, or a conversation for the chat template."""
    answer: Any
    """Value that a grader compares with; None where it needs nothing."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the data set, for reward functions."""
    source: str = ""
    """Name of the source that it comes from, where a task has several; metrics and ledger name it."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking."""


@dataclass(frozen=True)
class Request:
    """Order to a sampler: `num_samples` completions of one prompt."""

    key: int
    """Names the prompt to the random numbers: the same key, turn, seed and step give the same draws."""
    prompt_tokens: tuple[int, ...]
    num_samples: int
    turn: int = 0
    """Number of the conversation's turn that is sampled, from 0; each has random numbers of its own."""
    first_sample: int = 0
    """The number of the first sample. A later turn asks for each sample alone, since their prompts then differ, and
    gives its number here."""
    max_tokens: int | None = None
    """Limit of this request, where that is below the options': what earlier turns have left. None: the options'
    alone."""

    def limit(self, max_tokens: int) -> int:
        """Tokens of a completion at most, where the options allow `max_tokens`."""
        return max_tokens if self.max_tokens is None else min(self.max_tokens, max_tokens)


MALFORMED = "call"
"""Value of `Turn.failed` where a turn answers a call that could not be read."""


@dataclass(frozen=True)
class Turn:
    """A message of a conversation after the prompt."""

    role: str
    """assistant: what the policy sampled. user or tool: what an environment answered."""
    text: str
    end: int
    """Number of the completion's tokens up to its end."""
    reward: float | None = None
    """Reward that the policy earned by it; NaN: unscored. None: it earns nothing by itself, the whole completion is
    graded."""
    failed: str = ""
    """Failure of the turn, such as a tool that raised; empty: none."""


@dataclass(frozen=True)
class Completion:
    """Continuation of a prompt: the tokens that the policy sampled, and between them any that it did not."""

    tokens: tuple[int, ...]
    """Token ids; an end-of-sequence token that was sampled is the last of them."""
    logprobs: tuple[float, ...]
    """Log-prob of each token under the distribution it was drawn from; ignored, and best 0, where not sampled. Empty:
    no policy sampled it, such as a reference answer."""
    text: str
    """Decoded as it reads behind its prompt, without special tokens."""
    finish: Literal["stop", "length"]
    """Ended by itself (end of sequence or a stop string), or cut at the limit."""
    version: int = 0
    """Number of updates that the policy had seen; where it was updated on the way, at the first token or before."""
    entropies: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """Entropy of the policy before each token, in nats, at the sampling temperature and before any truncation; empty
    where the sampler does not say."""
    routes: Tensor | None = field(default=None, compare=False, repr=False)
    """[T, L, K]: the experts each token went to when it was read back, -1 at the last, which never was; or None."""
    prompt_routes: Tensor | None = field(default=None, compare=False, repr=False)
    """The same of the prompt."""
    sampled: tuple[bool, ...] = ()
    """True for each token that the policy sampled, False for a tool's or an environment's, which the model reads and is
    not trained on. Empty: it sampled all of them."""
    versions: tuple[int, ...] = ()
    """Number of updates that the policy had seen at each token, where it was updated while the completion was sampled.
    Empty: `version` at all of them."""
    turns: tuple[Turn, ...] = ()
    """Messages of the completion, the policy's and the environment's, in order. Empty: it is one reply."""

    def __post_init__(self) -> None:
        ends = [turn.end for turn in self.turns]
        if ends and not (ends == sorted(ends) and ends[-1] == len(self.tokens)):
            raise ValueError(
                f"completion.turns end at {ends} of {len(self.tokens)} tokens: the last turn ends with them"
            )
        for name in ("logprobs", "entropies", "sampled", "routes", "versions"):
            values = getattr(self, name)
            if values is not None and len(values) not in (0, len(self.tokens)):
                raise ValueError(
                    f"completion.{name} has {len(values)} entries for {len(self.tokens)} tokens: give one for each "
                    "token, or none at all"
                )

    @property
    def num_sampled(self) -> int:
        """The completion's length as it is shown, penalised and counted: sampled tokens only."""
        return sum(self.sampled) if self.sampled else len(self.tokens)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The completion as messages: one reply, or all turns of several."""
        turns = [{"role": turn.role, "content": turn.text} for turn in self.turns]
        return turns or [{"role": "assistant", "content": self.text}]

    @property
    def earned(self) -> float | None:
        """Sum of what its turns earned; None where turns earn nothing by themselves."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        return math.fsum(rewards) if rewards else None


@dataclass(frozen=True)
class Grade:
    """A grader's verdict on one completion."""

    outcome: float
    """The task's own verdict, before any shaping; NaN: unscored, which is not 0."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named rewards that were added up; the task score is usually one of them."""
    applies: bool = True
    """False where every reward function returned None, "not my task": then the completion is unscored."""
    steps: tuple[tuple[int, float], ...] = ()
    """Steps of a completion that is graded step by step: characters of its text up to the end of each, and its reward.
    The task score is a verdict on the whole."""

    @property
    def reward(self) -> float:
        """The parts' sum, or the task score where there are none; NaN where one of them is unscored or not finite."""
        total = float(sum(self.parts.values())) if self.parts else self.outcome
        return total if math.isfinite(total) else math.nan

    @property
    def verdict(self) -> float:
        """The task score, or NaN where the reward is unscored: such a completion never trains."""
        return self.outcome + 0 * self.reward


@dataclass(frozen=True)
class Rollout:
    """A row to train on: a whole sample, or one of several rows of a sample, such as a conversation that forked."""

    completion: Completion
    grade: Grade
    """The sample's grade, the same in all its rows."""
    sample: int | None = None
    """Number of the sample among its group's, where samples have several rows. None: the row is a sample."""


@dataclass(frozen=True)
class Group:
    """Siblings: completions of the same prompt."""

    problem: Problem
    prompt_tokens: tuple[int, ...]
    rollouts: tuple[Rollout, ...]
    ordinal: int | None = field(default=None, compare=False)
    """Number of the run's draw that gave the problem, from 0; None outside of runs."""

    @property
    def samples(self) -> tuple[Rollout, ...]:
        """The first row of each sample: what is counted where siblings are compared."""
        return tuple(self.rollouts[first] for first in sorted(set(self.first_rows)))

    @property
    def first_rows(self) -> list[int]:
        """Index of the first row of each row's sample."""
        first: dict[int, int] = {}
        return [
            row if each.sample is None else first.setdefault(each.sample, row) for row, each in enumerate(self.rollouts)
        ]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device. A copy to a GPU starts and is not waited for: from ordinary memory it would stop all work
    there."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class Batch:
    """Completions as tensors, aligned with their tokens; prompts are kept once per group.

    Rows hold completions only. What is None has not been computed, because nothing needs it.
    """

    prompts: tuple[tuple[int, ...], ...]
    tokens: Tensor
    """[B, T]; 0 beyond a row's length."""
    lengths: Tensor
    """[B]: tokens of each row, sampled or not."""
    sampled: Tensor
    """[B, T]: tokens the policy sampled; padding and a tool's or an environment's tokens are not."""
    mask: Tensor
    """[B, T]: sampled tokens that take part in the loss."""
    group: Tensor
    """[B]: which prompt."""
    outcome: Tensor
    """[B]; NaN: unscored."""
    rewards: Tensor
    """[B], shaped; NaN: unscored."""
    truncated: Tensor
    """[B]"""
    version: Tensor
    """[B]: number of updates that the policy had seen when it generated the row."""
    rollout_logprobs: Tensor
    """[B, T]: the sampler's own."""
    old_logprobs: Tensor
    """[B, T]: of the policy that sampled; the sampler's own where those are trusted."""
    advantages: Tensor
    """[B, T]"""
    rollout_entropy: Tensor | None = None
    """[B, T]: the sampling policy's, before each token; NaN in rows whose sampler does not say."""
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    groups: tuple[Group, ...] = ()
    """Groups that the rows come from, one for each prompt; empty where they were made of tensors alone."""
    sibling: Tensor | None = None
    """[B]: which of its group's rollouts."""
    routes: Tensor | None = None
    """[B, T, L, K]: the experts that completion tokens are sent to; -1: unknown. None: where their routers say."""
    prompt_routes: tuple[Tensor, ...] = ()
    """The same of each prompt."""
    turn_rewards: Tensor | None = None
    """[B, T]: what each turn earned, at its last token; None where turns earned nothing."""
    step_rewards: Tensor | None = None
    """[B, T]: reward of each graded step at its last token, NaN elsewhere; None where no completion has any."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sampled_lengths(self) -> Tensor:
        """[B]: sampled tokens of each row, which is the length that is shown and penalised."""
        return self.sampled.sum(dim=1)

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device, without waiting for what that is doing."""
        return self._each(lambda tensor: to_device(tensor, device))

    def rows(self, index: Tensor) -> "Batch":
        """Some of the rows; prompts are shared, so their numbers stay."""
        return self._each(lambda tensor: tensor[index.to(tensor.device)])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        picked = {
            each.name: change(value) for each in fields(self) if isinstance(value := getattr(self, each.name), Tensor)
        }
        return replace(self, **picked)


@dataclass(frozen=True)
class Stats:
    """Statistics of one loss call, as numbers that add up exactly over micro-batches.

    Tensors stay on their device until `floats` is called, so that counting costs no synchronisation.

    Example: stats = stats_of_first_half + stats_of_second_half; stats.floats()["blocked"] -> 0.031
    """

    totals: dict[str, Tensor] = field(default_factory=dict)
    """Losses and counts: added as they are."""
    token_sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums over sampled tokens: read as means over `totals["tokens"]`."""
    peaks: dict[str, Tensor] = field(default_factory=dict)
    """Largest values."""

    def __add__(self, other: "Stats") -> "Stats":
        return Stats(
            totals=_merged(self.totals, other.totals, torch.add),
            token_sums=_merged(self.token_sums, other.token_sums, torch.add),
            peaks=_merged(self.peaks, other.peaks, torch.maximum),
        )

    def double(self) -> "Stats":
        """Statistics in float64, to be added up without rounding."""
        kinds = (self.totals, self.token_sums, self.peaks)
        return Stats(*({name: value.double() for name, value in each.items()} for each in kinds))

    def floats(self) -> dict[str, float]:
        """Every statistic by name; shares and means are over the sampled tokens."""
        tokens = max(float(self.totals.get("tokens", 0)), 1.0)
        return (
            {name: float(value) for name, value in self.totals.items()}
            | {name: float(value) / tokens for name, value in self.token_sums.items()}
            | {name: float(value) for name, value in self.peaks.items()}
        )


def _merged(ours: dict[str, Tensor], theirs: dict[str, Tensor], how) -> dict[str, Tensor]:
    both = {name: how(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
    return ours | theirs | both
