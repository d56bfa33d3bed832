"""The gradient of an update: losses of micro-batches, added up exactly whatever the split."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.maths.blaming import piece_at_fault
from proximo.maths.objective import loss_of
from proximo.maths.pieces.traits import SelectionTraits
from proximo.maths.pieces.weights import TokenMean
from proximo.maths.plans import Plan, plan_step
from proximo.maths.records import LossInputs
from proximo.maths.rows import rows_of
from proximo.models import Scores
from proximo.tensor_types import Float, Int
from proximo.training.learner.critic import Critic
from proximo.training.learner.experts import Balance, agreement_stats
from proximo.training.learner.guard import GradientPass, Parts
from proximo.training.learner.passes import OldScores, Passes
from proximo.training.learner.policy import Policy
from proximo.types import Batch, Stats, to_device

OldLogprobs = Callable[[Batch, Float[Tensor, "B T"]], Float[Tensor, "B T"]]
"""What ratios are measured against, of some rows and the log-probs that they have now."""


class Gradients:
    """Runs the passes of an update forwards and backwards."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        critic: Critic | None,
        balance: Balance | None,
        *,
        seed: int,
    ) -> None:
        self._policy, self._algorithm, self._critic, self._balance = policy, algorithm, critic, balance
        self._seed = seed

    def of_update(self, passes: Passes, batch: Batch, old_logprobs: OldLogprobs) -> GradientPass:
        """Of all terms of the loss; it is left with the parameters."""
        (plan, before), token_weights = self.plan(passes, batch), TokenMean()(batch.mask, batch.group)
        balance = self._balance and self._balance.counted(passes, self._policy, batch)
        self._policy.zero_grad()
        stats, first_logprobs, entropies, agreements = Stats(), [], [], []
        value = self._critic and self._critic.model
        trained, device = self.rows_with_gradient(batch), self._policy.model.device
        for part in passes.parts(batch.rows(trained)):
            index = trained[part]
            rows = batch.rows(index)
            with ExitStack() as until:
                scores, values = self._policy.scores(passes, rows, value, until=until)
                rows, weights = rows.to(device), to_device(token_weights[index], device)
                old = old_logprobs(rows, scores.logprobs.detach())
                terms = [self.loss(rows, scores, old, plan.rows(index).to(device))]
                if self._critic is not None:
                    assert values is not None
                    terms.append(self._critic.term(values, rows, weights))
                if balance is not None:
                    terms.append(balance.term(scores, rows, weights))
                torch.stack([loss for loss, _ in terms]).sum().backward()
            stats = sum((seen for _, seen in terms), stats) + agreement_stats(scores.agreement)
            agreements.append(scores.agreement)
            first_logprobs.append((index, scores.logprobs.detach()))
            entropies.append((index, scores.entropy.detach()))
        at_fault = partial(self._piece_at_fault, batch, plan, first_logprobs, entropies, old_logprobs)
        return GradientPass(stats, first_logprobs, entropies, agreements, before, at_fault)

    def _piece_at_fault(
        self, batch: Batch, plan: Plan, logprobs: Parts, entropies: Parts, old_logprobs: OldLogprobs
    ) -> str | None:
        """What is wrong with which piece, found by computing the policy's terms again; None where none is at fault."""
        for (index, now), (_, entropy) in zip(logprobs, entropies, strict=True):
            rows, now = batch.rows(index), now.cpu()
            old = old_logprobs(rows, now)
            inputs = LossInputs.of(rows, logprobs=now, old_logprobs=old, entropy=entropy.cpu())
            if (found := piece_at_fault(self._algorithm, inputs, plan.rows(index))) is not None:
                return found
        return None

    def of_values(self, passes: Passes, batch: Batch) -> GradientPass:
        """Of the value model's loss alone."""
        assert self._critic is not None
        critic, weights = self._critic.unclipped(), TokenMean()(batch.mask, batch.group)
        self._policy.zero_grad()
        stats, device = Stats(), self._policy.model.device
        for index in passes.parts(batch):
            rows = batch.rows(index)
            values = self._policy.values(passes, critic.model, rows)
            loss, part_stats = critic.term(values, rows.to(device), to_device(weights[index], device))
            loss.backward()
            stats = stats + part_stats
        return GradientPass(stats)

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

    def plan(self, passes: Passes, batch: Batch) -> tuple[Plan, OldScores | None]:
        """Weights over the whole update; a choice among all its tokens needs a pass without gradient first."""
        blank = torch.zeros_like(batch.old_logprobs)
        rows = rows_of(self._algorithm, LossInputs.of(batch, logprobs=batch.old_logprobs, entropy=blank))
        select, before = self._algorithm.select, None
        if select is not None and select.step_wide:
            before = self._policy.without_gradient(passes, batch)
            rows = replace(rows, logprobs=before.logprobs, entropy=before.entropy)
        generator = torch.Generator().manual_seed(self._seed + self._policy.version)
        return plan_step(self._algorithm, rows, generator), before
