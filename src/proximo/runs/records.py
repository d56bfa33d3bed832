"""Records passed through a run: data cursor, a step's rollouts, its batch, an evaluation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from torch import Tensor

from proximo.losses.diagnostics import MismatchStats
from proximo.samplers.in_progress import Begun
from proximo.samplers.sampler import Snapshot
from proximo.types import Completion, Grade, Group, Problem
from proximo.types.batches import Batch
from proximo.types.tensor_types import Float, Int


@dataclass(frozen=True)
class DataCursor:
    """Position in the data: the next unused problem, and groups already sampled for the next step."""

    next_problem: int = 0
    carried: tuple[Group, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    """Running pass rates by problem id, for a curriculum; empty without one."""
    kept_share: float = 1.0
    """Share of groups that dynamic sampling kept lately: how many prompts a step asks for at first follows from it."""


@dataclass(frozen=True)
class Active:
    """A group that was drawn and is not trained yet, between two steps."""

    ordinal: int
    problem: Problem
    step: int
    """Index of the step at which it was drawn."""
    version: int
    """Version of the weights when it was drawn."""
    passed: int
    """Number of younger groups that were trained before it."""
    is_noted: bool
    """True if the ledger says that it was carried over."""
    group: Group | None
    """Rollouts of the group; None while it is sampled."""
    begun: tuple[Begun, ...] = ()
    """Completions begun so far, while it is sampled."""


@dataclass(frozen=True)
class Collected:
    """The rollouts of a step."""

    groups: tuple[Group, ...]
    """Groups to train on."""
    dropped: tuple[Group, ...]
    """Groups that were sampled but dropped; they count in statistics over the rollout batch."""
    cursor: DataCursor
    rounds: int
    sampled_tokens: int
    """Tokens sampled in this step, dropped and carried groups included."""
    passed_over: tuple[tuple[int, Problem], ...] = ()
    """Draws that were passed over, by a curriculum or as unusable, by number, with their problems."""
    late: tuple[tuple[int, Problem], ...] = ()
    """Draws that younger ones have passed, and that are trained in a later step."""
    expired: tuple[tuple[int, Problem], ...] = ()
    """Draws that took too long, and were given up."""
    unneeded: int = 0
    """Number of prompts that were asked for and not needed; the next step begins with them, and samples them anew."""
    grading_seconds: float = field(default=0.0, compare=False)
    """Seconds waited for grades after sampling; 0 if the grader keeps up with the sampler."""

    def outcomes(self) -> list[float]:
        """Task scores of everything sampled, dropped groups included; NaN if a grader failed."""
        groups = [*self.groups, *self.dropped]
        return [rollout.grade.outcome for group in groups for rollout in group.rollouts]

    @property
    def wasted_tokens(self) -> int:
        return sum(num_tokens(group) for group in self.dropped)


@dataclass(frozen=True)
class Pending:
    """Rollouts for later steps, sampled or being sampled, between two steps."""

    ahead: Sequence[Collected] = ()
    """Rollouts of the next steps that are sampled and graded already, in order."""
    active: Sequence[Active] = ()
    """Groups that are sampled while weights change, and those of them that have ended, in order."""
    older_weights: Sequence[Snapshot] = ()
    """Older weights that the next steps sample with; references, saved in a separate file."""


def num_tokens(group: Group) -> int:
    """Number of sampled tokens of all completions of a group."""
    return sum(rollout.completion.num_sampled for rollout in group.rollouts)


@dataclass(frozen=True)
class Assembled:
    """A batch ready for updates, with what was measured while assembling it."""

    batch: Batch
    """Rows that train."""
    everyone: Batch
    """All rows of the step, those of dropped groups last."""
    index: Int[Tensor, " M"]
    """Indices among all rows of those that train."""
    unscored: int
    dead_rows: int
    """Rows that train with an advantage of exactly 0."""
    sampler_gap: MismatchStats | None
    """Mismatch between the learner's and the sampler's log-probs; None if no pass was needed."""
    earned: Float[Tensor, "B T"] | None
    """Actual return from each token on; None without a value model."""


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation. Accuracies are from 0 to 1; a task score of at least 1 counts as correct."""

    accuracy: float
    """Accuracy of the greedy answers."""
    low: float
    high: float
    """Wilson's 95 % interval of the accuracy."""
    problems: int
    unscored: int
    outcome: float
    """Mean task score of the scored greedy answers; reward and parts are means over the same."""
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Means of the reward's parts, if it is more than the task score."""
    k: int = 0
    """Completions sampled per problem for the fields below."""
    mean_at_k: float | None = None
    """Share of sampled completions that are correct; NaN, like pass@k, if none could be scored."""
    mean_half_width: float | None = None
    """Half the width of mean@k's 95 % interval, Student's t over problems; NaN for fewer than two."""
    pass_at_k: float | None = None
    pass_low: float | None = None
    pass_high: float | None = None
    outcome_half_width: float | None = None
    """Half the width of the mean task score's 95 % interval, Student's t over problems; NaN for fewer than two. None
    where each task score is 1 or 0: the accuracy's interval is that of the task score."""
    sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Accuracy, its interval, task score and counts of each source, if the problems come from several."""

    @property
    def is_share(self) -> bool:
        """True if accuracy is enough, because each task score is 1 or 0."""
        return self.outcome == self.accuracy

    def floats(self) -> dict[str, float]:
        flat = asdict(self) | {f"parts/{name}": value for name, value in self.parts.items()}
        flat |= {f"{source}/{name}": value for source, values in self.sources.items() for name, value in values.items()}
        nested = ("parts", "sources")
        return {f"held_out/{name}": value for name, value in flat.items() if value is not None and name not in nested}

    def value(self, metric: str) -> float:
        """A number by its name in `metrics.jsonl`, without `held_out/`."""
        known = {name.removeprefix("held_out/"): value for name, value in self.floats().items()}
        if metric not in known:
            raise ValueError(f"evaluation.metric is {metric!r}, but an evaluation gives {', '.join(sorted(known))}")
        return known[metric]

    @classmethod
    def none(cls) -> "Evaluation":
        """Evaluation of a run that is not evaluated."""
        unknown = math.nan
        return cls(unknown, 0.0, 1.0, problems=0, unscored=0, outcome=unknown, reward=unknown)


@dataclass(frozen=True)
class Answered:
    """A held-out problem and the policy's graded answer."""

    problem: Problem
    completion: Completion
    grade: Grade

    @property
    def outcome(self) -> float:
        return self.grade.outcome
