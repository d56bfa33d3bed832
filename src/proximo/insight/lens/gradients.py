"""The algorithms' gradients with respect to a model's parameters.

The gradient of a loss with respect to each log-prob is known from the step. Backpropagated through the model that
sampled the tokens, in the same passes as in training, it gives the gradient of the parameters.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor

from proximo.insight.lens.replay import ComparedAlgorithm, cosines_of
from proximo.insight.lens.steps import StoredStep
from proximo.learner.memory import with_room
from proximo.learner.options import CPU_TOKENS
from proximo.learner.passes import Passes
from proximo.models.model_types import PreTrainedModel, PreTrainedTokenizerBase
from proximo.models.out_of_memory import explaining_memory
from proximo.models.tokens.spelling import Spelling
from proximo.rl.config import RunConfig
from proximo.system.lines import plain
from proximo.system.safe_text import quoted
from proximo.types.batches import Batch, to_device
from proximo.types.tensor_types import Bool, Float

LOOKED_AT = 64
"""Number of completions whose tokens are compared; another tokenizer differs at once."""
SAME = 1e-3
"""Mean distance of log-probs below which a model counts as the policy that the step began with; it is larger in half
precision."""


@dataclass(frozen=True)
class ParameterGradients:
    """Gradients of several algorithms' policy losses, over all updates of a pass, for the same model."""

    norms: Mapping[str, float]
    cosines: Mapping[str, Mapping[str, float]]
    gap: float
    """Mean |Δ log-prob| between the model and what the step stored, over the tokens of the pass."""
    first_gap: float
    """The same over the step's first update only, which used the policy that the step began with."""
    halves: Mapping[str, float] = field(default_factory=dict)
    """Cosine between the gradients of two halves of the step's groups, by algorithm; empty if it was not asked for."""

    @property
    def is_policy(self) -> bool:
        """True if the model is the one that the step began with."""
        return self.first_gap < SAME

    def to_dict(self) -> dict[str, Any]:
        """Fields as JSON values."""
        return plain(asdict(self)) | {"is_policy": self.is_policy}


