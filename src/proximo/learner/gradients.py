"""The gradient of an update: losses of micro-batches, added up exactly whatever the split."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.learner.critic import Critic
from proximo.learner.experts import Balance, CountedBalance, agreement_stats
from proximo.learner.guard import GradientPass, Parts
from proximo.learner.passes import OldScores, Passes
from proximo.learner.policy import Policy
from proximo.losses.objective import Plan, loss_of, piece_at_fault, plan_step, rows_of
from proximo.losses.pieces.extras import router_balance_of, value_loss_of
from proximo.losses.pieces.protocols import SelectionTraits
from proximo.losses.pieces.weights import TokenMean
from proximo.losses.records import LossInputs
from proximo.models import Scores
from proximo.system.phases import phase, phased
from proximo.types.batches import Batch, Stats, to_device
from proximo.types.tensor_types import Bool, Float, Int


@dataclass(frozen=True)
class UpdateRows:
    """Rows of an update, with their slices of what was decided over all of its rows."""

    batch: Batch
    weights: Float[Tensor, "B T"]
    """Weights of a mean over the update's tokens."""
    plan: Plan | None = None
    """Plan of the policy's terms; None where only values are trained."""
    own_rows: Bool[Tensor, " B"] | None = None
    """Rows whose ratios are measured against their log-probs in this very pass; None where only values are trained."""
    balance: CountedBalance | None = None
    algorithm: Algorithm | None = None
    """Algorithm of the update, whose numbers may change from step to step; other processes take it from here."""

    def __len__(self) -> int:
        return len(self.batch)

    def rows(self, index: Int[Tensor, " M"]) -> "UpdateRows":
        """Some of the rows."""
        return replace(
            self,
            batch=self.batch.rows(index),
            weights=self.weights[index],
            plan=None if self.plan is None else self.plan.rows(index),
            own_rows=None if self.own_rows is None else self.own_rows[index],
        )


