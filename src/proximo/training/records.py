"""The records that flow through a run: where the data stands, a step's rollouts, its batch, an evaluation."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from proximo.maths.mismatch import MismatchStats
from proximo.tensor_types import Float, Int
from proximo.types import Batch, Completion, Grade, Group, Problem


@dataclass(frozen=True)
class DataCursor:
    """Where the data stands: the next unused problem, and groups already sampled for the next step."""

    next_problem: int = 0
    carried: tuple[Group, ...] = ()


@dataclass(frozen=True)
class PartState:
    """What a part of a run must have back to resume."""

    values: Mapping[str, Any]
    """Plain values, for JSON."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Collected:
    """A step's worth of rollouts."""

    groups: tuple[Group, ...]
    """To be trained on."""
    dropped: tuple[Group, ...]
    """Sampled, but nothing to learn from: they count in statistics over the rollout batch."""
    cursor: DataCursor
    rounds: int
    sampled_tokens: int
    """In this step, dropped and carried groups included."""
    grading_seconds: float = field(default=0.0, compare=False)
    """Waited for grades when a round had been sampled; a grader that keeps up with the sampler takes none."""

    def outcomes(self) -> list[float]:
        """Of everything that was sampled, dropped groups included; NaN where a grader failed."""
        groups = [*self.groups, *self.dropped]
        return [rollout.grade.outcome for group in groups for rollout in group.rollouts]

    @property
    def wasted_tokens(self) -> int:
        return sum(num_tokens(group) for group in self.dropped)


def num_tokens(group: Group) -> int:
    """Sampled tokens of all its completions."""
    return sum(rollout.completion.num_sampled for rollout in group.rollouts)


@dataclass(frozen=True)
class Assembled:
    """A batch ready for updates, and what became known on the way."""

    batch: Batch
    """The rows that train."""
    everyone: Batch
    """All rows of the step, those of dropped groups last."""
    index: Int[Tensor, " M"]
    """Which of all rows train."""
    unscored: int
    dead_rows: int
    """Rows that train with an advantage of exactly 0."""
    sampler_gap: MismatchStats | None
    """Between the learner's log-probs and the sampler's; None where no pass was needed."""
    earned: Float[Tensor, "B T"] | None
    """What each token of the batch really went on to earn; None without a value model."""


@dataclass(frozen=True)
class Evaluation:
    """Accuracies from 0 to 1: an outcome counts as right when it is at least 1."""

    accuracy: float
    """Greedy."""
    low: float
    high: float
    """Wilson's 95 % interval around it."""
    problems: int
    unscored: int
    outcome: float
    """Mean over the greedy answers that are scored, like reward and parts."""
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward was made of, where it was more than the outcome."""
    k: int = 0
    """Completions sampled per problem for what follows."""
    mean_at_k: float | None = None
    """NaN where no completion could be scored, like pass@k."""
    mean_half_width: float | None = None
    """Half of the 95 % interval around mean@k, Student's t over problems; NaN from fewer than two."""
    pass_at_k: float | None = None
    pass_low: float | None = None
    pass_high: float | None = None

    @property
    def is_share(self) -> bool:
        """Whether accuracy says it all, because each outcome is right or wrong, 1 or 0."""
        return self.outcome == self.accuracy

    def floats(self) -> dict[str, float]:
        flat = asdict(self) | {f"parts/{name}": value for name, value in self.parts.items()}
        return {f"held_out/{name}": value for name, value in flat.items() if value is not None and name != "parts"}


@dataclass(frozen=True)
class Answered:
    """A held-out problem and what the policy said."""

    problem: Problem
    completion: Completion
    grade: Grade

    @property
    def outcome(self) -> float:
        return self.grade.outcome
