"""The learner: scores completions and updates the policy. It knows no task, no sampler and no file."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from proximo.algorithms import Algorithm
from proximo.maths.arithmetic import sampled
from proximo.maths.mismatch import MismatchStats, mismatch
from proximo.maths.objective import loss_of
from proximo.maths.pieces.extras import needing
from proximo.maths.pieces.traits import AnchorTraits, SelectionTraits
from proximo.maths.pieces.weights import TokenMean
from proximo.maths.plans import Plan, plan_step
from proximo.maths.records import LossInputs
from proximo.maths.rows import rows_of
from proximo.models import Scores, frozen_copy
from proximo.models.values import ValueModel
from proximo.tensor_types import Bool, Float, Int
from proximo.training.config import CPU_TOKENS, RoutingReplay, TrainingOptions
from proximo.training.learner.critic import critic_for
from proximo.training.learner.experts import agreement_stats, balance_for, check_agreement, check_replay
from proximo.training.learner.guard import GradientPass, Update, UpdateGuard
from proximo.training.learner.optimizer import POLICY, Optimizer
from proximo.training.learner.passes import OldScores, Passes, minibatches
from proximo.training.learner.rounding import check_gap, gate_width
from proximo.types import Batch, Stats, to_device

VALUE_PACE = 10
"""How much faster than the policy a value model learns unless told otherwise: it starts from nothing."""


class Learner:
    """A policy, its optimizer, and where the algorithm asks for them a reference and a value model."""

    def __init__(
        self,
        model: PreTrainedModel,
        algorithm: Algorithm,
        options: TrainingOptions,
        *,
        temperature: float,
        seed: int,
        value: ValueModel | None = None,
        value_learning_rate: float | None = None,
        replay: RoutingReplay | None = None,
        max_gap: float | None = None,
    ) -> None:
        """Without a `value` of its own, an algorithm that asks for one gets a head on the policy's trunk.
        `max_gap` is the largest gap of the sampler that the first rows may show; None: any."""
        self.model = model
        self.algorithm = algorithm
        self.options = options
        self.replay: RoutingReplay | None = check_replay(model, replay)
        self.balance = balance_for(algorithm, model)
        self.passes = Passes(
            temperature,
            options.token_budget or CPU_TOKENS,
            entropy_gradient=bool(needing(algorithm.extras, "entropy")),
            router_logits=self.balance is not None,
        )
        self.reference = frozen_copy(model) if algorithm.needs_reference else None
        self.reference_was_reset = False
        self.kl_reward = algorithm.kl_reward
        """As it stands: a controller moves its coefficient."""
        self.critic = critic_for(algorithm, model, value)
        self.rates = (options.learning_rate, value_learning_rate or VALUE_PACE * options.learning_rate)
        self.optimizer = Optimizer(
            [self.policy_parameters(), self.value_parameters()],
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
        )
        self.guard = UpdateGuard(options, self.optimizer, model)
        self.version = 0
        """Updates that were applied."""
        self.sampled_version = 0
        """The version that sampled the step's fresh rows."""
        self.trusts_sampler = False
        """Whether the sampler's log-probs may stand for the old policy's; found out by measuring."""
        self._max_gap = max_gap
        self._seed, self.shuffle = seed, torch.Generator().manual_seed(seed)

    def policy_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def value_parameters(self) -> list[nn.Parameter]:
        """What the value model has beside the policy's."""
        own = [] if self.critic is None else self.critic.model.parameters()
        return [parameter for parameter in own if parameter.requires_grad]

    # Before the updates

    def needs_old_pass(self) -> bool:
        """Not when the sampler's log-probs are trusted, nor when a single update makes every ratio 1.

        A sampler with older weights is never trusted: it may have been close, and falls behind at any update.
        """
        if self.critic is not None or self.algorithm.correct is not None or self.replay == "old_policy":
            return True
        on_policy = self.options.updates == 1 or AnchorTraits.read(self.algorithm.anchor).on_policy
        trusted = self.trusts_sampler and self.sampled_version == self.version
        return not (trusted or on_policy)

    def old_scores(self, batch: Batch) -> OldScores:
        """Log-probs, entropy and values of the policy as it stands; its routes, where those are to be replayed."""
        value, record = self.critic and self.critic.model, self.replay == "old_policy"
        self.passes, scores = self.guard.retry_on_oom(
            self.passes, batch, lambda passes: passes.without_gradient(self.model, batch, value, record=record)
        )
        return scores

    def reference_logprobs(self, batch: Batch) -> Float[Tensor, "B T"]:
        """Never replayed: it is what it is."""
        reference, batch = self.reference, replace(batch, routes=None)
        assert reference is not None
        self.passes, scores = self.guard.retry_on_oom(
            self.passes, batch, lambda passes: passes.without_gradient(reference, batch)
        )
        return scores.logprobs

    def reset_reference(self) -> None:
        """Iterative GRPO: from now on the policy is held near what it is today."""
        if self.reference is not None:
            self.reference, self.reference_was_reset = frozen_copy(self.model), True

    def adapt_kl(self, kl: float, completions: int) -> None:
        """After a step: its KL from the reference, in nats per completion, moves the coefficient where asked for."""
        if self.kl_reward is not None and self.kl_reward.controller is not None and math.isfinite(kl):
            coefficient = self.kl_reward.controller(self.kl_reward.coefficient, kl, completions)
            self.kl_reward = replace(self.kl_reward, coefficient=coefficient)

    def start_step(self, sampled_version: int | None = None) -> None:
        """From here on the policy differs from the one that sampled: itself, unless a sampler with older weights did.

        Rows of a sampler that lags are fresh all the same: their old policy is this one, as it starts the step, and
        what lies between sampler and old policy is a mismatch, for `correct` to repair.
        """
        self.sampled_version = self.version if sampled_version is None else sampled_version

    def is_stale(self, batch: Batch) -> Bool[Tensor, " B"]:
        """Rows carried over from an earlier step: only their sampler knows the policy that said them."""
        return batch.version < self.sampled_version

    def measure_gap(self, batch: Batch, logprobs: Float[Tensor, "B T"]) -> MismatchStats | None:
        """How far the sampler of the fresh rows is from the policy, None without any; decides whether to trust it."""
        mask = batch.mask & ~self.is_stale(batch).unsqueeze(1)
        log_weight = sampled(logprobs.detach().to(batch.rollout_logprobs.dtype) - batch.rollout_logprobs, mask)
        if mask.any():
            # GSPO's gate is 3e-4 wide: what counts is the gap in the algorithm's own ratio against a tenth of it.
            seen = self.algorithm.ratio(log_weight, mask)
            self.trusts_sampler = bool((seen.abs() * mask).sum() / mask.sum() < gate_width(self.algorithm) / 10)
        self._max_gap = check_gap(found := mismatch(log_weight, mask), self._max_gap, self.model)
        return found

    # The updates

    def updates(self, batch: Batch) -> Iterator[Update]:
        """Train on a step's rows: epochs × minibatches of whole groups, shuffled."""
        return self._each_minibatch(batch, lambda rows, number: self.update(rows, fresh=number == 0))

    def value_updates(self, batch: Batch) -> Iterator[Update]:
        """The same for the value model alone, on what completions really earned; the policy stays as it is."""
        return self._each_minibatch(batch, lambda rows, _: self.update_value(rows))

    def update(self, batch: Batch, *, fresh: bool) -> Update:
        """One optimizer update, exact over any split into micro-batches; none where a number is not finite."""
        if (unread := self.guard.skip_if_not_finite(batch)) is not None:
            return unread
        self.passes, found = self.guard.retry_on_oom(self.passes, batch, lambda passes: self._gradient(passes, batch))
        if fresh:
            check_agreement(found.agreements)
        if not found.parts:  # all rows dead: the gradient is 0, which is not no gradient to an optimizer
            self.optimizer.fill_zeros(POLICY)
        gap = self._first_gap(batch, found) if fresh and found.parts else None  # first: it may stop the run
        update = replace(self.guard.apply(batch, found), version=self.version, first_gap=gap)
        self.version += update.skipped is None
        return update

    def update_value(self, batch: Batch) -> Update:
        """One update of the value model's own parameters."""
        if (unread := self.guard.skip_if_not_finite(batch)) is not None:
            return unread
        self.passes, found = self.guard.retry_on_oom(
            self.passes, batch, lambda passes: self._value_gradient(passes, batch)
        )
        return self.guard.apply(batch, found)

    def _gradient(self, passes: Passes, batch: Batch) -> GradientPass:
        (plan, before), token_weights = self._plan(passes, batch), TokenMean()(batch.mask, batch.group)
        balance = self.balance and self.balance.counted(passes, self.model, batch)
        self.optimizer.zero_grad()
        stats, first_logprobs, entropies, agreements = Stats(), [], [], []
        trained, device = self._rows_with_gradient(batch), self.model.device
        for part in passes.parts(batch.rows(trained)):
            index = trained[part]
            rows = batch.rows(index)
            with ExitStack() as until:
                value = self.critic and self.critic.model
                scores, values = passes.with_values(self.model, value, rows, until=until)
                rows, weights = rows.to(device), to_device(token_weights[index], device)
                terms = [self._loss(rows, scores, plan.rows(index).to(device))]
                if self.critic is not None:
                    assert values is not None
                    terms.append(self.critic.term(values, rows, weights))
                if balance is not None:
                    terms.append(balance.term(scores, rows, weights))
                torch.stack([loss for loss, _ in terms]).sum().backward()
            stats = sum((seen for _, seen in terms), stats) + agreement_stats(scores.agreement)
            agreements.append(scores.agreement)
            first_logprobs.append((index, scores.logprobs.detach()))
            entropies.append((index, scores.entropy.detach()))
        return GradientPass(stats, first_logprobs, entropies, agreements, before)

    def _value_gradient(self, passes: Passes, batch: Batch) -> GradientPass:
        assert self.critic is not None
        critic, weights = self.critic.unclipped(), TokenMean()(batch.mask, batch.group)
        self.optimizer.zero_grad()
        stats, device = Stats(), self.model.device
        for index in passes.parts(batch):
            rows = batch.rows(index)
            values = passes.values(self.model, critic.model, rows)
            loss, part_stats = critic.term(values, rows.to(device), to_device(weights[index], device))
            loss.backward()
            stats = stats + part_stats
        return GradientPass(stats)

    def set_learning_rate(self, step: int, *, policy_step: int | None = None) -> float:
        """Linear warm-up, then constant; the policy's, which starts later where values are pre-trained. Steps are
        indices, counted from 0."""
        warmup = max(self.options.warmup_steps, 1)
        steps = (step if policy_step is None else policy_step, step)
        rates = [rate * min(max(since + 1, 0) / warmup, 1.0) for rate, since in zip(self.rates, steps, strict=True)]
        self.optimizer.set_rates(*rates)
        return rates[POLICY]

    def _loss(self, rows: Batch, scores: Scores, plan: Plan) -> tuple[Tensor, Stats]:
        old = self.old_logprobs(rows, scores.logprobs.detach())
        inputs = LossInputs.of(rows, logprobs=scores.logprobs, old_logprobs=old, entropy=scores.entropy)
        return loss_of(self.algorithm, inputs, plan)

    def old_logprobs(self, rows: Batch, logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """What ratios are measured against; of a single update the policy that sampled is the policy itself."""
        if self.options.updates > 1:
            return rows.old_logprobs
        own = logprobs.to(rows.old_logprobs.dtype)
        return torch.where(self.is_stale(rows).unsqueeze(1), rows.old_logprobs, own)

    def _plan(self, passes: Passes, batch: Batch) -> tuple[Plan, OldScores | None]:
        """Weights over the whole update; a choice among all its tokens needs a pass without gradient first."""
        blank = torch.zeros_like(batch.old_logprobs)
        rows = rows_of(self.algorithm, LossInputs.of(batch, logprobs=batch.old_logprobs, entropy=blank))
        select, before = self.algorithm.select, None
        if select is not None and select.step_wide:
            before = passes.without_gradient(self.model, batch)
            rows = replace(rows, logprobs=before.logprobs, entropy=before.entropy)
        generator = torch.Generator().manual_seed(self._seed + self.version)
        return plan_step(self.algorithm, rows, generator), before

    def _first_gap(self, batch: Batch, found: GradientPass) -> MismatchStats | None:
        index = torch.cat([index for index, _ in found.parts])
        return self.measure_gap(batch.rows(index), torch.cat([logprobs for _, logprobs in found.parts]).cpu())

    # Rows and parts

    def _rows_with_gradient(self, batch: Batch) -> Int[Tensor, " M"]:
        """Rows of dead groups are skipped where nothing but the policy term could teach them."""
        select = self.algorithm.select
        others = self.algorithm.kl or self.algorithm.extras or SelectionTraits.read(select).teaches_alone
        alive = (batch.advantages != 0).any(dim=1) & batch.mask.any(dim=1)
        return torch.arange(len(batch)) if others else alive.nonzero().squeeze(1)

    def _each_minibatch(self, batch: Batch, update: Callable[[Batch, int], Update]) -> Iterator[Update]:
        for number in range(self.options.epochs):
            for place, index in enumerate(minibatches(batch, self.options, self.shuffle)):
                yield replace(update(batch.rows(index), number + place), rows=index)