class Gradients:
    """Runs the passes of an update forwards and backwards."""

    def __init__(
        self, policy: Policy, algorithm: Algorithm, critic: Critic | None, balance: Balance | None, *, seed: int
    ) -> None:
        self._policy, self._algorithm, self._critic, self._balance = policy, algorithm, critic, balance
        self._seed = seed
        self.mixed_in: Callable[[int, Callable[[Tensor], None]], Stats] | None = None
        """Adds the gradient of other data to that of an update, given the number of updates before it and the backward
        pass of a loss."""

    def take(self, algorithm: Algorithm) -> None:
        """Train by an algorithm of the same pieces with other numbers."""
        self._algorithm = algorithm
        if self._critic is not None:
            loss = value_loss_of(algorithm.extras)
            assert loss is not None, "numbers change, not pieces"
            self._critic = replace(self._critic, loss=loss)
        if self._balance is not None:
            loss = router_balance_of(algorithm.extras)
            assert loss is not None, "numbers change, not pieces"
            self._balance = replace(self._balance, loss=loss)

    def of_update(self, passes: Passes, batch: Batch, own_rows: Bool[Tensor, " B"]) -> GradientPass:
        """Gradient of all terms of the loss; it is left with the parameters. `own_rows`: rows whose ratios are measured
        against their log-probs in this very pass."""
        (plan, before), weights = self.plan(passes, batch), TokenMean()(batch.mask, batch.group)
        balance = self._balance and self._balance.counted(passes, self._policy, batch)
        self._policy.zero_grad()
        trained = self.rows_with_gradient(batch)
        update = UpdateRows(batch, weights, plan, own_rows, balance, self._algorithm)
        result = joined_passes(self._policy.map_rows("update", self.of_rows, passes, update.rows(trained)))
        if not result.parts:  # all rows dead: the gradient is 0, which is not no gradient to an optimizer
            self._policy.zero_missing_gradients()
        if self.mixed_in is not None:
            with phase("mixed-in examples"):
                result = replace(
                    result, stats=result.stats + self.mixed_in(self._policy.version, self._policy.backward)
                )
        logprobs = [(trained[index], each) for index, each in result.parts]
        entropies = [(trained[index], each) for index, each in result.entropies]
        at_fault = partial(self._piece_at_fault, update, logprobs, entropies)
        return replace(result, parts=logprobs, entropies=entropies, before=before, piece_at_fault=at_fault)

    def of_rows(self, passes: Passes, update: UpdateRows) -> GradientPass:
        """Gradient of all terms, of these rows alone; it is added to what the parameters have."""
        self._take_from(update)
        stats, first_logprobs, entropies, agreements = Stats(), [], [], []
        value, balance, device = self._critic and self._critic.model, update.balance, self._policy.model.device
        for index in passes.parts(update.batch):
            part = update.rows(index)
            assert part.plan is not None
            assert part.own_rows is not None
            with ExitStack() as until:
                with phase("forward"):
                    scores, values = self._policy.scores(passes, part.batch, value, until=until)
                with phase("loss"):
                    rows, weights = part.batch.to(device), to_device(part.weights, device)
                    old = old_logprobs(rows, to_device(part.own_rows, device), scores.logprobs.detach())
                    terms = [self.loss(rows, scores, old, part.plan.to(device))]
                    if self._critic is not None:
                        assert values is not None
                        terms.append(self._critic.term(values, rows, weights))
                    if balance is not None:
                        terms.append(balance.term(scores, rows, weights))
                with phase("backward"):
                    self._policy.backward(torch.stack([loss for loss, _ in terms]).sum())
            stats = sum((seen for _, seen in terms), stats) + agreement_stats(scores.agreement)
            agreements.append(scores.agreement)
            first_logprobs.append((index, scores.logprobs.detach()))
            entropies.append((index, scores.entropy.detach()))
        return GradientPass(stats, first_logprobs, entropies, agreements)

    def _piece_at_fault(self, update: UpdateRows, logprobs: Parts, entropies: Parts) -> str | None:
        """Fault of a piece, found by computing the policy's terms again; None where none is at fault."""
        for (index, now), (_, entropy) in zip(logprobs, entropies, strict=True):
            part, now = update.rows(index), now.cpu()
            assert part.plan is not None
            assert part.own_rows is not None
            old = old_logprobs(part.batch, part.own_rows, now)
            inputs = LossInputs.of(part.batch, logprobs=now, old_logprobs=old, entropy=entropy.cpu())
            if (fault := piece_at_fault(self._algorithm, inputs, part.plan)) is not None:
                return fault
        return None

    def of_values(self, passes: Passes, batch: Batch) -> GradientPass:
        """Gradient of the value model's loss alone."""
        self._policy.zero_grad()
        update = UpdateRows(batch, TokenMean()(batch.mask, batch.group), algorithm=self._algorithm)
        return joined_passes(self._policy.map_rows("values", self.of_row_values, passes, update))

    def of_row_values(self, passes: Passes, update: UpdateRows) -> GradientPass:
        """Gradient of the value model's loss, of these rows alone."""
        self._take_from(update)
        assert self._critic is not None
        critic, stats, device = self._critic.unclipped(), Stats(), self._policy.model.device
        for index in passes.parts(update.batch):
            part = update.rows(index)
            with phase("forward"):
                values = self._policy.values(passes, critic.model, part.batch)
                loss, part_stats = critic.term(values, part.batch.to(device), to_device(part.weights, device))
            with phase("backward"):
                self._policy.backward(loss)
            stats = stats + part_stats
        return GradientPass(stats)

    def _take_from(self, update: UpdateRows) -> None:
        """Take the algorithm that comes with rows from another process."""
        if update.algorithm is not None and update.algorithm is not self._algorithm:
            self.take(update.algorithm)

    def rows_with_gradient(self, batch: Batch) -> Int[Tensor, " M"]:
        """Rows of dead groups are skipped where nothing but the policy term could teach them."""
        select = self._algorithm.select
        others = self._algorithm.kl or self._algorithm.extras or SelectionTraits.read(select).teaches_alone
        alive = (batch.advantages != 0).any(dim=1) & batch.mask.any(dim=1)
        return torch.arange(len(batch)) if others else alive.nonzero().squeeze(1)

    def loss(self, rows: Batch, scores: Scores, old: Float[Tensor, "B T"], plan: Plan) -> tuple[Tensor, Stats]:
        """The policy's terms."""
        inputs = LossInputs.of(rows, logprobs=scores.logprobs, old_logprobs=old, entropy=scores.entropy)
        return loss_of(self._algorithm, inputs, plan)

    @phased("plan")
    def plan(self, passes: Passes, batch: Batch) -> tuple[Plan, OldScores | None]:
        """Weights over the whole update; a choice among all its tokens needs a pass without gradient first."""
        blank = torch.zeros_like(batch.old_logprobs)
        rows = rows_of(self._algorithm, LossInputs.of(batch, logprobs=batch.old_logprobs, entropy=blank))
        select, before = self._algorithm.select, None
        if select is not None and select.step_wide:
            with phase("scoring to choose tokens"):
                before = self._policy.without_gradient(passes, batch)
            rows = replace(rows, logprobs=before.logprobs, entropy=before.entropy)
        generator = torch.Generator().manual_seed(self._seed + self._policy.version)
        return plan_step(self._algorithm, rows, generator), before


def old_logprobs(rows: Batch, own_rows: Bool[Tensor, " B"], logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Log-probs that ratios are measured against: of `own_rows` these, else those of the policy that sampled."""
    return torch.where(own_rows.unsqueeze(1), logprobs.to(rows.old_logprobs.dtype), rows.old_logprobs)


def joined_passes(shares: Sequence[tuple[Int[Tensor, " M"], GradientPass]]) -> GradientPass:
    """Join the results for shares of an update's rows, whose numbers come with each; of one share, that itself."""
    stats = [share.stats for _, share in shares]
    return GradientPass(
        stats=stats[0] if len(stats) == 1 else reduce(add, [each.double() for each in stats], Stats()),
        parts=[(rows[index], each) for rows, share in shares for index, each in share.parts],
        entropies=[(rows[index], each) for rows, share in shares for index, each in share.entropies],
        agreements=[each for _, share in shares for each in share.agreements],
    )
