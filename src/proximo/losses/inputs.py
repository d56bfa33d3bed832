"""Input of the loss: the pieces it reads, and the caller's tensors, checked and cleaned."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from proximo.losses.arithmetic import at_least_float32, check_shape, sampled, sampled_mask
from proximo.losses.pieces.corrections import Correction
from proximo.losses.pieces.divergences import KlLoss
from proximo.losses.pieces.extras import Extra, needing
from proximo.losses.pieces.gates import Gate
from proximo.losses.pieces.protocols import AnchorTraits, SelectionTraits
from proximo.losses.pieces.ratios import Anchor, Ratio
from proximo.losses.pieces.selection import Selection
from proximo.losses.pieces.weights import Weights
from proximo.losses.records import LossInputs, Rows


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


PER_ROW = ("group", "outcome")


def rows_of(algorithm: Objective, inputs: LossInputs) -> Rows:
    """Check the caller's tensors against what the algorithm needs, and clean them."""
    _check_needs(algorithm, inputs)
    mask = sampled_mask(inputs.mask)
    for name, tensor in vars(inputs).items():
        if tensor is not None:
            check_shape(name, tensor, mask.shape[:1] if name in PER_ROW else mask.shape)

    unknown = inputs.advantages.isnan()
    scored = ~((unknown & mask).any(dim=1) | unknown.all(dim=1))
    mask = mask & scored.unsqueeze(1)
    current = sampled(at_least_float32(inputs.logprobs), mask)

    def constant(tensor: Tensor) -> Tensor:
        return sampled(tensor.detach().to(current.dtype), mask)

    old = constant(inputs.old_logprobs)
    given = inputs.rollout_logprobs
    sampler = None if given is None else old if given is inputs.old_logprobs else constant(given)
    return Rows(
        logprobs=current,
        anchor_logprobs=algorithm.anchor(current.detach(), old, sampler),
        old_logprobs=old,
        rollout_logprobs=sampler,
        ref_logprobs=None if inputs.ref_logprobs is None else constant(inputs.ref_logprobs),
        advantages=constant(inputs.advantages),
        entropy=None if inputs.entropy is None else sampled(inputs.entropy.to(current.dtype), mask),
        outcome=None if inputs.outcome is None else inputs.outcome.detach(),
        mask=mask,
        scored=scored,
        group=inputs.group,
    )


def entropy_readers(algorithm: Objective) -> list[str]:
    """Names of the pieces that read the entropy."""
    own = SelectionTraits.read(algorithm.select).needs_entropy
    return needing(algorithm.extras, "entropy") + ([type(algorithm.select).__name__] if own else [])


def _check_needs(algorithm: Objective, inputs: LossInputs) -> None:
    if algorithm.kl is not None and inputs.ref_logprobs is None:
        raise ValueError(f"ref_logprobs is None, but {algorithm.kl} needs them; or use replace(algorithm, kl=None)")
    if inputs.rollout_logprobs is None and algorithm.correct is not None:
        raise ValueError(f"rollout_logprobs is None, but {algorithm.correct} needs the sampler's log-probs")
    if inputs.rollout_logprobs is None and AnchorTraits.read(algorithm.anchor).needs_sampler_logprobs:
        name = type(algorithm.anchor).__name__
        raise ValueError(f"rollout_logprobs is None, but the anchor is {name}: pass the sampler's log-probs")
    if inputs.entropy is None and (wants := entropy_readers(algorithm)):
        raise ValueError(f"entropy is None, but {' and '.join(wants)} read it: pass it per token")
    if inputs.outcome is None and (wants := needing(algorithm.extras, "outcome")):
        raise ValueError(f"outcome is None, but {wants[0]} must know which completions are correct: pass it per row")
