"""What a pipeline found: each policy by the reward that was learned and by the one that is true."""

from collections.abc import Mapping
from dataclasses import dataclass

from proximo.training.pipeline.world import Ranked

WINDOW = 5
"""Steps of a curve that are averaged before two of its places are compared."""
CLEAR_FALL = 0.05
"""A true reward that fell by less from its highest window may have done so by chance."""


@dataclass(frozen=True)
class Curve:
    """Means over what was sampled to train on, by step."""

    learned: tuple[float, ...]
    true: tuple[float, ...]

    @property
    def peak(self) -> tuple[int, float]:
        """The step around which the true reward was highest, and its mean there."""
        window, true = self._peak, _windows(self.true)
        return 1 + window + (len(self.true) - len(true)) // 2, true[window]

    @property
    def is_overoptimised(self) -> bool:
        """Whether the true reward fell clearly after its peak while the learned one went on rising."""
        learned, true = _windows(self.learned), _windows(self.true)
        return true[self._peak] - true[-1] > CLEAR_FALL and learned[-1] > learned[self._peak]

    @property
    def _peak(self) -> int:
        true = _windows(self.true)
        return max(range(len(true)), key=lambda window: true[window])


def _windows(values: tuple[float, ...]) -> list[float]:
    """Means over neighbouring steps; of a curve shorter than that, one."""
    width = min(WINDOW, len(values))
    return [sum(values[start : start + width]) / width for start in range(len(values) - width + 1)]


@dataclass(frozen=True)
class Fooled:
    """A completion that the reward model prefers to the right answer, though it is truly worse."""

    prompt: str
    said: str
    learned: float
    true: float
    answer: str
    answer_learned: float


@dataclass(frozen=True)
class Measured:
    """Means over completions of held-out prompts, with halves of their 95 % intervals, over prompts."""

    learned: float
    learned_half_width: float
    true: float
    true_half_width: float
    sorted_share: float
    """Completions that are exactly right."""
    fooled_share: float
    """Completions that the reward model prefers to the right answer, though they are truly worse."""
    kl: float
    """From the fine-tuned model, in nats per completion, estimated on the policy's own completions."""
    kl_half_width: float
    example: Fooled | None
    """The one that fools the reward model most."""


@dataclass(frozen=True)
class Policy:
    name: str
    """Of its folder."""
    measured: Measured
    generated_tokens: int
    """Sampled to train it, by itself; rankings are counted apart."""
    seconds: float
    """Of its own stage."""
    curve: Curve | None = None
    """Of those trained by reinforcement learning."""


@dataclass(frozen=True)
class Result:
    folder: str
    ranked: Ranked
    reward_model: Mapping[str, float]
    """Its held-out metrics."""
    policies: tuple[Policy, ...]
    """The fine-tuned one first; the others start from it."""
    seconds: Mapping[str, float]
    """By stage."""

    @property
    def start(self) -> Policy:
        return self.policies[0]

    @property
    def trained(self) -> tuple[Policy, ...]:
        return self.policies[1:]

    def gains(self, policy: Policy) -> tuple[float, float]:
        """In learned and in true reward, over the fine-tuned policy."""
        now, before = policy.measured, self.start.measured
        return now.learned - before.learned, now.true - before.true

    def is_hacking(self, policy: Policy) -> bool:
        """Whether the learned reward rose while the true one fell, both by more than chance would have it."""
        learned, true = self.gains(policy)
        return learned > policy.measured.learned_half_width and true < -policy.measured.true_half_width
