"""A mixture of experts in training: which routes are replayed, whether they fit, and the balance of the load."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.learner.guard import Update
from proximo.learner.options import RoutingReplay
from proximo.learner.passes import Passes
from proximo.learner.policy import Policy
from proximo.losses.pieces.extras import RouterBalance, router_balance_of
from proximo.models import Scores
from proximo.models.model_types import PreTrainedModel
from proximo.models.routing import UNKNOWN, Agreement, Routes, is_mixture, needed_routers
from proximo.types import Group
from proximo.types.batches import Batch, Stats
from proximo.types.tensor_types import Float, Int

LEAST_OVERLAP = 0.5
"""Replayed choices that share less with the routers' own, before any update, are of other tokens or layers."""


ROUTING_SHARES = {
    "routing_overlap": ("routing_equal", "routing_positions"),
    "routing_changed": ("routing_changed", "routing_positions"),
    "routing_drift": ("drift_experts", "drift_positions"),
    "routing_drift_tokens": ("drift_tokens", "drift_positions"),
}
"""Metrics of routes, each a sum over positions and their number."""
PROBED_GROUPS = 4
"""Groups whose routes are compared before and after a step's first update."""


# The balance of the load


@dataclass(frozen=True)
class Balance:
    """The routers' auxiliary loss, exact over micro-batches: the load is counted over the whole update first."""

    loss: RouterBalance
    chosen: int
    """Experts for each token."""

    @torch.no_grad()
    def counted(self, passes: Passes, policy: Policy, batch: Batch) -> "CountedBalance":
        """Count the load for one update: a pass over all its rows, without gradient."""
        shares = policy.map_rows("load", partial(self.of_rows, policy), passes, batch)
        counts = reduce(add, [share for _, share in shares])
        return CountedBalance(self.loss, self.chosen * counts.double() / counts.sum().clamp(min=1))

    @torch.no_grad()
    def of_rows(self, policy: Policy, passes: Passes, batch: Batch) -> Tensor:
        """Tokens of these rows that went to each expert, over all layers."""
        counts = torch.zeros((), dtype=torch.long, device=policy.model.device)
        for index in passes.parts(batch):
            rows = batch.rows(index)
            scores, _ = policy.scores(passes, rows)
            counts = counts + self.loss.assignments(_trained_logits(scores, rows), self.chosen)
        return counts


@dataclass(frozen=True)
class CountedBalance:
    loss: RouterBalance
    load: Float[Tensor, " X"]
    """Each expert's share of assignments over all layers and tokens that train: they sum to the experts of a token."""

    def term(self, scores: Scores, rows: Batch, weights: Float[Tensor, "B T"]) -> tuple[Float[Tensor, ""], Stats]:
        """Loss of these rows within an update's, coefficient included; the statistics are without it."""
        logits = _trained_logits(scores, rows)
        assert logits.requires_grad, "layers checkpointed in torch's reentrant way hide their routers' gradient"
        tokens = self.loss(logits, self.load)
        total = (tokens * weights[rows.mask].to(tokens.dtype)).sum()
        return self.loss.coefficient * total, Stats(totals={"router_loss": total.detach()})


def _trained_logits(scores: Scores, rows: Batch) -> Float[Tensor, "M L X"]:
    """The routers' logits where the tokens of the mask are predicted."""
    assert scores.router_logits is not None
    return scores.router_logits[rows.mask.to(scores.states.where.device)[scores.states.where]]


def balance_for(algorithm: Algorithm, model: PreTrainedModel) -> Balance | None:
    """Balance of the routers, where the algorithm asks for one."""
    loss = router_balance_of(algorithm.extras)
    return loss and Balance(loss, needed_routers(model, f"extra is {loss}")[0].top_k)


# RoutingReplay


def check_replay(model: PreTrainedModel, replay: RoutingReplay | None) -> RoutingReplay | None:
    """Refused where there is nothing to replay."""
    if replay is not None:
        needed_routers(model, f"routing_replay is {replay!r}")
    return replay


def sampled_routes(groups: Sequence[Group]) -> Routes | None:
    """Routes as the sampler recorded them; completions without are unknown, and None where none has any."""
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    known = next((each.routes for each in completions if each.routes is not None), None)
    if known is None:
        return None
    length = max(1, *(len(each.tokens) for each in completions))
    rows = known.new_full((len(completions), length, *known.shape[1:]), UNKNOWN)
    for row, completion in zip(rows, completions, strict=True):
        if completion.routes is not None:
            row[: len(completion.routes)] = completion.routes
    prompts = []
    for group in groups:
        saved = [each.completion.prompt_routes for each in group.rollouts if each.completion.prompt_routes is not None]
        prompts.append(saved[0] if saved else known.new_full((len(group.prompt_tokens), *known.shape[1:]), UNKNOWN))
    return Routes(tuple(prompts), rows)