def check_tokens(step: StoredStep, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the model's tokenizer differs from the run's."""
    spelling, rows = Spelling(tokenizer), min(len(step.batch), LOOKED_AT)
    for row, pieces in zip(range(rows), step.pieces, strict=False):
        tokens = step.batch.tokens[step.layout.of(row)].tolist()
        spelled = spelling(tokens)  # a number beyond the vocabulary has no letters, in a run's own tokenizer too
        if spelled != list(pieces):
            actual, wanted = next(pair for pair in zip(spelled, pieces, strict=True) if pair[0] != pair[1])
            how = f"spells {quoted(wanted)} as {quoted(actual)}" if actual else f"lacks {quoted(wanted)}"
            raise ValueError(f"the model's tokenizer {how}: give a checkpoint of this run, or a model of its family")


def half_gradients(
    model: PreTrainedModel, step: StoredStep, config: RunConfig, views: Sequence[ComparedAlgorithm], *, number: int = -1
) -> ParameterGradients:
    """Each algorithm's gradient, and how well the gradients of two halves of the groups agree: of those in which it has
    one, every other. A cosine c between the halves means that c of a half's squared norm is common to both, and the
    rest the noise of the draw. Takes three times the passes and the memory of `parameter_gradients`."""
    parts = [half for view in views for half in _halves(step, view)]
    gradients = parameter_gradients(model, step, config, [*views, *parts], number=number)
    names = [view.name for view in views]
    return replace(
        gradients,
        norms={name: gradients.norms[name] for name in names},
        cosines={name: {other: gradients.cosines[name][other] for other in names} for name in names},
        halves={
            view.name: gradients.cosines[even.name][odd.name]
            for view, even, odd in zip(views, parts[::2], parts[1::2], strict=True)
        },
    )


def _halves(step: StoredStep, view: ComparedAlgorithm) -> tuple[ComparedAlgorithm, ComparedAlgorithm]:
    """The algorithm on every other of the groups that it has a gradient in, and on the others."""
    moved = step.layout.any(view.seen.gradient != 0) & view.rows
    groups = step.batch.group[moved].unique()
    is_even = torch.isin(step.batch.group, groups[::2])[step.layout.row]
    even, odd = (
        replace(
            view,
            name=f"{view.name} {name}",
            seen=replace(view.seen, gradient=view.seen.gradient * (is_even == chosen)),
        )
        for name, chosen in (("even", True), ("odd", False))
    )
    return even, odd


def parameter_gradients(
    model: PreTrainedModel, step: StoredStep, config: RunConfig, views: Sequence[ComparedAlgorithm], *, number: int = -1
) -> ParameterGradients:
    """Each algorithm's gradient for this model. ValueError if they do not fit into memory.

    Example: parameter_gradients(model, step, run.config, compared(step, run.config, {"gspo": GSPO}))
    """
    moved = torch.stack([step.layout.any(view.seen.gradient != 0) & view.rows for view in views]).any(dim=0)
    index = moved.nonzero().squeeze(1)
    # The fields of those rows that the division into passes reads.
    passed = replace(step.batch, lengths=step.batch.lengths[index], group=step.batch.group[index])
    parameters = [each for each in model.parameters() if each.requires_grad]
    with explaining_memory(f"{len(views)} gradients of the whole model are held at once; give fewer algorithms"):
        totals = [[torch.zeros_like(each, dtype=torch.float32) for each in parameters] for _ in views]
        passes = Passes(config.sampling.temperature, config.training.token_budget or CPU_TOKENS)
        logprobs = torch.zeros_like(step.batch.old_logprobs)
        if len(index):
            passes = with_room(passes, [model], passed, pending=0)
            for part in passes.parts(passed):
                rows, (places, real) = step.batch.rows(index[part]), step.layout.grid(index[part])
                for total, view in zip(totals, views, strict=True):
                    pull = step.layout.padded(view.seen.gradient, index[part])
                    logprobs[places[real]] = _add(total, pull, model, parameters, passes, rows)[real]
        products = _products(totals)
    first = moved & (step.updates[0] == 0) if len(index) else moved  # later updates used a policy that had moved
    names, cosines = [view.name for view in views], cosines_of(products).tolist()
    return ParameterGradients(
        norms=dict(zip(names, products.diagonal().sqrt().tolist(), strict=True)),
        cosines={name: dict(zip(names, row, strict=True)) for name, row in zip(names, cosines, strict=True)},
        gap=_distance(logprobs, step.current[number], moved[step.layout.row]) if len(index) else math.nan,
        first_gap=_distance(logprobs, step.current[0], first[step.layout.row]) if len(index) else math.nan,
    )


def _add(
    total: Sequence[Tensor],
    pull: Float[Tensor, "M T"],
    model: PreTrainedModel,
    parameters: Sequence[Tensor],
    passes: Passes,
    rows: Batch,
) -> Float[Tensor, "M T"]:
    """Add to an algorithm's gradient, in a separate pass, since compiled layers allow one backward; returns
    log-probs."""
    with ExitStack() as until:
        logprobs = passes.scores(model, rows, until=until).logprobs
        pull = to_device(pull, logprobs.device).to(logprobs.dtype)
        # An expert that no token was routed to is unused.
        gradients = torch.autograd.grad(logprobs, parameters, pull, allow_unused=True)
    for part, gradient in zip(total, gradients, strict=True):
        if gradient is not None:
            part += gradient
    return logprobs.detach().cpu().to(rows.old_logprobs.dtype)


def _products(totals: Sequence[Sequence[Tensor]]) -> Float[Tensor, "A A"]:
    """Dot products of all pairs of gradients, parameter by parameter, so that no gradient is copied as a whole. Pair by
    pair, since the last digits of a matrix product depend on how many gradients there are."""
    products = torch.zeros(len(totals), len(totals), dtype=torch.float64)
    for same in zip(*totals, strict=True):
        flat = [each.flatten().double() for each in same]
        for one, other in combinations_with_replacement(range(len(flat)), 2):
            products[one, other] += flat[one].dot(flat[other]).cpu()
    return products + products.triu(1).T


def _distance(ours: Float[Tensor, " N"], theirs: Float[Tensor, " N"], where: Bool[Tensor, " N"]) -> float:
    """Mean distance where both are known; NaN if nowhere."""
    known = where & ~theirs.isnan()
    return float((ours - theirs)[known].abs().mean()) if known.any() else math.nan
