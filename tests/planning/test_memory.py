"""Memory by component, by hand; laws; and peaks that were measured on one H200."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO
from proximo.learner.footprint import parameter_bytes
from proximo.learner.memory import token_cost
from proximo.models.values import OwnModel
from proximo.planning.cards import CARDS, GIB, DeviceCard, card, chosen_card
from proximo.planning.fitting import GROUP_SIZES, LENGTHS, largest_groups, longest_completions
from proximo.planning.holdings import Component, Holding, component, holdings
from proximo.planning.keys import keys_in_pages, pages_at_once
from proximo.planning.memory import StepSize, kept_logits, memory_use, needed
from proximo.planning.shapes import SHAPES, ModelShape
from proximo.rl.build import MAX_SLOTS
from proximo.rl.config import RunConfig, ValueOptions
from proximo.rl.preflight.estimate import Held
from proximo.rl.reward_config import RewardMix, RewardModel
from proximo.samplers.embedded.buffers import BufferPlan

H200 = card("H200")
CLIPPED = replace(GRPO, kl=None)
BF16 = torch.bfloat16


def held_of(model: str, algorithm=CLIPPED, **fields) -> tuple[Holding, Holding]:
    return holdings(RunConfig(model=model, algorithm=algorithm, **fields), BF16, compiled=True)


# By hand


def test_a_trained_parameter_in_bfloat16_takes_18_bytes():
    found = component(Held("policy", 1000, trained=True), BF16)
    assert found == Component("policy", 1000, True, weights=2000, gradients=4000, masters=4000, moments=8000)
    assert component(Held("reference", 1000, trained=False), BF16).total == 2000
    assert component(Held("policy", 1000, trained=True), torch.float32).total == 16_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("trained", [True, False])
def test_the_dry_run_counts_the_same(dtype, trained):
    assert component(Held("policy", 1, trained), dtype).total == parameter_bytes(dtype, trained=trained)


def test_eight_billion_with_ppo_and_a_reward_model():
    mix = RewardMix(models=(RewardModel("0.6B"),))
    value = ValueOptions(form=OwnModel())
    full, lora = held_of("8B", PPO, rewards=mix, value=value)
    number, small = 8_190_735_360, 596_049_920
    assert [(each.role, each.parameters, each.trained) for each in full.components] == [
        ("policy", number, True),
        ("reference", number, False),
        ("value model", number, True),
        ("reward model 0.6B", small, False),
    ]
    assert full.total == 18 * number + 2 * number + 18 * number + 2 * small
    assert full.pending == 2 * 12 * number
    adapter = 16 * 36 * ((4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 12288) * 3)
    # The reference is the policy with its adapter off: no second copy.
    assert [each.role for each in lora.components] == ["policy", "its LoRA adapter", "value model", "reward model 0.6B"]
    assert lora.total == 2 * number + 16 * adapter + 18 * number + 2 * small
    one = token_cost(SHAPES["8B"], BF16, compiled=True)
    assert full.cost == one + one  # policy and value model in one pass


@pytest.mark.slow("plans many models")
@pytest.mark.parametrize(
    ("algorithm", "roles"),
    [
        (PPO, ["policy", "reference", "value model's 1 layers"]),
        (GRPO, ["policy", "reference"]),
        (DAPO, ["policy"]),
        (GSPO, ["policy"]),
        (SAPO, ["policy"]),
    ],
)
def test_which_models_the_five_hold(algorithm, roles):
    full, _ = held_of("0.6B", algorithm)
    assert [each.role for each in full.components] == roles


def test_keys_and_values_by_hand():
    full, _ = held_of("0.6B")
    use = memory_use(full, StepSize(groups=16, group_size=16, prompt_tokens=512, max_tokens=512), H200)
    assert use.live == 256
    # 8 pages of 64 tokens for each prompt and for each completion, and a page for slots without one.
    assert use.keys == use.first_keys == (16 * 8 + 256 * 8 + 1) * 64 * 2 * 28 * 8 * 128 * 2
    assert use.held == 18 * 596_049_920
    assert use.pass_tokens == 3 * (512 + 16 * 512)  # three whole groups in 28,672 tokens
    assert use.rollout_peak == use.held + use.keys + use.sampling
    # Logits of three groups, all kept: 48 completions of 512 tokens.
    assert use.logits == 48 * 512 * 4 * 151_936
    assert use.update_peak == use.held + use.keys + use.captured + use.activations + use.head + use.logits


def test_logits_are_kept_in_whole_chunks_of_half_of_what_is_free():
    full, _ = held_of("0.6B")
    row, chunk = 4 * 151_936, 2**30 // (4 * 151_936)
    assert kept_logits(full, H200, 100, free=2**40) == 100 * row
    assert kept_logits(full, H200, 100_000, free=2 * 3 * chunk * row) == 3 * chunk * row
    assert kept_logits(full, H200, 100_000, free=2 * 3 * chunk * row - 2) == 2 * chunk * row
    assert kept_logits(full, H200, 100, free=-1) == 0
    cpu = DeviceCard("cpu", 64, 2e10, 7e10, is_gpu=False)
    assert kept_logits(full, cpu, 100, free=2**40) == 100 * row
    assert kept_logits(full, cpu, 100_000, free=2**40) == 4 * (2**26 // row) * row <= 2**28


def test_pages_at_once_by_hand():
    # All three hold a page, then two hold 2 pages, then one holds 5.
    assert pages_at_once([64, 128, 320]) == 5
    # With ten of 128 tokens, these hold most while they are there.
    assert pages_at_once([64] * 10 + [128] * 10 + [320]) == 22
    assert pages_at_once([65] * 7) == 14


def test_after_the_first_rollout_pages_are_kept_that_were_needed():
    full, _ = held_of("0.6B")
    size = StepSize(groups=16, group_size=16, prompt_tokens=512, max_tokens=4096, mean_tokens=256)
    use = memory_use(full, size, H200)
    page = 64 * 2 * 28 * 8 * 128 * 2
    room = int((H200.usable - (2 + 4 + 12) * 596_049_920) * 0.6)
    assert use.first_keys == (room // page + 1) * page  # not all of 16 · 8 + 256 · 64 pages
    own = pages_at_once(size.lengths)
    assert 256 < own < 256 * 4
    assert use.keys == (int(1.25 * (16 * 8 + own)) + 2) * page
    assert use.live == 256
    # The peak is in the first rollout, where gradients and moments are not there yet.
    assert use.rollout_peak == use.held - full.pending + use.first_keys + use.sampling
    without = memory_use(full, replace(size, mean_tokens=None), H200)
    assert without.keys == without.first_keys == use.first_keys
    assert without.live == (room // page - 16 * 8) // 64


def test_keys_that_the_sampler_would_refuse_do_not_fit():
    plan = BufferPlan(slots=4, prompts=1, max_prompt_tokens=100, max_tokens=200, siblings=4)
    found = [keys_in_pages(plan, 4 * 4, token_bytes=10, free_bytes=pages * 640) for pages in (5, 6, 18)]
    assert [each.refused for each in found] == [True, False, False]
    assert [each.live for each in found] == [1, 1, 4]
    assert [each.first for each in found] == [7 * 640, 7 * 640, 19 * 640]
    use = memory_use(held_of("0.6B")[0], StepSize(1, 1, 64, 64), H200)
    assert use.fits
    assert not replace(use, refused=True).fits


def test_a_single_pass_has_no_gradients_before_it():
    full, _ = held_of("0.6B")
    size = StepSize(groups=4, group_size=4, prompt_tokens=128, max_tokens=1024)
    one, four = memory_use(full, size, H200), memory_use(full, replace(size, token_budget=128 + 4 * 1024), H200)
    assert one.pass_tokens == 4 * four.pass_tokens
    assert (
        one.update_peak == one.held + one.keys + one.captured + one.activations + one.head + one.logits - full.gradients
    )
    assert four.update_peak == four.held + four.keys + four.captured + four.activations + four.head + four.logits


def test_a_cpu_keeps_prompts_in_every_slot_and_takes_its_own_budget():
    full, _ = holdings(RunConfig(model="0.6B", algorithm=CLIPPED), torch.float32, compiled=False)
    small = DeviceCard("cpu", 64, 2e10, 7e10, is_gpu=False)
    use = memory_use(full, StepSize(groups=2, group_size=8, prompt_tokens=64, max_tokens=32), small)
    assert use.keys == 16 * (64 + 32) * 2 * 28 * 8 * 128 * 4
    assert (use.captured, use.checkpointed, use.parts) == (0, 0, 1)
    assert use.held == 16 * 596_049_920


# What was measured on one H200 with random weights, in GiB: tests/gpu/test_plan.py, which prints it.


@pytest.mark.slow("plans many models")
@pytest.mark.parametrize(
    ("model", "size", "rollout", "update"),
    [
        ("0.6B", StepSize(16, 16, 512, 512), 26.8, 72.6),
        ("0.6B", StepSize(12, 24, 300, 700), 33.1, 64.3),
        ("0.6B", StepSize(8, 16, 4096, 256), 19.7, 55.7),
        ("1.7B", StepSize(32, 8, 384, 768), 53.1, 119.2),
        ("4B", StepSize(16, 16, 512, 512), 89.2, 124.0),
    ],
    ids=["medium", "odd", "long-prompt", "1.7b", "4b"],
)
def test_peaks_are_within_a_tenth_of_what_was_measured(model, size, rollout, update):
    use = memory_use(held_of(model)[0], size, H200)
    assert use.update_peak / GIB == pytest.approx(update, rel=0.1)
    assert use.rollout_peak / GIB == pytest.approx(rollout, rel=0.1)
    assert use.fits


def test_an_adapter_s_rollout_is_within_a_tenth_of_what_was_measured():
    use = memory_use(held_of("0.6B")[1], StepSize(16, 16, 512, 512), H200)
    assert use.rollout_peak == pytest.approx(19_341_714_944, rel=0.1)


def test_four_billion_with_a_long_tail_as_it_was_measured():
    """Its groups are split: measured were passes of 8,054 tokens and a peak of 118 GiB, with keys in pages."""
    use = memory_use(held_of("4B")[0], StepSize(8, 16, 512, 4096, mean_tokens=2000), H200)
    assert use.fits
    assert use.parts > 1
    assert use.pass_tokens == pytest.approx(8054, rel=0.1)
    assert use.update_peak == pytest.approx(118 * GIB, rel=0.1)


def test_more_rows_than_slots_hold_their_average_length():
    full, _ = held_of("0.6B")
    use = memory_use(full, StepSize(groups=64, group_size=16, prompt_tokens=64, max_tokens=4096, mean_tokens=64), H200)
    assert use.live == 512
    assert use.keys == (int(1.25 * (64 * 1 + 512 * 1)) + 2) * 64 * 2 * 28 * 8 * 128 * 2


def test_a_group_that_does_not_fit_is_split_before_layers_run_again():
    full, lora = held_of("8B")
    size = StepSize(groups=8, group_size=16, prompt_tokens=512, max_tokens=16384)
    use = memory_use(lora, size, H200)
    assert use.fits
    assert use.parts > 1
    assert use.pass_tokens < size.group_tokens
    assert not memory_use(full, size, H200).fits


# Laws


def small_holding(layers: int) -> Holding:
    config = replace_layers(layers)
    with torch.device("meta"):
        shape = ModelShape("drawn", AutoModelForCausalLM.from_config(config))
    parts = (component(Held("policy", shape.parameters, trained=True), BF16),)
    return Holding(shape, BF16, parts, token_cost(config, BF16, compiled=True))


def replace_layers(layers: int):
    return type(SHAPES["0.6B"])(**{**SHAPES["0.6B"].to_dict(), "num_hidden_layers": layers, "layer_types": None})


HOLDINGS = [small_holding(layers) for layers in (1, 2, 4)]
sizes = st.builds(
    StepSize,
    groups=st.integers(1, 32),
    group_size=st.integers(1, 32),
    prompt_tokens=st.integers(1, 4096),
    max_tokens=st.integers(1, 4096),
)


@given(size=sizes, field=st.sampled_from(["prompt_tokens", "max_tokens"]), more=st.integers(1, 4096))
@settings(deadline=None)
def test_what_is_needed_grows_with_lengths(size, field, more):
    larger = replace(size, **{field: getattr(size, field) + more})
    assert needed(HOLDINGS[1], larger, H200) > needed(HOLDINGS[1], size, H200)


@given(size=sizes, more=st.integers(1, 64), field=st.sampled_from(["groups", "group_size"]))
@settings(deadline=None)
def test_what_is_reserved_grows_with_groups_and_what_is_needed_does_not(size, more, field):
    """Groups are split as far as it takes."""
    larger = replace(size, **{field: getattr(size, field) + more})
    assert needed(HOLDINGS[1], larger, H200) == needed(HOLDINGS[1], size, H200)
    if larger.rows <= MAX_SLOTS:  # larger groups in the same slots have fewer prompts
        assert memory_use(HOLDINGS[1], larger, H200).keys >= memory_use(HOLDINGS[1], size, H200).keys


@given(size=sizes)
@settings(deadline=None)
def test_more_layers_need_more(size):
    found = [needed(holding, size, H200) for holding in HOLDINGS]
    assert found == sorted(set(found))


@given(size=sizes, chosen=st.sampled_from(CARDS))
@settings(deadline=None)
def test_what_is_predicted_is_never_less_than_what_is_needed(size, chosen):
    """Where passes are several, so that gradients are there."""
    for holding in HOLDINGS:
        use = memory_use(holding, size, chosen)
        assert use.peak + holding.gradients >= use.needed
        assert 1 <= use.live <= size.rows
        assert use.keys <= use.first_keys
        assert use.parts * (size.prompt_tokens + size.max_tokens) <= size.group_size * (
            size.prompt_tokens + size.max_tokens
        )
        assert use.pass_tokens >= size.prompt_tokens + size.max_tokens


@pytest.mark.slow("plans many models")
@given(size=sizes)
@settings(max_examples=30, deadline=None)
def test_what_is_said_to_fit_fits_and_the_next_does_not(size):
    tiny, holding = DeviceCard("tiny", 10, 1e12, 1e14), HOLDINGS[0]
    for field, tried, found in (
        ("max_tokens", LENGTHS, longest_completions(holding, size, tiny)),
        ("group_size", GROUP_SIZES, largest_groups(holding, size, tiny)),
    ):
        good = [memory_use(holding, replace(size, **{field: number}), tiny).fits for number in tried]
        place = -1 if found is None else tried.index(found)
        assert all(good[: place + 1])
        beyond = tried[place + 1] if place + 1 < len(tried) else None
        too_long = field == "max_tokens" and beyond is not None and beyond + size.prompt_tokens > 40960
        assert beyond is None or too_long or not good[place + 1]


def test_a_larger_card_holds_longer_completions():
    full, lora = held_of("8B")
    size = StepSize(groups=8, group_size=8, prompt_tokens=256, max_tokens=512)
    for holding in (full, lora):
        found = [longest_completions(holding, size, card(name)) or 0 for name in ("RTX4090", "A100-40", "B200")]
        assert found == sorted(found)
        assert found[-1] > found[0]
    assert (longest_completions(lora, size, H200) or 0) >= (longest_completions(full, size, H200) or 0)


# Cards


def test_cards_by_name_and_by_number():
    assert card("a100-40").name == "A100-40"
    assert chosen_card("A100-40", 30.0, None, None) == replace(card("A100-40"), memory=30.0)
    assert chosen_card(None, 80.0, 3.35e12, 989e12) == DeviceCard("custom", 80.0, 3.35e12, 989e12)
    with pytest.raises(ValueError, match="gpu.arithmetic is missing"):
        chosen_card(None, 80.0, 3.35e12, None)
    with pytest.raises(ValueError, match=r"gpu is 'H2000': give one of B200, H200"):
        card("H2000")
    with pytest.raises(ValueError, match="gpu.memory is -1"):
        DeviceCard("odd", -1, 1e12, 1e12)


def test_the_h200_of_the_table_is_the_one_that_was_measured():
    machine = H200.machine
    assert machine.bandwidth == pytest.approx(4.3e12, rel=0.01)
    assert machine.arithmetic == pytest.approx(790e12, rel=0.01)
