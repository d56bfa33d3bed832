"""Effects of a step on a mixture of experts: its routes, token ratios and sequence ratios, before and after."""

from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from proximo.insight.lens.steps import read_step
from proximo.learner.learner import Learner
from proximo.models import frozen_copy, score
from proximo.rl.progress import ProgressLines
from proximo.runs.log import ROLLOUTS, RunLog
from proximo.types.batches import Batch


class Quiet(ProgressLines):
    def _say(self, line: str) -> None:
        """Prints nothing: many runs share one terminal."""


class Watched(RunLog):
    """A log that keeps the step's batch and the norms of its updates, to be measured afterwards."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.batch: Batch | None = None
        self.norms: list[float] = []
        self.row: dict[str, float] = {}

    def rollouts(self, step: int, table: pa.Table) -> None:
        super().rollouts(step, table)
        stored = read_step(self.folder / ROLLOUTS / f"step-{step:06d}.parquet", step)
        trained = (stored.updates >= 0).any(dim=0).nonzero().squeeze(1)
        self.batch = stored.batch.rows(trained)
        self.norms = [update["gradient_norm"] for update in stored.metadata["updates"]]

    def metrics(self, step: int, values) -> None:
        super().metrics(step, values)
        self.row = dict(values)


class AfterFirst:
    """Keeps a copy of the policy as it is after the first update of each step."""

    def __init__(self, learner: Learner) -> None:
        self.model = None
        plain = learner.update

        def update(batch: Batch, *, fresh: bool, is_silent: bool = False):
            done = plain(batch, fresh=fresh, is_silent=is_silent)
            if fresh:
                self.model = frozen_copy(learner.model)
            return done

        learner.update = update


@torch.no_grad()
def moved(before, first, after, batch: Batch | None) -> dict[str, float]:
    """Measure what a step's updates did to its own completions, all under native routing but where it says replayed.

    `experts_first` is the unit of GSPO's paper: the share of the chosen experts that are others after one update.
    `experts_step` is the same after all updates of the step; `tokens_step` is the share of tokens with at least one
    other expert in any layer, which is larger by construction.
    """
    if batch is None or not len(batch):
        return {}
    rows = {"prompts": batch.prompts, "tokens": batch.tokens, "lengths": batch.lengths, "group": batch.group}
    old, one, new = (score(model, **rows, record=True) for model in (before, first, after))
    assert old.routes is not None
    assert one.routes is not None
    assert new.routes is not None
    consumed = (old.routes.rows >= 0).all(dim=-1).all(dim=-1)
    first_differing = other_experts(old.routes.rows, one.routes.rows)[consumed]
    differing = other_experts(old.routes.rows, new.routes.rows)[consumed]
    replayed = score(after, **rows, routes=old.routes).logprobs
    log_ratio = (new.logprobs - old.logprobs).double() * batch.mask
    tokens = log_ratio[batch.mask]
    sequences = log_ratio.sum(dim=1) / batch.lengths
    return {
        "experts_first": float(first_differing.mean()),
        "experts_step": float(differing.mean()),
        "tokens_step": float((differing > 0).any(dim=-1).double().mean()),
        "token_spread": float(tokens.std()),
        "token_spread_replayed": float((replayed - old.logprobs).double()[batch.mask].std()),
        "sequence_spread": float(sequences.std()),
        "token_beyond": float(((tokens.exp() - 1).abs() > 0.2).double().mean()),
    }


def other_experts(old: Tensor, new: Tensor) -> Tensor:
    """[…, layers]: of the experts that each layer chose before, the share that it does not choose any more."""
    kept = (old.unsqueeze(-1) == new.unsqueeze(-2)).any(dim=-1)
    return 1 - kept.double().mean(dim=-1)
