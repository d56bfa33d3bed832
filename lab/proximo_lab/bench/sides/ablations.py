"""Our side with one of its techniques switched off, to measure what each is worth."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from proximo.learner.learner import Learner
from proximo.learner.passes import Passes
from proximo.models import Scores, score_rows
from proximo.models.compiling import allow_compiling, compiles
from proximo.models.model_types import PreTrainedModel
from proximo.samplers.embedded import EmbeddedSampler
from proximo.types import Grade, Group
from proximo.types.batches import Batch
from proximo_lab.bench.session import Turn
from proximo_lab.bench.sides.ours import Ours

PADDED_TOKENS = 16384
"""Tokens per forward pass without packing."""
SWITCHES = {"prefixes read once": "shared_prefix", "CUDA graphs": "graphs"}
"""Switches of the sampler, by description."""


def rollouts_without(ours: Ours) -> list[Turn]:
    """Rollouts of `ours` and of variants on the same weights."""
    known = inspect.signature(EmbeddedSampler).parameters
    turns = [
        Turn(f"without {what}", replace(ours, switches={switch: False}, policy=ours.model).rollout)
        for what, switch in SWITCHES.items()
        if switch in known
    ]
    plain = replace(ours, policy=ours.model)
    return [*turns, *_compiled_off(ours, plain.rollout)]


def training_without(ours: Ours) -> list[Turn]:
    """Training turns with one learner for all: the optimizer's state does not affect times."""
    # A group without advantages is skipped; half of them are, so the time should halve.
    dead = tuple(_levelled(group) if number % 2 else group for number, group in enumerate(ours.fixed_groups))
    return [
        Turn("without shared prompts", lambda: ours.training(apart=True)),
        Turn("without packing", _with_passes(ours, padded_passes(ours.learner))),
        *_compiled_off(ours, ours.training),
        Turn("with half of the groups dead", lambda: ours.training(dead)),
    ]


def _levelled(group: Group) -> Group:
    return replace(group, rollouts=tuple(replace(rollout, grade=Grade(0.5)) for rollout in group.rollouts))


def _compiled_off(ours: Ours, turn: Callable[[], Mapping[str, float]]) -> list[Turn]:
    return [Turn("without compiled layers", _uncompiled(ours, turn))] if compiles(ours.model) else []


def _uncompiled(ours: Ours, turn: Callable[[], Mapping[str, float]]) -> Callable[[], Mapping[str, float]]:
    def without() -> Mapping[str, float]:
        allow_compiling(ours.model, False)
        try:
            return turn()
        finally:
            allow_compiling(ours.model, True)

    return without


def _with_passes(ours: Ours, passes: Passes) -> Callable[[], Mapping[str, float]]:
    def without() -> Mapping[str, float]:
        with _swapped(ours.learner, passes):
            return ours.training()

    return without


@contextmanager
def _swapped(learner: Learner, passes: Passes) -> Iterator[None]:
    before, learner.passes = learner.passes, passes
    try:
        yield
    finally:
        learner.passes = before


class PaddedPasses(Passes):
    """Every completion with its own copy of its prompt, padded to the longest, as in most trainers."""

    def parts(self, batch: Batch) -> Iterator[Tensor]:
        width = max(map(len, batch.prompts)) + int(batch.lengths.max())
        return iter(torch.arange(len(batch)).split(max(1, PADDED_TOKENS // width)))

    def scores(
        self, model: PreTrainedModel, rows: Batch, *, record: bool = False, until: ExitStack | None = None
    ) -> Scores:
        return score_rows(model, rows, temperature=self.temperature, layout="padded")


def padded_passes(learner: Learner) -> PaddedPasses:
    return PaddedPasses(**vars(learner.passes))
