"""The door of the loss: an algorithm's pieces, and the caller's tensors checked and cleaned."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from proximo.maths.arithmetic import at_least_float32, check_shape, sampled, sampled_mask
from proximo.maths.pieces.corrections import Correction
from proximo.maths.pieces.divergences import KlLoss
from proximo.maths.pieces.extras import EntropyBonus, Extra, PositiveNll
from proximo.maths.pieces.gates import Gate
from proximo.maths.pieces.ratios import Anchor, CurrentPolicy, Ratio, SamplerPolicy
from proximo.maths.pieces.selection import Selection, TopEntropy
from proximo.maths.pieces.weights import Weights
from proximo.tensor_types import Bool, Float, Int


@runtime_checkable
class Objective(Protocol):
    """The part of an algorithm that the loss reads."""

    @property
    def anchor(self) -> Anchor: ...
    @property
    def ratio(self) -> Ratio: ...
    @property
    def gate(self) -> Gate: ...
    @property
    def select(self) -> Selection | None: ...
    @property
    def correct(self) -> Correction | None: ...
    @property
    def kl(self) -> KlLoss | None: ...
    @property
    def weights(self) -> Weights: ...
    @property
    def extras(self) -> tuple[Extra, ...]: ...


@dataclass(frozen=True)
class Rows:
    """The rows of one call: float32 at least, constants detached, exactly 0 off the mask."""

    logprobs: Float[Tensor, "B T"]
    """The only tensor here with a gradient, apart from `entropy`."""
    anchor_logprobs: Float[Tensor, "B T"]
    old_logprobs: Float[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"] | None
    ref_logprobs: Float[Tensor, "B T"] | None
    advantages: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"] | None
    outcome: Float[Tensor, " B"] | None
    mask: Bool[Tensor, "B T"]
    """Sampled tokens of scored rows."""
    scored: Bool[Tensor, " B"]
    group: Int[Tensor, " B"]


def rows_of(
    algorithm: Objective,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    group: Tensor,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    outcome: Tensor | None = None,
) -> Rows:
    """Check what a caller passed against what the algorithm needs, and clean it."""
    _check_needs(algorithm, ref_logprobs, rollout_logprobs, entropy, outcome)
    mask = sampled_mask(mask)
    per_token = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "advantages": advantages,
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
        "entropy": entropy,
    }
    for name, tensor in per_token.items():
        if tensor is not None:
            check_shape(name, tensor, mask.shape)
    check_shape("group", group, mask.shape[:1])
    if outcome is not None:
        check_shape("outcome", outcome, mask.shape[:1])

    unknown = advantages.isnan()
    scored = ~((unknown & mask).any(dim=1) | unknown.all(dim=1))
    mask = mask & scored.unsqueeze(1)
    current = sampled(at_least_float32(logprobs), mask)

    def constant(tensor: Tensor) -> Tensor:
        return sampled(tensor.detach().to(current.dtype), mask)

    sampler = None if rollout_logprobs is None else constant(rollout_logprobs)
    anchor = constant(old_logprobs)
    if isinstance(algorithm.anchor, SamplerPolicy):
        assert sampler is not None
        anchor = sampler
    elif isinstance(algorithm.anchor, CurrentPolicy):
        anchor = current.detach()
    return Rows(
        logprobs=current,
        anchor_logprobs=anchor,
        old_logprobs=constant(old_logprobs),
        rollout_logprobs=sampler,
        ref_logprobs=None if ref_logprobs is None else constant(ref_logprobs),
        advantages=constant(advantages),
        entropy=None if entropy is None else sampled(entropy.to(current.dtype), mask),
        outcome=None if outcome is None else outcome.detach(),
        mask=mask,
        scored=scored,
        group=group,
    )


def _check_needs(
    algorithm: Objective,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    entropy: Tensor | None,
    outcome: Tensor | None,
) -> None:
    if algorithm.kl is not None and ref_logprobs is None:
        raise ValueError(f"ref_logprobs is None, but {algorithm.kl} needs them; or use replace(algorithm, kl=None)")
    if rollout_logprobs is None and algorithm.correct is not None:
        raise ValueError(f"rollout_logprobs is None, but {algorithm.correct} needs the sampler's log-probs")
    if rollout_logprobs is None and isinstance(algorithm.anchor, SamplerPolicy):
        raise ValueError("rollout_logprobs is None, but the anchor is SamplerPolicy: pass the sampler's log-probs")
    wants_entropy = [extra for extra in algorithm.extras if isinstance(extra, EntropyBonus)]
    if entropy is None and (wants_entropy or isinstance(algorithm.select, TopEntropy)):
        raise ValueError("entropy is None, but the algorithm uses it (EntropyBonus or TopEntropy): pass it per token")
    if outcome is None and any(isinstance(extra, PositiveNll) for extra in algorithm.extras):
        raise ValueError("outcome is None, but PositiveNll must know which completions are correct: pass it per row")
