"""Guard of what is applied: an update of finite numbers, not out of all proportion, in passes that fit into memory.

Not finite: one number among the tensors that an update reads (where the mask is set), the statistics it gives or its
gradient is enough, and weights and optimizer stay as they are, bit for bit. A spike: a gradient that is many times the
median of those before it. What is not applied does not enter that median, nor does a gradient of 0.
"""

import gc
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from proximo.learner.memory import checkpoint_models, checkpointable_layers, difference, smaller_passes
from proximo.learner.optimizer import POLICY, VALUE
from proximo.learner.options import LearnerOptions
from proximo.learner.passes import OldScores, Passes
from proximo.learner.policy import Policy
from proximo.losses.diagnostics import MismatchStats
from proximo.models.model_types import PreTrainedModel
from proximo.models.out_of_memory import explaining_memory, first_line, is_out_of_memory
from proximo.types.batches import Batch, Stats
from proximo.types.tensor_types import Float, Int

WINDOW = 64
"""Number of gradient norms that the median is taken of."""
MIN_NORMS = 16
"""Minimum number of norms for a median: the first updates of a run differ for good reasons."""
REPORT_ABOVE = 100.0
"""Times the median from which on a gradient is reported, where none is skipped."""
CHECKED_FIELDS = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "returns")
"""Fields that an update reads at the tokens it trains on."""

