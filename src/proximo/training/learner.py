"""The learner: scores completions and updates the policy. It knows no task, no sampler and no file."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from proximo.algorithms import Algorithm
from proximo.maths.arithmetic import sampled
from proximo.maths.extras import EntropyBonus, ValueLoss
from proximo.maths.gates import Clip
from proximo.maths.objective import Plan, plan_step, policy_loss
from proximo.maths.ratios import CurrentPolicy
from proximo.maths.rows import rows_of
from proximo.maths.weights import TokenMean
from proximo.models import Scores, micro_batches, score
from proximo.shapes import Bool, Float, Int
from proximo.training.config import TrainingOptions
from proximo.types import Batch, Stats


@dataclass(frozen=True)
class OldScores:
    """What the policy thought before the first update."""

    logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"] | None
    """None without a value head."""


@dataclass(frozen=True)
class Update:
    """What one optimizer update did."""

    stats: Stats
    gradient_norm: float
    first_gap: float | None
    """Sampler gap on this update's rows, known where the policy had not been updated since sampling."""
    rows: Int[Tensor, " M"]
    """Of the step's batch."""
    logprobs: Float[Tensor, "M T"]
    """What the policy gave those rows just before the update; NaN where a dead row was skipped."""


class Learner:
    """A policy, its optimizer, and where the algorithm asks for them a reference and a value head."""

    def __init__(
        self, model: PreTrainedModel, algorithm: Algorithm, options: TrainingOptions, *, temperature: float, seed: int
    ) -> None:
        self.model = model
        self.algorithm = algorithm
        self.options = options
        self.temperature = temperature
        self.reference = frozen_copy(model) if algorithm.needs_reference else None
        self.value_head = value_head(model) if algorithm.advantage.needs_values else None
        self.optimizer = torch.optim.AdamW(
            self.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay, betas=(0.9, 0.95)
        )
        self.version = 0
        self.sampled_version = 0
        """The version that sampled the step's fresh rows."""
        self.trusts_sampler = False
        """Whether the sampler's log-probs may stand for the old policy's; found out by measuring."""
        self._seed, self._shuffle = seed, torch.Generator().manual_seed(seed)

    def parameters(self) -> list[nn.Parameter]:
        parts = [self.model] if self.value_head is None else [self.model, self.value_head]
        return [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad]

    # Before the updates

    def needs_old_pass(self, algorithm: Algorithm) -> bool:
        """Not when the sampler's log-probs are trusted, nor when a single update makes every ratio 1."""
        if algorithm.advantage.needs_values or algorithm.correct is not None:
            return True
        on_policy = self.options.updates == 1 or isinstance(algorithm.anchor, CurrentPolicy)
        return not (self.trusts_sampler or on_policy)

    def old_scores(self, batch: Batch) -> OldScores:
        """Log-probs, entropy and values of the policy as it stands."""
        return self._without_gradient(self.model, batch)

    def reference_logprobs(self, batch: Batch) -> Float[Tensor, "B T"]:
        assert self.reference is not None
        return self._without_gradient(self.reference, batch).logprobs

    def reset_reference(self) -> None:
        """Iterative GRPO: from now on the policy is held near what it is today."""
        if self.reference is not None:
            self.reference = frozen_copy(self.model)

    def start_step(self) -> None:
        """From here on the policy differs from the one that sampled."""
        self.sampled_version = self.version

    def is_stale(self, batch: Batch) -> Bool[Tensor, " B"]:
        """Rows carried over from an earlier step: only their sampler knows the policy that said them."""
        return batch.version < self.sampled_version

    def measure_gap(self, batch: Batch, logprobs: Float[Tensor, "B T"]) -> float | None:
        """Mean |learner − sampler| over the fresh rows' tokens, None without any; decides whether to trust it."""
        mask = batch.mask & ~self.is_stale(batch).unsqueeze(1)
        if not mask.any():
            return None
        difference = logprobs.detach().to(batch.rollout_logprobs.dtype) - batch.rollout_logprobs
        # GSPO's gate is 3e-4 wide: what counts is the gap in the algorithm's own ratio against a tenth of the width.
        seen = self.algorithm.ratio(sampled(difference, mask), mask)
        self.trusts_sampler = bool((seen.abs() * mask).sum() / mask.sum() < gate_width(self.algorithm) / 10)
        return float((difference.abs() * mask).sum() / mask.sum())

    # The updates

    def updates(self, batch: Batch) -> Iterator[Update]:
        """Train on a step's rows: epochs × minibatches of whole groups, shuffled."""
        for epoch in range(self.options.epochs):
            for number, index in enumerate(self._minibatches(batch)):
                update = self.update(batch.rows(index), fresh=epoch == 0 and number == 0)
                yield replace(update, rows=index)

    def update(self, batch: Batch, *, fresh: bool) -> Update:
        """One optimizer update, exact over any split into micro-batches."""
        plan, value_weights = self._plan(batch), TokenMean()(batch.mask, batch.group)
        self.optimizer.zero_grad(set_to_none=True)
        stats, first_logprobs = Stats(), []
        trained = self._rows_with_gradient(batch)
        for part in self._micro_batches(batch.rows(trained)):
            index = trained[part]
            rows = batch.rows(index)
            scores = self._score(self.model, rows)
            loss, part_stats = self._loss(rows, scores, plan.rows(index), value_weights[index])
            loss.backward()
            stats = stats + part_stats
            first_logprobs.append((index, scores.logprobs.detach()))
        if not first_logprobs:  # all rows dead: the gradient is 0, which is not no gradient to an optimizer
            for parameter in self.parameters():
                parameter.grad = torch.zeros_like(parameter)
        gap = self._first_gap(batch, first_logprobs) if fresh and first_logprobs else None
        norm = nn.utils.clip_grad_norm_(self.parameters(), self.options.max_gradient_norm)
        if norm.isfinite():  # else the weights stay as they are; the caller sees the norm
            self.optimizer.step()
        self.version += 1
        current = torch.full_like(batch.old_logprobs, torch.nan)
        for index, logprobs in first_logprobs:
            current[index] = logprobs.to(current.dtype)
        return Update(stats, float(norm), gap, torch.arange(len(batch)), current)

    def set_learning_rate(self, step: int) -> float:
        """Linear warm-up, then constant."""
        warmup = self.options.warmup_steps
        rate = self.options.learning_rate * (min(1.0, (step + 1) / warmup) if warmup else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _loss(
        self, rows: Batch, scores: Scores, plan: Plan, value_weights: Float[Tensor, "B T"]
    ) -> tuple[Tensor, Stats]:
        algorithm = self.algorithm
        old_logprobs = rows.old_logprobs
        if self.options.updates == 1:  # the policy that sampled is the policy itself
            own = scores.logprobs.detach().to(old_logprobs.dtype)
            old_logprobs = torch.where(self.is_stale(rows).unsqueeze(1), old_logprobs, own)
        loss, stats = policy_loss(
            algorithm,
            logprobs=scores.logprobs,
            old_logprobs=old_logprobs,
            advantages=rows.advantages,
            mask=rows.mask,
            group=rows.group,
            ref_logprobs=rows.ref_logprobs,
            rollout_logprobs=rows.rollout_logprobs,
            weights=plan,
            entropy=scores.entropy,
            outcome=rows.outcome,
        )
        for extra in algorithm.extras:
            if isinstance(extra, ValueLoss):
                assert rows.values is not None
                assert rows.returns is not None
                errors = extra(self._values(scores), rows.values, rows.returns.to(scores.logprobs.dtype))
                value_loss = (errors * value_weights.to(errors.dtype) * rows.mask).sum()
                loss = loss + extra.coefficient * value_loss
                stats = stats + Stats(totals={"value_loss": value_loss.detach()})
        return loss, stats

    def _plan(self, batch: Batch) -> Plan:
        """Weights over the whole update; a choice among all its tokens needs a pass without gradient first."""
        rows = rows_of(
            self.algorithm,
            logprobs=batch.old_logprobs,
            old_logprobs=batch.old_logprobs,
            advantages=batch.advantages,
            mask=batch.mask,
            group=batch.group,
            ref_logprobs=batch.ref_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            entropy=torch.zeros_like(batch.old_logprobs),
            outcome=batch.outcome,
        )
        select = self.algorithm.select
        if select is not None and select.step_wide:
            current = self._without_gradient(self.model, batch)
            rows = replace(rows, logprobs=current.logprobs, entropy=current.entropy)
        generator = torch.Generator().manual_seed(self._seed + self.version)
        return plan_step(self.algorithm, rows, generator)

    def _first_gap(self, batch: Batch, parts: list[tuple[Int[Tensor, " M"], Tensor]]) -> float | None:
        index = torch.cat([index for index, _ in parts])
        return self.measure_gap(batch.rows(index), torch.cat([logprobs for _, logprobs in parts]))

    # Rows and parts

    def _rows_with_gradient(self, batch: Batch) -> Int[Tensor, " M"]:
        """Rows of dead groups are skipped where nothing but the policy term could teach them."""
        others = self.algorithm.kl or self.algorithm.extras
        alive = (batch.advantages != 0).any(dim=1) & batch.mask.any(dim=1)
        return torch.arange(len(batch)) if others else alive.nonzero().squeeze(1)

    def _minibatches(self, batch: Batch) -> list[Int[Tensor, " M"]]:
        """Whole groups, shuffled, in minibatches no smaller than a full step's."""
        groups = batch.group.unique()
        order = groups[torch.randperm(len(groups), generator=self._shuffle)]
        size = max(1, self.options.groups // self.options.minibatches)
        count = min(self.options.minibatches, max(1, len(groups) // size))
        return [torch.isin(batch.group, part).nonzero().squeeze(1) for part in order.tensor_split(count) if len(part)]

    def _micro_batches(self, batch: Batch) -> list[Int[Tensor, " M"]]:
        parts = micro_batches(
            [len(prompt) for prompt in batch.prompts],
            batch.lengths.tolist(),
            batch.group.tolist(),
            self.options.token_budget,
        )
        return [torch.tensor(part) for part in parts]

    def _score(self, model: PreTrainedModel, batch: Batch) -> Scores:
        return score(
            model,
            prompts=batch.prompts,
            tokens=batch.tokens,
            lengths=batch.lengths,
            group=batch.group,
            temperature=self.temperature,
            entropy_gradient=any(isinstance(extra, EntropyBonus) for extra in self.algorithm.extras),
        )

    @torch.no_grad()
    def _without_gradient(self, model: PreTrainedModel, batch: Batch) -> OldScores:
        logprobs, entropy = torch.zeros_like(batch.rollout_logprobs), torch.zeros_like(batch.rollout_logprobs)
        values = torch.zeros_like(logprobs) if self.value_head is not None and model is self.model else None
        for index in self._micro_batches(batch):
            scores = self._score(model, batch.rows(index))
            logprobs[index], entropy[index] = scores.logprobs.to(logprobs.dtype), scores.entropy.to(entropy.dtype)
            if values is not None:
                values[index] = self._values(scores).to(values.dtype)
        return OldScores(logprobs, entropy, values)

    def _values(self, scores: Scores) -> Float[Tensor, "B T"]:
        """The value of the state before each completion token."""
        assert self.value_head is not None
        return scores.states.aligned(self.value_head(scores.states.flat).squeeze(1)).to(scores.logprobs.dtype)


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).requires_grad_(False).eval()


def value_head(model: PreTrainedModel) -> nn.Linear:
    """Starts at 0: the first advantages are returns, not noise."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def gate_width(algorithm: Algorithm) -> float:
    """The smallest log-ratio that matters to the gate; PPO's clip where the gate has no edge."""
    return min(algorithm.gate.low, algorithm.gate.high) if isinstance(algorithm.gate, Clip) else 0.2
