"""How many tokens fit: from a model's shape and from free memory, which is made up here."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config

from proximo.algorithms import GRPO, PPO, Algorithm
from proximo.models import tiny_model
from proximo.models.packing.attention import body
from proximo.models.values import OwnModel, value_model
from proximo.presets import ARITHMETIC
from proximo.training.config import CPU_TOKENS, TrainingOptions
from proximo.training.learner import memory
from proximo.training.learner.learner import Learner
from proximo.training.learner.memory import (
    MAX_TOKENS,
    MemoryPlan,
    TokenCost,
    largest_group,
    plan_memory,
    room_for_activations,
    token_cost,
)
from proximo.training.learner.policy import PlainPolicy
from proximo.training.preflight import estimate
from proximo.training.preflight.estimate import parameter_bytes
from proximo.training.rl.assemble import to_batch
from proximo.types import Batch, Completion, Grade, Group, Problem, Rollout
from tests.policies import plain

SMALL = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
LARGER = Qwen3Config(
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)


@pytest.mark.parametrize(("config", "megabytes"), [(SMALL, 1.9), (LARGER, 6.1)])
def test_a_token_costs_what_was_measured(config, megabytes):
    cost = token_cost(config, torch.bfloat16, compiled=False)
    assert cost.kept / 1e6 == pytest.approx(megabytes, rel=0.05)
    assert token_cost(config, torch.float32, compiled=False).kept == 2 * cost.kept
    assert token_cost(config, torch.bfloat16, compiled=True).kept < cost.kept
    # What enters each layer, and one layer whole.
    assert cost.checkpointed < cost.kept / 8


def test_the_budget_lies_between_the_largest_group_and_the_most_there_is_any_use_for():
    cost = TokenCost(kept=1000, checkpointed=100)
    assert plan_memory(cost, 20_000_000, largest=500) == MemoryPlan(20_000, checkpointed=False)
    assert plan_memory(cost, 10**9, largest=500) == MemoryPlan(MAX_TOKENS, checkpointed=False)
    assert plan_memory(cost, 10**9, largest=100_000) == MemoryPlan(100_000, checkpointed=False)


def test_layers_are_run_again_only_where_a_group_does_not_fit():
    cost = TokenCost(kept=1000, checkpointed=100)
    assert plan_memory(cost, 500_000, largest=500).checkpointed is False
    assert plan_memory(cost, 499_999, largest=500) == MemoryPlan(4999, checkpointed=True)
    # Nothing fits: the group stands alone all the same.
    assert plan_memory(cost, 0, largest=500) == MemoryPlan(500, checkpointed=True)


def test_what_is_still_to_come_is_not_free():
    room = room_for_activations(100 * 2**30, pending=10 * 2**30, vocabulary=1000, hidden=16)
    assert room == int(0.85 * 100 * 2**30) - 10 * 2**30 - memory.CHUNK_BYTES - 128_000
    assert room_for_activations(2**30, pending=0, vocabulary=1, hidden=1) == 0


@pytest.mark.parametrize(
    ("dtype", "trained", "expected"),
    [(torch.float32, True, 16), (torch.float32, False, 4), (torch.bfloat16, True, 18), (torch.bfloat16, False, 2)],
)
def test_bytes_of_a_parameter(dtype, trained, expected):
    assert parameter_bytes(dtype, trained=trained) == expected


def batch_of(*groups: tuple[int, ...]) -> Batch:
    """Each group: the length of its prompt, then those of its completions."""
    return to_batch(
        [
            Group(
                Problem("p", "", None),
                (5,) * prompt,
                tuple(Rollout(Completion((7,) * size, (0.0,) * size, "", "stop"), Grade(1.0)) for size in sizes),
            )
            for prompt, *sizes in groups
        ]
    )


def trainer(algorithm: Algorithm = GRPO, value=None, **options) -> Learner:
    model = tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)
    options = TrainingOptions(groups=2, group_size=2, minibatches=1, **options)
    value = value and value_model(value, model)
    return Learner(PlainPolicy(model), algorithm, options, temperature=1.0, seed=0, value=value)


def checkpointed(model) -> list[bool]:
    return [layer.gradient_checkpointing for layer in body(model).get_submodule("layers")]  # pyright: ignore[reportGeneralTypeIssues]


def test_the_largest_group_by_hand():
    assert largest_group(batch_of((3, 1, 2), (2, 9, 4), (10, 1, 1))) == 15


def test_a_cpu_and_a_given_budget_are_left_alone():
    for learner, expected in ((trainer(), CPU_TOKENS), (trainer(token_budget=7), 7)):
        learner.plan_memory(batch_of((3, 1, 2)))
        assert learner.passes.token_budget == expected
        assert checkpointed(learner.model) == [False, False]


@pytest.fixture
def gpu(monkeypatch):
    """A machine that plans, with so many bytes free as the test says."""

    def machine(free: int) -> None:
        monkeypatch.setattr(memory, "is_planned_on", lambda _: True)
        monkeypatch.setattr(estimate, "is_planned_on", lambda _: True)
        monkeypatch.setattr(memory, "free_bytes", lambda _: free)
        monkeypatch.setattr(estimate, "free_bytes", lambda _: free)
        monkeypatch.setattr(memory, "CHUNK_BYTES", 0)

    return machine


def test_planned_with_the_first_batch_and_kept(gpu):
    learner = trainer()
    cost = token_cost(learner.model.config, torch.float32, compiled=False)
    pending = plain(learner).optimizer.pending_bytes
    # AdamW has made nothing yet: a gradient and two moments of each weight, in float32.
    assert pending == 12 * sum(parameter.numel() for parameter in learner.model.parameters())
    fixed = pending + 8 * learner.model.config.vocab_size * 32
    gpu(int((1000 * cost.kept + fixed) / 0.85) + 1)
    learner.plan_memory(batch_of((10, 30, 40)))
    assert learner.passes.token_budget == 1000
    assert checkpointed(learner.model) == [False, False]
    gpu(0)  # somebody else is there now, but the plan stands
    learner.plan_memory(batch_of((10, 30, 50)))
    assert learner.passes.token_budget == 1000


def test_a_group_that_does_not_fit_is_checkpointed(gpu):
    learner = trainer()
    cost = token_cost(learner.model.config, torch.float32, compiled=False)
    fixed = plain(learner).optimizer.pending_bytes + 8 * learner.model.config.vocab_size * 32
    gpu(int((100 * cost.kept + fixed) / 0.85) + 1)
    learner.plan_memory(batch_of((10, 30, 40)))
    assert (learner.passes.token_budget, checkpointed(learner.model)) == (100, [False, False])
    learner.plan_memory(batch_of((10, 30, 61)))
    assert checkpointed(learner.model) == [True, True]
    assert learner.passes.token_budget == 100 * cost.kept // cost.checkpointed > 101


def test_a_value_model_of_its_own_takes_its_share(gpu):
    gpu(2**26)
    alone, beside = trainer(), trainer(PPO, OwnModel())
    for learner in (alone, beside):
        learner.plan_memory(batch_of((10, 30, 40)))
    assert beside.passes.token_budget < alone.passes.token_budget / 2


def test_a_dry_run_says_what_it_would_plan(gpu):
    [_, line] = estimate.memory(ARITHMETIC).lines
    assert line.endswith("and the activations of 16384 tokens at most")
    training = replace(ARITHMETIC.training, token_budget=77)
    assert estimate.memory(replace(ARITHMETIC, training=training)).lines[1].endswith("activations of 77 tokens at most")
    gpu(8 * 2**30)
    [_, line] = estimate.memory(ARITHMETIC).lines
    assert "tokens in a pass" in line
    assert "run again" not in line
    gpu(0)
    assert "run again in the backward pass" in estimate.memory(ARITHMETIC).lines[1]


def test_a_dry_run_in_half_precision_counts_masters():
    [_, line] = estimate.memory(replace(ARITHMETIC, dtype="bfloat16")).lines
    assert "in bfloat16" in line
    assert "float32 masters" in line