Parts = list[tuple[Tensor, Tensor]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Notice:
    """Notice of what happened to a run, and what to do about it."""

    kind: str
    message: str


@dataclass(frozen=True)
class Skipped:
    """Record of an update that was not applied."""

    reason: str
    rows: Int[Tensor, " K"]
    """Rows of the update with a number that is not finite, or all rows if it is in none of them."""
    parameters: tuple[str, ...] = ()
    """Parameters whose gradients are not finite."""


@dataclass(frozen=True)
class Update:
    """Record of one optimizer update."""

    stats: Stats
    gradient_norm: float
    """Gradient norm of the policy's parameters, before clipping."""
    value_gradient_norm: float | None
    """Gradient norm of the value model's own parameters; None without one."""
    first_gap: MismatchStats | None
    """Gap of the sampler, on this update's rows, known where the policy had not been updated since sampling."""
    rows: Int[Tensor, " M"]
    """Row numbers in the step's batch."""
    logprobs: Float[Tensor, "M T"]
    """Log-probs under the policy just before the update; NaN for dead rows that were skipped."""
    old_logprobs: Float[Tensor, "M T"]
    """Log-probs that the update's ratios were measured against."""
    entropy: Float[Tensor, "M T"]
    """Entropy of the distributions that those tokens were judged by, in the same way."""
    skipped: Skipped | None = None
    """Reason why the update was skipped. None: it was applied."""
    version: int = 0
    """Number of updates applied before this one."""
    is_idle: bool = False
    """True if nothing took part, so that weights and optimizer are as they were: a step of AdamW would move them by
    the momentum of earlier updates."""


@dataclass(frozen=True)
class GradientPass:
    """Results of the passes of an update; its gradient lies with the parameters."""

    stats: Stats = field(default_factory=Stats)
    parts: Parts = field(default_factory=list)
    """Rows that were run, and their log-probs."""
    entropies: Parts = field(default_factory=list)
    agreements: Sequence[Any] = ()
    before: OldScores | None = None
    """Scores of all rows, dead ones too, where the update first asked for them without a gradient, to choose tokens."""
    piece_at_fault: Callable[[], str | None] | None = None
    """Says which piece returned a number that is not finite, if one did; asked where the log-probs are finite."""


def _of_all(parts: Parts, batch: Batch, before: Tensor | None) -> Float[Tensor, "M T"]:
    """Numbers that are known of some rows, among all; NaN where one was not run."""
    known = torch.full_like(batch.old_logprobs, torch.nan) if before is None else before.clone()
    if parts:  # in one transfer: each waits for the device
        index, values = (torch.cat(each) for each in zip(*parts, strict=True))
        known[index] = values.to(known.dtype).cpu()
    return known


class UpdateGuard:
    """Applies a learner's updates, or skips them."""

    def __init__(self, options: LearnerOptions, policy: Policy, models: Sequence[PreTrainedModel]) -> None:
        """`models` are those of a pass with gradient: the policy's, and a value model of its own."""
        self.options, self._policy, self._models = options, policy, models
        self._windows: dict[int, deque[float]] = {}
        """The last gradient norms of each group of parameters."""
        self._in_spell = False
        """True if the last update was a spike that has been reported."""
        self.in_a_row = 0
        """Updates skipped since the last that was applied."""
        self.max_tokens: int | None = None
        """In one pass, whatever is planned: more did not fit into memory."""
        self._notices: list[Notice] = []
        self._piece: str | None = None
        """What is wrong with which piece, if that is why the last skipped update was skipped."""

    # One update

    def skip_if_not_finite(self, batch: Batch) -> Update | None:
        """The skipped update of a batch that is not to be read: a loss would bound some of its numbers and go on."""
        for name in CHECKED_FIELDS:
            tensor = getattr(batch, name)
            if tensor is not None and (at_fault := (~tensor.isfinite() & batch.mask).any(dim=1)).any():
                skipped = self._skip(f"{name} holds a number that is not finite", at_fault)
                return self._update(batch, GradientPass(), [math.nan, math.nan], skipped)
        return None

    def retry_on_oom(
        self, passes: Passes, batch: Batch, work: Callable[[Passes], Result], *, with_gradient: bool = True
    ) -> tuple[Passes, Result]:
        """Do work in passes over a batch, again in smaller ones for as long as memory runs out. The last passes, from
        which later work starts, and the result."""
        passes = passes.with_token_limit(self.max_tokens)
        while True:
            try:
                return passes, work(passes)
            except (RuntimeError, MemoryError) as error:
                if not (is_out_of_memory(error) and self._policy.can_retry):
                    raise
                failure = first_line(error)
            # Not in the clause above: while an error is handled, the frames it went through keep their tensors.
            self._policy.zero_grad()  # for their memory: an update begins without gradients anyway
            layers = checkpointable_layers(self._models) if with_gradient else 0
            passes = self._smaller(passes, batch, layers, failure)
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def apply(self, batch: Batch, result: GradientPass, *, is_silent: bool = False) -> Update:
        """Each group of parameters is clipped apart: the value model's gradient must not shrink the policy's step.
        `is_silent`: no row of the whole step has an advantage."""
        skipped: list[Skipped | None] = []

        def is_idle(norms: list[float]) -> bool:
            return not any(norms) and (is_silent or result.stats.floats().get("rejected") == 1)

        def accepts(norms: list[float]) -> bool:
            skipped.append(self._refused(batch, result, norms))
            return skipped[0] is None and not is_idle(norms)

        with explaining_memory("the optimizer's own numbers do not fit; use a smaller model, or more memory"):
            norms = self._policy.apply(self.options.max_gradient_norm, accepts)
        return replace(self._update(batch, result, norms, skipped[0]), is_idle=is_idle(norms))

    def _update(self, batch: Batch, result: GradientPass, norms: Sequence[float], skipped: Skipped | None) -> Update:
        value_norm = norms[VALUE] if self._policy.trains_values else None
        before = result.before
        logprobs = _of_all(result.parts, batch, before and before.logprobs)
        entropy = _of_all(result.entropies, batch, before and before.entropy)
        return Update(
            stats=result.stats,
            gradient_norm=norms[POLICY],
            value_gradient_norm=value_norm,
            first_gap=None,
            rows=torch.arange(len(batch)),
            logprobs=logprobs,
            old_logprobs=batch.old_logprobs,
            entropy=entropy,
            skipped=skipped,
        )

    def _refused(self, batch: Batch, result: GradientPass, norms: Sequence[float]) -> Skipped | None:
        """Reason not to apply a gradient; None if it can be applied."""
        broken = [name for name, value in result.stats.floats().items() if not math.isfinite(value)]
        if broken or not all(map(math.isfinite, norms)):
            names = self._policy.nonfinite_gradients()
            where = [*broken, *(["the gradient"] if names or not broken else [])]
            at_fault = torch.zeros(len(batch), dtype=torch.bool)
            for index, logprobs in result.parts:
                at_fault[index] = (~logprobs.isfinite().cpu() & batch.mask[index]).any(dim=1)
            reason = f"not finite: {', '.join(where[:4])}"
            piece = None if at_fault.any() or result.piece_at_fault is None else result.piece_at_fault()
            if piece is not None:
                reason += f"; {piece}, and the policy's log-probs are finite"
            return self._skip(reason, at_fault, names, piece)
        if (skipped := self._spiked(batch, norms)) is not None:
            return skipped
        self.in_a_row = 0
        return None

    def _spiked(self, batch: Batch, norms: Sequence[float]) -> Skipped | None:
        sizes = [(norm, self._times(group, norm)) for group, norm in enumerate(norms)]
        norm, times = max(sizes, key=lambda size: size[1])
        if times <= (self.options.skip_spikes or REPORT_ABOVE):
            for group, each in enumerate(norms):
                if each > 0:
                    self._windows.setdefault(group, deque(maxlen=WINDOW)).append(each)
            self._in_spell = False
            return None
        what = f"the gradient's norm is {norm:.3g}, {times:.3g} times the median of the last updates'"
        if self.options.skip_spikes is not None:
            return self._skip(what, torch.ones(len(batch), dtype=torch.bool))
        if not self._in_spell:
            self._notices.append(
                Notice("spike", f"{what}; it was clipped and applied. training.skip_spikes leaves such updates out")
            )
        self._in_spell = True
        return None

    def _times(self, group: int, norm: float) -> float:
        """Ratio of a norm to the median of its group's; 0 where that is not known yet."""
        window = self._windows.get(group, ())
        return norm / statistics.median(window) if len(window) >= MIN_NORMS else 0.0

    def _skip(
        self, reason: str, at_fault: Tensor, parameters: tuple[str, ...] = (), piece: str | None = None
    ) -> Skipped:
        self.in_a_row, self._piece = self.in_a_row + 1, piece
        rows = at_fault if at_fault.any() else torch.ones_like(at_fault)
        return Skipped(reason, rows.nonzero().squeeze(1), parameters)

    # A run

    def _smaller(self, passes: Passes, batch: Batch, layers: int, failure: str) -> Passes:
        """Passes that take less memory, after one ran out of it, for all work from now on."""
        smaller = smaller_passes(passes, batch, layers)
        if smaller is None:
            kept = ", with all layers checkpointed and offloaded" if passes.offloaded else ""
            raise ValueError(
                f"out of memory in a pass over a single completion and its prompt ({failure}){kept}: it cannot be "
                "split; use a smaller sampling.max_tokens, a smaller model, or a machine with more memory"
            )
        if smaller.token_budget < passes.token_budget:
            self.max_tokens = smaller.token_budget
        checkpoint_models(self._models, smaller)
        self._notices.append(
            Notice(
                "out_of_memory",
                f"a pass of {passes.token_budget} tokens ran out of memory ({failure}); it was done again with the "
                f"same result: {difference(passes, smaller, layers)}",
            )
        )
        return smaller

    def tell(self, kind: str, message: str) -> None:
        """Add a notice for the run."""
        self._notices.append(Notice(kind, message))

    def take_notices(self) -> list[Notice]:
        """Notices since the last time."""
        taken, self._notices = self._notices, []
        return taken

    def check(self) -> None:
        """To be called when a step has been written down: too many skipped updates in a row end the run."""
        if (complaint := self.complaint) is not None:
            raise ValueError(complaint)

    @property
    def complaint(self) -> str | None:
        """Message that too many updates in a row were skipped, and what to do; None if they were not."""
        limit = self.options.max_skipped
        if self.in_a_row < limit:
            return None
        remedy = (
            "Lower training.learning_rate, look at the rewards for huge values, or go back to an earlier checkpoint"
        )
        if self._piece is not None:
            remedy = f"Correct the piece: {self._piece}"
        return (
            f"{self.in_a_row} updates in a row were skipped (training.max_skipped is {limit}): "
            f"their rows are in the run's folder under evidence. {remedy}"
        )

    def state(self) -> dict[str, Any]:
        """State of plain numbers, for a checkpoint."""
        return {
            "windows": {str(group): list(window) for group, window in self._windows.items()},
            "in_spell": self._in_spell,
            "in_a_row": self.in_a_row,
            "max_tokens": self.max_tokens,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._windows = {int(group): deque(window, maxlen=WINDOW) for group, window in state["windows"].items()}
        self._in_spell, self.in_a_row, self.max_tokens = state["in_spell"], state["in_a_row"], state["max_tokens"]
