"""Steps made of tensors, written through the loop's writer and read back: every number of them is known."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proximo.algorithms import Algorithm
from proximo.insight.lens.layout import TokenLayout
from proximo.insight.lens.lens import look
from proximo.insight.lens.steps import StoredStep, read_step
from proximo.learner.guard import Skipped, Update
from proximo.losses.pieces.ratios import CurrentPolicy
from proximo.models import tiny_tokenizer
from proximo.models.tokens.spelling import Spelling
from proximo.rl.config import RunConfig, TrainingOptions
from proximo.runs.rollouts import rollout_table, write_rollouts
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Completion, Grade, Group, Problem, Rollout
from proximo.types.batches import Batch, Stats
from tests import fixture

SPELLING = Spelling(tiny_tokenizer())
FIRST = 5
"""The id of "0"."""


def config(algorithm: Algorithm, **changes: Any) -> RunConfig:
    """Of a run that this algorithm allows."""
    updates = 1 if isinstance(algorithm.anchor, CurrentPolicy) else 4
    small = RunConfig(
        algorithm=algorithm,
        sampling=SamplingOptions(max_tokens=16),
        training=TrainingOptions(groups=4, group_size=4, minibatches=updates),
    )
    return replace(small, **changes)


def batch_of(mask: Tensor, group: Tensor, rewards: Tensor, **tensors: Any) -> Batch:
    """Rows that are sampled from their first token to their last; what is not given is 0."""
    lengths = mask.sum(dim=1)
    blank = torch.zeros(mask.shape)
    tokens = torch.where(mask, FIRST + torch.arange(mask.shape[1]) % 10, 0)
    sibling = torch.tensor([int((group[:row] == number).sum()) for row, number in enumerate(group.tolist())])
    truncated = tensors.pop("truncated", torch.zeros(len(mask), dtype=torch.bool))
    outcome = tensors.pop("outcome", rewards)
    said = [tuple(row[: int(length)].tolist()) for row, length in zip(tokens, lengths, strict=True)]
    groups = tuple(
        Group(
            Problem(f"p-{number}", f"{number}=", str(number)),
            (FIRST + number % 10,),
            tuple(
                Rollout(
                    Completion(said[row], (0.0,) * len(said[row]), "".join(SPELLING(said[row])), "stop"),
                    Grade(float(outcome[row]), {"task": float(outcome[row])}),
                )
                for row in (group == number).nonzero().squeeze(1).tolist()
            ),
        )
        for number in range(int(group.max()) + 1)
    )
    given: dict[str, Any] = {"rollout_logprobs": blank, "old_logprobs": blank, "advantages": blank} | tensors
    return Batch(
        prompts=tuple(each.prompt_tokens for each in groups),
        tokens=tokens,
        lengths=lengths,
        sampled=mask,
        mask=mask,
        group=group,
        outcome=outcome,
        rewards=rewards,
        truncated=truncated,
        version=torch.zeros(len(mask), dtype=torch.long),
        groups=groups,
        sibling=sibling,
        **given,
    )


def update(rows: Sequence[int], logprobs: Tensor, *, skipped: str | None = None, **more: Any) -> Update:
    """Of some of the rows that train; the log-probs are those rows'."""
    index = torch.tensor(rows)
    return Update(
        stats=more.pop("stats", Stats()),
        gradient_norm=1.0,
        value_gradient_norm=None,
        first_gap=None,
        rows=index,
        logprobs=logprobs,
        old_logprobs=logprobs,
        entropy=more.pop("entropy", -logprobs),
        skipped=None if skipped is None else Skipped(skipped, index),
        **more,
    )


def stored(
    folder: Path,
    batch: Batch,
    updates: Sequence[Update],
    *,
    trained: Sequence[int] | None = None,
    kept_groups: int | None = None,
    value_only: bool = False,
) -> StoredStep:
    """Written and read."""
    table = rollout_table(
        batch,
        SPELLING,
        trained=torch.arange(len(batch)) if trained is None else torch.tensor(trained, dtype=torch.long),
        kept_groups=len(batch.prompts) if kept_groups is None else kept_groups,
        updates=updates,
        value_only=value_only,
    )
    path = folder / "step-000000.parquet"
    write_rollouts(table, path)
    return read_step(path, 0)


def padded(layout: TokenLayout, tokens: Tensor, filler: int = 0) -> Tensor:
    """[B, T], as the tests have their numbers."""
    return layout.padded(tokens, torch.arange(len(layout.lengths)), filler)


@dataclass(frozen=True)
class RowsSeen:
    """What `look` sees, as [B, T]."""

    notes: tuple[str, ...]
    state: Tensor
    advantages: Tensor
    weights: Tensor
    token_ratio: Tensor
    ratio: Tensor
    through: Tensor
    gradient: Tensor
    kl_gradient: Tensor
    correction: Tensor
    blocked: Tensor
    takes_part: Tensor
    losses: dict[int, float]


def rows_seen(step: StoredStep, algorithm: Algorithm, settings: RunConfig, **more: Any) -> RowsSeen:
    seen = look(step, algorithm, settings, **more)
    ones = {"token_ratio", "ratio", "through", "correction"}

    def shown(name: str) -> Any:
        value = getattr(seen, name)
        return padded(seen.layout, value, int(name in ones)) if isinstance(value, Tensor) else value

    return RowsSeen(**{each.name: shown(each.name) for each in fields(RowsSeen)})


def fixture_batch(**changes: Any) -> Batch:
    """The rows of tests/fixture.py."""
    given = {
        "old_logprobs": fixture.OLD,
        "rollout_logprobs": fixture.ROLLOUT,
        "ref_logprobs": fixture.REF,
        "advantages": fixture.ADVANTAGES.contiguous(),
    }
    return batch_of(fixture.MASK, fixture.GROUP, fixture.REWARDS, **(given | changes))


def fixture_step(folder: Path, log_ratio: Tensor = fixture.LOG_RATIO, **changes: Any) -> StoredStep:
    """In one update that sees `log_ratio`."""
    batch = fixture_batch(**changes)
    return stored(folder, batch, [update(range(4), batch.old_logprobs + log_ratio)])
