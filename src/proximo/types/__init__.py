"""The nouns that flow through Proximo. Those before a batch load no torch: users' rewards and environments import them
in processes of their own.

Problem ─sample─▶ Completion ─grade─▶ Rollout ─gather─▶ Group ─assemble─▶ Batch ─update─▶ Stats
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


Message = Mapping[str, Any]
"""One turn of a conversation: role and content, which are texts, and tool calls where it has some."""


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
    unusable: str = ""
    """Reason why a run passes it over, with its row; empty: none."""


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
    routes: "Tensor | None" = field(default=None, compare=False, repr=False)
    """[T, L, K]: the experts each token went to when it was read back, -1 at the last, which never was; or None."""
    prompt_routes: "Tensor | None" = field(default=None, compare=False, repr=False)
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
    logged: Mapping[str, float] = field(default_factory=dict)
    """Numbers that reward functions logged beside their rewards, by name."""

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
