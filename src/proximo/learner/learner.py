"""The learner: scores completions and updates the policy. It knows no task, no reward and no sampler."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.learner.critic import critic_for
from proximo.learner.experts import balance_for, check_agreement, check_replay, to_replay, with_drift, with_routes
from proximo.learner.gradients import Gradients, old_logprobs
from proximo.learner.guard import GradientPass, Update, UpdateGuard
from proximo.learner.memory import checkpoint_models, checkpointable_layers, with_room
from proximo.learner.optimizer import POLICY
from proximo.learner.options import CPU_TOKENS, LearnerOptions, RoutingReplay, rate_share
from proximo.learner.passes import OldScores, Passes, minibatches
from proximo.learner.policy import Policy
from proximo.learner.rounding import check_gap, gate_width, late_gap
from proximo.losses.arithmetic import sampled
from proximo.losses.diagnostics import MismatchStats, mismatch
from proximo.losses.pieces.extras import needing
from proximo.losses.pieces.protocols import AnchorTraits, ShapeTraits
from proximo.models.model_types import PreTrainedModel
from proximo.models.values import HeadOnOwnModel, ValueModel
from proximo.system.phases import phase
from proximo.types.batches import Batch
from proximo.types.tensor_types import Bool, Float, Int

VALUE_PACE = 10
"""Default ratio of the value model's learning rate to the policy's: its head is new."""


@dataclass(frozen=True)
class PartState:
    """State of a part of a run, for a resume."""

    values: Mapping[str, Any]
    """Plain values for JSON."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Learner:
    """Trains a policy by an algorithm, with a value model where the algorithm asks for one."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        options: LearnerOptions,
        *,
        temperature: float,
        seed: int,
        value: ValueModel | None = None,
        value_learning_rate: float | None = None,
        replay: RoutingReplay | None = None,
        max_gap: float | None = None,
        steps: int | None = None,
    ) -> None:
        """Train a policy. Without a `value`, an algorithm that asks for one gets a head on the policy's trunk.
        `max_gap` is the largest gap that rounding explains between the policy and its sampler; None: they may differ.
        The first rows that show more end the run, later ones are told.
        `steps` are those of the run, which a learning rate that falls to 0 needs."""
        self.policy = policy
        self.algorithm = algorithm
        self.options, self._steps = options, steps
        self.replay: RoutingReplay | None = check_replay(policy.model, replay)
        self.balance = balance_for(algorithm, policy.model)
        self.passes = Passes(
            temperature,
            options.token_budget or CPU_TOKENS,
            entropy_gradient=bool(needing(algorithm.extras, "entropy")),
            router_logits=self.balance is not None,
        )
        self.kl_reward = algorithm.kl_reward
        """KL term of the reward, whose coefficient a controller may change."""
        self.critic = critic_for(algorithm, policy.model, value)
        self.rates = (options.learning_rate, value_learning_rate or VALUE_PACE * options.learning_rate)
        policy.start(options, self._value, needs_reference=algorithm.needs_reference)
        self.guard = UpdateGuard(options, policy, self._models)
        self.gradients = Gradients(policy, algorithm, self.critic, self.balance, seed=seed)
        self.sampled_version = 0
        """The version that sampled the step's fresh rows."""
        self.trusts_sampler = False
        """True if the sampler's log-probs may stand for the old policy's; found out by measuring."""
        self._lost_trust = False
        """True if they did, and then no longer could: for the rest of the run they do not."""
        self._max_gap, self._gap_passed, self._gap_is_late = max_gap, False, False
        """The largest gap, whether the first rows were within it, and whether the latest were not."""
        self.shuffle = torch.Generator().manual_seed(seed)

    @property
    def model(self) -> PreTrainedModel:
        """The policy's."""
        return self.policy.model

    @property
    def version(self) -> int:
        """Updates of the policy that were applied."""
        return self.policy.version

    @property
    def _value(self) -> ValueModel | None:
        return self.critic and self.critic.model

    @property
    def _models(self) -> list[PreTrainedModel]:
        """The models of a pass with gradient: the policy's, and a value model of its own."""
        return [self.model, *([self._value.model] if isinstance(self._value, HeadOnOwnModel) else [])]

    # Before the updates

    def prepare(self, batch: Batch, index: Int[Tensor, " M"]) -> tuple[Batch, MismatchStats | None]:
        """Fill in what updates read of the rows in `index`: old and reference log-probs, values and routes; and how
        far the sampler was from the policy, None where no pass was needed.

        A stale row was sampled before the latest update: only its sampler knows the policy that sampled it.
        """
        batch, gap = to_replay(batch, self.replay), None
        self.plan_memory(batch)
        rows = batch.rows(index)
        if self.needs_old_pass():
            with phase("old log-probs"):
                old = self.old_scores(rows)
            gap = self.measure_gap(rows, old.logprobs)
            known = torch.where(self.is_stale(rows).unsqueeze(1), rows.rollout_logprobs, old.logprobs)
            batch = replace(batch, old_logprobs=batch.old_logprobs.index_copy(0, index, known), values=old.values)
            batch = with_routes(batch, index, old.routes)
        if self.policy.has_reference:
            reference = torch.zeros_like(batch.old_logprobs)
            with phase("reference log-probs"):
                known = self.reference_logprobs(rows)
            batch = replace(batch, ref_logprobs=reference.index_copy(0, index, known))
        return batch, gap

    def plan_memory(self, batch: Batch) -> None:
        """A budget for the memory that is there, unless one is given; here, where all that is sampled is known."""
        if self.options.token_budget is None:
            self.passes = with_room(self.passes, self._models, batch, self.policy.pending_bytes)

    def needs_old_pass(self) -> bool:
        """False when the sampler's log-probs are trusted, and when a single update makes every ratio 1.

        A sampler with older weights is never trusted: it may have been close, and falls behind at any update.
        """
        if self.critic is not None or self.algorithm.correct is not None or self.replay == "old_policy":
            return True
        trusted = self.trusts_sampler and self.sampled_version == self.version
        return not (trusted or self._is_on_policy)

    @property
    def _is_on_policy(self) -> bool:
        """True if every ratio is 1 by itself."""
        return self.options.updates == 1 or AnchorTraits.read(self.algorithm.anchor).on_policy

    def old_scores(self, batch: Batch) -> OldScores:
        """Log-probs, entropy and values of the policy as it stands; its routes, where those are to be replayed."""
        record = self.replay == "old_policy"
        self.passes, scores = self.guard.retry_on_oom(
            self.passes,
            batch,
            lambda passes: self.policy.without_gradient(passes, batch, self._value, record=record),
            with_gradient=False,
        )
        return scores

    def reference_logprobs(self, batch: Batch) -> Float[Tensor, "B T"]:
        return self.logprobs_under(self.policy.reference_logprobs, batch)

    def logprobs_under(self, score: Callable[[Passes, Batch], Tensor], batch: Batch) -> Float[Tensor, "B T"]:
        """Log-probs under a model that is not trained, which never replays routes."""
        batch = replace(batch, routes=None)
        self.passes, logprobs = self.guard.retry_on_oom(
            self.passes, batch, lambda passes: score(passes, batch), with_gradient=False
        )
        return logprobs

    def adapt_kl(self, kl: float, completions: int) -> None:
        """Let a step's KL from the reference, in nats per completion, move the coefficient where that was asked for."""
        shape = ShapeTraits.read(self.kl_reward)
        if self.kl_reward is not None and shape.controller and shape.coefficient is not None and math.isfinite(kl):
            coefficient = shape.controller(shape.coefficient, kl, completions)
            self.kl_reward = replace(self.kl_reward, coefficient=coefficient)

    def start_step(self, sampled_version: int | None = None) -> None:
        """Note the version that samples the step; None: the current one. Rows of a sampler that lags are fresh too: the
        difference between sampler and old policy is a mismatch, for `correct` to repair."""
        self.sampled_version = self.version if sampled_version is None else sampled_version

    def is_stale(self, batch: Batch) -> Bool[Tensor, " B"]:
        """Rows carried over from an earlier step: only their sampler knows the policy that generated them."""
        return batch.version < self.sampled_version

    def measure_gap(
        self, batch: Batch, logprobs: Float[Tensor, "B T"], *, relied: bool = False
    ) -> MismatchStats | None:
        """Gap between the sampler of the fresh rows and the policy, None without any; decides whether to trust it.
        `relied`: this step's updates take its log-probs for the old policy's."""
        mask = batch.mask & ~self.is_stale(batch).unsqueeze(1)
        log_weight = sampled(logprobs.detach().to(batch.rollout_logprobs.dtype) - batch.rollout_logprobs, mask)
        if mask.any():
            # GSPO's gate is 3e-4 wide: what counts is the gap in the algorithm's own ratio against a tenth of it.
            seen = self.algorithm.ratio(log_weight, mask)
            self._judge(float((seen.abs() * mask).sum() / mask.sum()), relied=relied)
        gap = mismatch(log_weight, mask)
        if gap is not None and self._max_gap is not None:
            self._check_gap(gap, self._max_gap)
        return gap

    def _judge(self, seen: float, *, relied: bool) -> None:
        """Trust a sampler whose log-ratios are small beside the gate; one that ceases to be so never again."""
        limit = gate_width(self.algorithm) / 10
        if relied and not seen < limit:
            self._lost_trust = True
            self.guard.tell(
                "sampler_gap",
                f"the sampler's log-probs, which were taken for the old policy's, are {seen:.2g} from the policy's in "
                f"the ratio, above {limit:.2g}, a tenth of the gate's width: from the next step on they are computed",
            )
        self.trusts_sampler = seen < limit and not self._lost_trust

    def _check_gap(self, gap: MismatchStats, limit: float) -> None:
        """Check every step's gap: the first may end the run, a later one is reported when it appears."""
        if not self._gap_passed:
            self._gap_passed = check_gap(gap, limit, self.model) is None
            return
        line = late_gap(gap, limit)
        if line is not None and not self._gap_is_late:
            self.guard.tell("sampler_gap", line)
        self._gap_is_late = line is not None
        if line is not None:
            self.trusts_sampler, self._lost_trust = False, True

    # The updates

    def updates(self, batch: Batch) -> Iterator[Update]:
        """Train on a step's rows: epochs × minibatches of whole groups, shuffled."""
        is_silent = not (batch.advantages * batch.mask).any()
        first = partial(with_drift, partial(self.update, fresh=True, is_silent=is_silent), self.policy, self.passes)
        later = partial(self.update, fresh=False, is_silent=is_silent)
        return self._each_minibatch(batch, lambda rows, number: (later if number else first)(rows))

    def value_updates(self, batch: Batch) -> Iterator[Update]:
        """The same for the value model alone, on what completions really earned; the policy stays as it is."""
        return self._each_minibatch(batch, lambda rows, _: self.update_value(rows))

    def update(self, batch: Batch, *, fresh: bool, is_silent: bool = False) -> Update:
        """One optimizer update, exact over any split into micro-batches; none where a number is not finite, or where
        nothing takes part: no token that is not rejected, or in a silent step, in which no row has an advantage."""
        if (unread := self.guard.skip_if_not_finite(batch)) is not None:
            return unread
        result = self._gradient(batch, lambda passes: self.gradients.of_update(passes, batch, self.own_rows(batch)))
        if fresh:
            check_agreement(result.agreements)
        with phase("the sampler's gap"):
            gap = self._first_gap(batch, result) if fresh and result.parts else None  # first: it may stop the run
        with phase("optimizer"):
            update = self.guard.apply(batch, result, is_silent=is_silent)
        update = replace(update, version=self.version, first_gap=gap)
        self.policy.version += update.skipped is None
        old = old_logprobs(batch, self.own_rows(batch), update.logprobs)  # not known of a dead row that was not run
        return replace(update, old_logprobs=torch.where(old.isnan(), batch.old_logprobs, old))

    def update_value(self, batch: Batch) -> Update:
        """One update of the value model's own parameters."""
        if (unread := self.guard.skip_if_not_finite(batch)) is not None:
            return unread
        result = self._gradient(batch, lambda passes: self.gradients.of_values(passes, batch))
        with phase("optimizer"):
            return self.guard.apply(batch, result)

    def _gradient(self, batch: Batch, work: Callable[[Passes], GradientPass]) -> GradientPass:
        """A gradient that is ready to be applied: computed in passes that fit into memory, in numbers that fit into
        the model's precision."""
        while True:
            self.passes, result = self.guard.retry_on_oom(self.passes, batch, work)
            if not self.policy.overflowed():
                return result

    def set_numbers(
        self,
        algorithm: Algorithm,
        options: LearnerOptions,
        *,
        temperature: float,
        value_learning_rate: float | None = None,
    ) -> None:
        """Train on with other numbers: of the same pieces, and of options that no schedule leaves as they were."""
        self.algorithm, self.options, self.guard.options = algorithm, options, options
        self.passes = replace(self.passes, temperature=temperature)
        self.rates = (options.learning_rate, value_learning_rate or VALUE_PACE * options.learning_rate)
        self.gradients.take(algorithm)
        shape, before = algorithm.kl_reward, self.kl_reward
        if shape is not None and before is not None and ShapeTraits.read(shape).controller is not None:
            shape = replace(shape, coefficient=before.coefficient)  # which the controller moves
        self.kl_reward = shape

    def set_learning_rate(self, step: int, *, policy_step: int | None = None) -> float:
        """Set the learning rates of a step; returns the policy's, which starts later where values are pre-trained.
        Steps are indices, counted from 0."""
        start = step if policy_step is None else policy_step
        rates = [
            rate * self._share(since, later=step - since) for rate, since in zip(self.rates, (start, step), strict=True)
        ]
        self.policy.set_rates(*rates)
        return rates[POLICY]

    def _share(self, index: int, *, later: int) -> float:
        """The share of a peak learning rate after `index` steps, of parameters that start that much later."""
        schedule, warmup = self.options.learning_rate_schedule, self.options.warmup_steps
        steps = None if self._steps is None else self._steps - later
        if steps is not None and schedule != "constant":
            warmup = min(warmup, steps // 2)
        return rate_share(schedule, index, warmup=warmup, steps=steps)

    def own_rows(self, rows: Batch) -> Bool[Tensor, " B"]:
        """Rows whose ratios are measured against their own log-probs of the update's pass: with a single update, the
        policy that sampled fresh rows is the policy itself."""
        return ~self.is_stale(rows) & (self.options.updates == 1)

    def _first_gap(self, batch: Batch, result: GradientPass) -> MismatchStats | None:
        index = torch.cat([index for index, _ in result.parts])
        logprobs, relied = torch.cat([each for _, each in result.parts]), not self.needs_old_pass()
        return self.measure_gap(batch.rows(index), logprobs.cpu(), relied=relied and not self._is_on_policy)

    # Rows and parts

    def _each_minibatch(self, batch: Batch, update: Callable[[Batch, int], Update]) -> Iterator[Update]:
        for number in range(self.options.epochs):
            for part, index in enumerate(minibatches(batch, self.options, self.shuffle)):
                yield replace(update(batch.rows(index), number + part), rows=index)

    # State

    def state(self) -> PartState:
        """State that is small and changes from step to step; the policy's has weights and moments: `Policy.tensors`."""
        values = {
            "policy": self.policy.state(),
            "sampled_version": self.sampled_version,
            "trusts_sampler": self.trusts_sampler,
            "lost_trust": self._lost_trust,
            "gap": [self._gap_passed, self._gap_is_late],
            "kl_coefficient": ShapeTraits.read(self.kl_reward).coefficient,
            "token_budget": self.passes.token_budget,
            "is_planned": self.passes.is_planned,
            "checkpointed": self.passes.checkpointed,
            "offloaded": self.passes.offloaded,
            "guard": self.guard.state(),
        }
        return PartState(values, {"shuffle": self.shuffle.get_state()})

    def load(self, state: PartState) -> None:
        """Bring back what `state` gave, but for the policy, which loads its own."""
        values = state.values
        self.sampled_version, self.trusts_sampler = values["sampled_version"], values["trusts_sampler"]
        self._lost_trust = values.get("lost_trust", False)  # which earlier versions did not have
        self._gap_passed, self._gap_is_late = values.get("gap", (False, False))
        coefficient = values["kl_coefficient"]
        if self.kl_reward is not None and coefficient not in (None, ShapeTraits.read(self.kl_reward).coefficient):
            self.kl_reward = replace(self.kl_reward, coefficient=coefficient)
        self.guard.load(values["guard"])
        self.shuffle.set_state(state.tensors["shuffle"])
        if self.options.token_budget is None:
            planned = {name: values[name] for name in ("token_budget", "is_planned")}
            self.passes = replace(self.passes, **planned)
        layers, offloaded = values["checkpointed"], values.get("offloaded", False)
        layers = checkpointable_layers(self._models) if layers is True else layers  # True: layers were not counted yet
        self.passes = replace(self.passes, checkpointed=int(layers), offloaded=offloaded)
        checkpoint_models(self._models, self.passes)
        self.passes = self.passes.with_token_limit(self.guard.max_tokens)
