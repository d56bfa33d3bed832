"""How many tokens fit: from a model's shape and from free memory, which is made up here."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config

from proximo.algorithms import GRPO, PPO, Algorithm
from proximo.learner import memory
from proximo.learner.footprint import parameter_bytes
from proximo.learner.learner import Learner
from proximo.learner.memory import (
    MAX_TOKENS,
    GroupLengths,
    MemoryPlan,
    TokenCost,
    group_lengths,
    plan_memory,
    room_for_activations,
    token_cost,
)
from proximo.learner.options import CPU_TOKENS, LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.models import tiny_model
from proximo.models.packing.attention import body
from proximo.models.values import OwnModel, value_model
from proximo.recipes.presets import ARITHMETIC
from proximo.rl.assemble import to_batch
from proximo.rl.preflight import estimate
from proximo.types import Completion, Grade, Group, Problem, Rollout
from proximo.types.batches import Batch
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


COST = TokenCost(layers=(200,) * 4, entering=(20,) * 4, ends=100)
"""Four layers; a token takes 900 bytes with all of them kept."""


def test_what_a_token_costs_by_hand():
    # The inputs of checkpointed layers, and what is kept whole: the other layers or, at the end, one that runs again.
    assert [COST.bytes(number) for number in range(5)] == [900, 720, 540, 360, 380]
    assert (COST.kept, COST.checkpointed, COST.offloaded) == (900, 380, 100 + 2 * 20 + 200)
    assert COST.bytes(2, offloaded=True) == 100 + 2 * 20 + 400
    both = COST + TokenCost(layers=(1000,), entering=(50,), ends=7)
    # All four of the first and none of the second, which is still whole when they run again: 107 + 80 + 1000.
    assert (both.kept, both.bytes(4), both.checkpointed) == (1907, 1187, 107 + 80 + 50 + 1000)
    assert COST.without_checkpoints() == TokenCost((), (), 900)


def group(prompt: int, *completions: int) -> GroupLengths:
    return GroupLengths(prompt, completions)


def test_tokens_of_a_group_by_hand():
    some = group(10, 30, 40, 20)
    assert (some.tokens, some.row) == (100, 50)
    # Whole; 40 and 30 + 20 beside the prompt; each alone.
    assert [some.computed(budget) for budget in (100, 99, 60, 50)] == [100, 110, 110, 120]


def test_the_budget_lies_between_the_longest_row_and_the_most_there_is_any_use_for():
    small = [group(100, *[50] * 8)]
    assert plan_memory(COST, 20_000 * 900, small) == MemoryPlan(20_000)
    assert plan_memory(COST, 10**9, small) == MemoryPlan(MAX_TOKENS)
    assert plan_memory(COST, 10**9, [group(20_000, *[10_000] * 8)]) == MemoryPlan(100_000)


def test_a_group_is_split_where_that_is_less_work_than_running_layers_again():
    # 500 tokens do not fit, 499 do. In two parts 600 tokens go forwards and, for twice the work, backwards: 1,800. With
    # one layer of four checkpointed the group fits whole: 500 · 3.25 = 1,625.
    free = 499 * 900
    assert plan_memory(COST, free, [group(100, *[50] * 8)]) == MemoryPlan(free // 720, 1)
    # A prompt of 20 costs less to repeat: 440 · 3 = 1,320 against 420 · 3.25 = 1,365.
    free = 419 * 900
    assert plan_memory(COST, free, [group(20, *[50] * 8)]) == MemoryPlan(419)
    assert plan_memory(COST, free, [group(20, *[50] * 8)], MemoryPlan(0, checkpointed=2)).checkpointed == 2


def test_as_few_layers_are_checkpointed_as_let_one_row_fit():
    row = [group(100, 900)]
    assert plan_memory(COST, 1000 * 900, row) == MemoryPlan(1000)
    assert plan_memory(COST, 1000 * 900 - 1, row) == MemoryPlan(1249, 1)
    assert plan_memory(COST, 1000 * 540, row) == MemoryPlan(1000, 2)
    assert plan_memory(COST, 1000 * 540 - 1, row) == MemoryPlan(1499, 3)
    # With all four one of them runs again whole: three take less.
    assert plan_memory(COST, 1000 * 360, row) == MemoryPlan(1000, 3)
    assert plan_memory(COST, 1000 * 360 - 1, row) == MemoryPlan(1058, 4, offloaded=True)
    # Nothing fits: the row stands alone all the same.
    assert plan_memory(COST, 0, row) == MemoryPlan(1000, 4, offloaded=True)
    assert plan_memory(COST.without_checkpoints(), 0, row) == MemoryPlan(1000)


def test_what_is_checkpointed_or_offloaded_stays_so():
    plenty, row = 10**9, [group(100, 900)]
    assert plan_memory(COST, plenty, row, MemoryPlan(0, 3)) == MemoryPlan(MAX_TOKENS, 3)
    assert plan_memory(COST, plenty, row, MemoryPlan(0, 4, offloaded=True)) == MemoryPlan(MAX_TOKENS, 4, offloaded=True)


lengths = st.lists(
    st.builds(GroupLengths, st.integers(1, 50), st.lists(st.integers(0, 90), min_size=1).map(tuple)), min_size=1
)


@given(lengths, st.integers(0, 200_000))
def test_a_plan_fits_or_nothing_does(groups, free):
    plan, row = plan_memory(COST, free, groups), max(each.row for each in groups)
    assert plan.token_budget >= row
    assert 0 <= plan.checkpointed <= 4
    least = COST.offloaded if plan.offloaded else COST.bytes(plan.checkpointed)
    assert plan.token_budget * least <= free or row * COST.offloaded > free
    if row * COST.kept <= free >= COST.kept * max(each.tokens for each in groups):
        assert plan == MemoryPlan(min(free // COST.kept, MAX_TOKENS))  # whole groups, nothing run again


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
    options = LearnerOptions(groups=2, minibatches=1, **options)
    value = value and value_model(value, model)
    return Learner(PlainPolicy(model), algorithm, options, temperature=1.0, seed=0, value=value)


def checkpointed(model) -> list[bool]:
    """Which of its layers run again."""
    return [layer.gradient_checkpointing for layer in body(model).get_submodule("layers")]  # pyright: ignore[reportGeneralTypeIssues]


def test_lengths_of_the_groups_by_hand():
    batch = batch_of((3, 1, 2), (2, 9, 4), (10, 1, 1))
    assert group_lengths(batch) == [group(3, 1, 2), group(2, 9, 4), group(10, 1, 1)]
    assert group_lengths(batch.rows(torch.tensor([3, 4]))) == [group(2, 4), group(10, 1)]


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


def test_planned_again_for_a_longer_row(gpu):
    learner = trainer()
    cost = token_cost(learner.model.config, torch.float32, compiled=False)
    fixed = plain(learner).optimizer.pending_bytes + 8 * learner.model.config.vocab_size * 32
    gpu(int((100 * cost.kept + fixed) / 0.85) + 1)
    learner.plan_memory(batch_of((10, 30, 40)))
    assert (learner.passes.token_budget, checkpointed(learner.model)) == (100, [False, False])
    learner.plan_memory(batch_of((10, 60, 90)))  # 160 tokens, in two parts
    assert (learner.passes.token_budget, checkpointed(learner.model)) == (100, [False, False])
    learner.plan_memory(batch_of((10, 91)))
    assert checkpointed(learner.model) == [True, False]
    assert learner.passes.token_budget == 100 * cost.kept // cost.bytes(1) > 101
    learner.plan_memory(batch_of((10, 30, 40)))
    assert checkpointed(learner.model) == [True, False]


def test_checkpointed_layers_are_those_of_a_resumed_run(gpu):
    first, second, third = trainer(PPO, OwnModel()), trainer(PPO, OwnModel()), trainer(PPO, OwnModel())
    gpu(0)
    first.plan_memory(batch_of((10, 91)))
    assert (first.passes.token_budget, first.passes.checkpointed, first.passes.offloaded) == (101, 4, True)
    second.load(first.state())
    assert second.passes == first.passes
    assert [checkpointed(model) for model in second._models] == [[True, True]] * 2
    # As it was stored before layers were counted.
    old = first.state()
    third.load(replace(old, values={**old.values, "checkpointed": True}))
    assert third.passes.checkpointed == 4


def test_a_large_models_long_group_is_split_without_running_layers_again():
    """It used to end out of memory: 4 B, 16 completions of up to 4,096 tokens, 55 GiB for activations."""
    cost = token_cost(LARGER, torch.bfloat16, compiled=True)
    plan = plan_memory(cost, 55 * 2**30, [group(512, 4096, *[1860] * 15)])
    assert (plan.checkpointed, plan.offloaded) == (0, False)
    assert 4608 < plan.token_budget < 14_500


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
    [_, line] = estimate.memory(ARITHMETIC).lines
    assert line.endswith(
        "groups of the longest completions are split; 4 of 4 layers are run again in the backward pass; "
        "what they keep waits in the host's memory"
    )


def test_a_dry_run_in_half_precision_counts_masters():
    [_, line] = estimate.memory(replace(ARITHMETIC, dtype="bfloat16")).lines
    assert "in bfloat16" in line
    assert "float32 masters" in line