def to_replay(batch: Batch, replay: RoutingReplay | None) -> Batch:
    """The batch with the sampler's routes, where those are to be replayed."""
    if replay != "sampler":
        return batch
    routes = sampled_routes(batch.groups)
    if routes is None:
        raise ValueError(
            "routing_replay is 'sampler', but no completion says its routes: sample with record_routes=True"
        )
    return replace(batch, routes=routes.rows, prompt_routes=routes.prompts)


def with_routes(batch: Batch, index: Int[Tensor, " M"], routes: Routes | None) -> Batch:
    """The batch with what the old policy's pass recorded at some of the rows.

    Of a row that was carried over from an earlier step they are the choices of the policy as it is now: those of the
    policy that sampled it are gone.
    """
    if routes is None:
        return batch
    everywhere = routes.rows.new_full((len(batch), *routes.rows.shape[1:]), UNKNOWN)
    return replace(batch, routes=everywhere.index_copy(0, index, routes.rows), prompt_routes=routes.prompts)


Agreements = tuple[Agreement, Agreement] | None
"""Agreements of a pass's completions and of its prompts; None where nothing was replayed."""


def agreement_stats(agreements: Agreements) -> Stats:
    """Statistics of the completions' tokens; `routing_metrics` reads them."""
    if agreements is None:
        return Stats()
    completions, _ = agreements
    return Stats(
        totals={
            "routing_positions": completions.positions,
            "routing_equal": completions.equal.mean(),
            "routing_changed": completions.changed,
        }
    )


def routing_metrics(stats: Stats) -> dict[str, float]:
    """Shares over all updates of a step: of replayed experts the share of equal ones, and of tokens whose experts
    differ in any layer; of the routers' own choice that of experts, and of tokens, that the first update changed."""
    metrics = {}
    for name, (total, per) in ROUTING_SHARES.items():
        if stats.totals.get(per):
            metrics[name] = float(stats.totals[total] / stats.totals[per])
    return metrics


def with_drift(update: Callable[[Batch], Update], policy: Policy, passes: Passes, batch: Batch) -> Update:
    """Update, and count what it changes in the routers' own choice for the rows of a few groups."""
    if not is_mixture(policy.model):
        return update(batch)
    few = torch.isin(batch.group, batch.group.unique()[:PROBED_GROUPS]).nonzero().squeeze(1)
    rows = replace(batch.rows(few), routes=None, prompt_routes=())
    before = policy.without_gradient(passes, rows, record=True).routes
    result = update(batch)
    after = policy.without_gradient(passes, rows, record=True).routes
    assert before is not None
    assert after is not None
    return replace(result, stats=result.stats + drift_stats(before.rows, after.rows))


def drift_stats(before: Int[Tensor, "B T L K"], after: Int[Tensor, "B T L K"]) -> Stats:
    """Statistics of the experts that tokens went to before and that are not chosen any more, for `routing_metrics`."""
    known = (before != UNKNOWN).flatten(2).all(dim=2)
    kept = (before[..., :, None] == after[..., None, :]).any(dim=-1)[known].double()
    lost = 1 - kept.mean(dim=(1, 2))
    totals = {"drift_positions": known.sum(), "drift_experts": lost.sum(), "drift_tokens": (lost > 0).sum()}
    return Stats(totals=totals)


def check_agreement(parts: Sequence[Agreements]) -> None:
    """Stop where what is replayed, before any update, is not what the routers would do.

    Each layer by itself: in the first ones a choice depends on the token most, so a shift by one shows best there.
    """
    known = [part for part in parts if part is not None]
    for what, agreements in zip(("completions", "prompts"), zip(*known, strict=True), strict=False):
        overlap, layer = reduce(add, agreements).overlap.min(dim=0)
        if overlap < LEAST_OVERLAP:
            raise ValueError(
                f"replay: before the step's first update only {overlap:.0%} of the experts replayed for the {what} in "
                f"layer {int(layer)} are those that its router chooses (at least half are expected): the routes are of "
                "other tokens, another layer or another model; use replay='old_policy', or mend what records them"
            )
