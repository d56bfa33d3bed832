"""However a pass is cut, the gradient is the same: whole groups, parts of them, checkpointed, offloaded, padded."""

import math
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from proximo.algorithms import GRPO, PPO
from proximo.learner.learner import Learner
from proximo.learner.memory import checkpoint_models
from proximo.learner.options import LearnerOptions
from proximo.learner.passes import Passes
from proximo.learner.policy import PlainPolicy
from proximo.losses import EntropyBonus, RouterBalance
from proximo.models import Scores, routing, score_rows, tiny_model
from proximo.models.routing import Routes
from proximo.models.values import OwnLayers, OwnModel, TrunkHead, value_model
from proximo.rl.assemble import assemble, to_batch
from proximo.types.batches import Batch
from tests.learner.test_moe import random_groups, small_moe, some, wide_moe
from tests.learner.test_values import stirred
from tests.models.test_scoring import exact, furthest
from tests.policies import plain

WHOLE, SPLIT = 10_000, 26
"""Tokens in a pass: both groups at once, and parts of each; a prompt and its completions have more than 26."""
LAYERS = 3
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
precisions = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)

WAYS = {
    "split": {"token_budget": SPLIT},
    "one layer checkpointed": {"checkpointed": 1},
    "offloaded": {"checkpointed": LAYERS, "offloaded": True},
    "all of it": {"token_budget": SPLIT, "checkpointed": 2, "offloaded": True},
}


class PaddedPasses(Passes):
    """The reference: transformers' own forward pass, each completion with its own copy of its prompt."""

    def scores(
        self, model: PreTrainedModel, rows: Batch, *, record: bool = False, until: ExitStack | None = None
    ) -> Scores:
        return score_rows(
            model,
            rows,
            temperature=self.temperature,
            entropy_gradient=self.entropy_gradient,
            routes=None if rows.routes is None else Routes(rows.prompt_routes, rows.routes),
            record=record,
            router_logits=self.router_logits,
            until=until,
            layout="padded",
        )


def dense(dtype: torch.dtype) -> PreTrainedModel:
    model = tiny_model(hidden=32, layers=LAYERS, heads=2, kv_heads=1, intermediate=64, seed=1)
    return exact(model.double()) if dtype == torch.float64 else model


def mixture(dtype: torch.dtype) -> PreTrainedModel:
    return wide_moe(layers=LAYERS) if dtype == torch.float64 else small_moe(seed=1, layers=LAYERS)


def wide_weights(logits: Tensor, chosen: Tensor, *, renormalise: bool) -> Tensor:
    """As `WideRouter` has them: replayed ones pass through float32 otherwise, as transformers' do."""
    weights = logits.softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True)


def learner(model: PreTrainedModel, algorithm=GRPO, form=None, replay=None) -> Learner:
    options = LearnerOptions(groups=2, minibatches=1, warmup_steps=0, max_gradient_norm=math.inf)
    value = form and stirred(value_model(form, model))
    return Learner(PlainPolicy(model), algorithm, options, temperature=0.8, seed=0, value=value, replay=replay)


def gradient(trainer: Learner, passes: Passes | None = None) -> list[Tensor]:
    """Of one update, from the old policy's pass on."""
    trainer.passes = passes or trainer.passes
    checkpoint_models(trainer._models, trainer.passes)
    trainer.update(assemble(random_groups(groups=2), [], trainer, 16).batch, fresh=True)
    parameters = [*plain(trainer).parameters().values(), *plain(trainer).value_parameters().values()]
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]


def check_all_ways(make, tolerance: float) -> None:
    """`make` gives a new learner each time, of the same weights."""
    whole, padded = gradient(make()), make()
    assert furthest(gradient(padded, PaddedPasses(**vars(padded.passes))), whole) < tolerance
    for name, changes in WAYS.items():
        trainer = make()
        assert furthest(gradient(trainer, replace(trainer.passes, **changes)), whole) < tolerance, name


def test_every_group_of_these_tests_is_split():
    batch = to_batch(random_groups(groups=2))
    parts = list(Passes(1.0, SPLIT).parts(batch))
    for number in batch.group.unique():
        assert sum(bool((batch.group[part] == number).any()) for part in parts) > 1
    assert len(list(Passes(1.0, WHOLE).parts(batch))) == 1


@pytest.mark.slow("computes many updates")
@precisions
def test_a_dense_policy(dtype):
    algorithm = replace(GRPO, extra=EntropyBonus(0.1))
    check_all_ways(lambda: learner(dense(dtype), algorithm), TOLERANCE[dtype])


@pytest.mark.slow("computes many updates")
@precisions
@pytest.mark.parametrize("replay", [None, "old_policy"])
def test_a_mixture_of_experts(dtype, replay, monkeypatch):
    if dtype == torch.float64:
        monkeypatch.setattr(routing, "gate_weights", wide_weights)
    algorithm = replace(GRPO, extra=RouterBalance(0.5))
    check_all_ways(lambda: learner(mixture(dtype), algorithm, replay=replay), TOLERANCE[dtype])


@pytest.mark.slow("computes many updates")
@precisions
@pytest.mark.parametrize("form", [TrunkHead(), OwnLayers(2), OwnModel()], ids=["head", "layers", "model"])
def test_ppo_with_values(dtype, form):
    check_all_ways(lambda: learner(dense(dtype), PPO, form), TOLERANCE[dtype])


@pytest.mark.slow("computes many updates")
@precisions
def test_layers_of_a_value_model_of_its_own_are_checkpointed_after_the_policys(dtype):
    whole, trainer = gradient(learner(dense(dtype), PPO, OwnModel())), learner(dense(dtype), PPO, OwnModel())
    found = gradient(trainer, replace(trainer.passes, checkpointed=LAYERS + 1, token_budget=SPLIT))
    assert furthest(found, whole) < TOLERANCE[dtype]
    policy, value = trainer._models
    for model, expected in ((policy, [True] * LAYERS), (value, [True, False, False])):
        assert [layer.gradient_checkpointing for layer in model.model.layers] == expected


def test_old_scores_and_routes_of_split_groups():
    batch = to_batch(random_groups(groups=2))
    model = wide_moe(layers=LAYERS)
    whole, split = (Passes(1.0, budget).without_gradient(model, batch, record=True) for budget in (WHOLE, SPLIT))
    torch.testing.assert_close(split.logprobs, whole.logprobs, rtol=0, atol=1e-9)
    torch.testing.assert_close(split.entropy, whole.entropy, rtol=0, atol=1e-9)
    assert torch.equal(some(split.routes).rows, some(whole.routes).rows)
    for ours, theirs in zip(some(split.routes).prompts, some(whole.routes).prompts, strict=True):
        assert torch.equal(ours, theirs)
        assert (ours >= 0).all()
