"""Mixtures of experts: packed as padded, sampled as scored, their load balanced, and GSPO on them."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from proximo.algorithms import GRPO, GSPO
from proximo.algorithms.explain import objective
from proximo.learner.experts import drift_stats, routing_metrics
from proximo.learner.learner import Learner
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.losses import Clip, EntropyBonus, RouterBalance
from proximo.models import load_model, load_tokenizer, score, supports_packing, tiny_model, tiny_moe, tiny_tokenizer
from proximo.models.routing import needed_routers, routers
from proximo.rl.assemble import assemble, to_batch
from proximo.samplers.embedded import EmbeddedSampler
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Completion, Grade, Group, Problem, Request, Rollout
from proximo.types.batches import Batch
from tests.models.test_scoring import exact, furthest, gradients, ragged, scored, switch_checkpoints_on


def spread(model: Qwen3MoeForCausalLM, scale: float = 6.0) -> Qwen3MoeForCausalLM:
    """With larger weights than a fresh model has: routers that mean what they choose, logits that differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def small_moe(seed: int = 0, **shape) -> Qwen3MoeForCausalLM:
    sizes = {"hidden": 32, "layers": 3, "heads": 2, "kv_heads": 1, "experts": 8, "intermediate": 32} | shape
    return spread(tiny_moe(**sizes, seed=seed))


class WideRouter(Qwen3MoeTopKRouter):
    """transformers' router passes through float32; this one does not, so that float64 is float64 throughout."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden_states.reshape(-1, self.hidden_dim) @ self.weight.T
        weights, chosen = logits.softmax(-1).topk(self.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


def wide_moe(seed: int = 0, **shape) -> Qwen3MoeForCausalLM:
    model = exact(small_moe(seed, **shape).double())
    model.set_experts_implementation("eager")  # torch's grouped product has no float64
    for router in routers(model):
        router.__class__ = WideRouter
    assert isinstance(model, Qwen3MoeForCausalLM)
    return model


def random_groups(seed: int = 0, groups: int = 3, siblings: int = 4, longest: int = 12) -> list[Group]:
    """Random prompts and completions of different lengths, with outcomes that differ within each group."""
    random = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 98, (length,), generator=random).tolist())

    def rollout(number: int) -> Rollout:
        words = tokens(int(torch.randint(2, longest + 1, (), generator=random)))
        return Rollout(Completion(words, (-4.0,) * len(words), "", "stop"), Grade(float(number % 2)))

    return [
        Group(Problem(str(number), "", ""), tokens(4 + number), tuple(rollout(each) for each in range(siblings)))
        for number in range(groups)
    ]


def some(value: Any) -> Any:
    """What is there, whatever the type checker fears."""
    assert value is not None
    return value


def rows_of(batch: Batch) -> dict:
    return {"prompts": batch.prompts, "tokens": batch.tokens, "lengths": batch.lengths, "group": batch.group}


# The model


def test_a_tiny_mixture_is_what_it_says():
    model = tiny_moe()
    assert isinstance(model, Qwen3MoeForCausalLM)
    assert len(routers(model)) == 4
    assert [(router.num_experts, router.top_k) for router in routers(model)] == [(8, 2)] * 4
    assert all(router.norm_topk_prob for router in routers(model))
    assert len(some(model.get_input_embeddings().weight)) == len(tiny_tokenizer())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    random = torch.get_rng_state()
    again, other = tiny_moe(), tiny_moe(seed=1)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(routers(model)[0].weight, routers(other)[0].weight)
    with pytest.raises(ValueError, match="chosen is 9 of 8 experts"):
        tiny_moe(chosen=9)


def test_a_folder_loads_into_the_fast_path(tmp_path):
    model = small_moe()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded, rows = load_model(str(tmp_path)), ragged()
    assert supports_packing(loaded)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]
    assert torch.equal(scored(loaded, rows).logprobs, scored(model, rows).logprobs)
    assert load_tokenizer(str(tmp_path)).get_vocab() == tiny_tokenizer().get_vocab()


def test_a_window_is_outside_the_fast_path():
    config = Qwen3MoeConfig(
        vocab_size=23, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, use_sliding_window=True, sliding_window=4,
    )  # fmt: skip
    assert not supports_packing(Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32))


def test_packed_is_padded():
    """To rounding, gradients too. In float64 a tie between experts would need a gap under 1e-9: there is none."""
    model, rows = wide_moe(), ragged()
    packed, padded = scored(model, rows, record=True), scored(model, rows, layout="padded", record=True)
    for name in ("logprobs", "entropy"):
        assert_close(getattr(packed, name), getattr(padded, name), rtol=1e-9, atol=1e-9)
    assert torch.equal(some(packed.routes).rows, some(padded.routes).rows)
    loss, found = gradients(model, rows)
    expected_loss, expected = gradients(model, rows, layout="padded")
    assert_close(loss, expected_loss, rtol=1e-9, atol=1e-9)
    assert furthest(found, expected) < 1e-9


def test_packed_is_padded_in_float32():
    """Rounding could flip an expert where two are nearly equal; these weights leave the last chosen well ahead."""
    model, rows = small_moe(seed=1), ragged()
    packed, padded = scored(model, rows, record=True), scored(model, rows, layout="padded", record=True)
    assert torch.equal(some(packed.routes).rows, some(padded.routes).rows)
    for number in set(rows.group.tolist()):
        assert torch.equal(some(packed.routes).prompts[number], some(padded.routes).prompts[number])
    assert_close(packed.logprobs, padded.logprobs, rtol=1e-5, atol=1e-5)
    _, found = gradients(model, rows)
    _, expected = gradients(model, rows, layout="padded")
    assert furthest(found, expected) < 1e-5


def test_company_does_not_change_where_tokens_go():
    model, rows = wide_moe(), ragged()
    together = some(scored(model, rows, record=True).routes)
    for order in ([2, 4], [6], [3, 0]):
        alone = some(scored(model, rows.at(order), record=True).routes)
        assert torch.equal(alone.rows, together.rows[order])
        for number in rows.group[order].tolist():
            assert torch.equal(alone.prompts[number], together.prompts[number])


# The sampler

REQUESTS = [Request(0, (20, 21, 22), 3), Request(1, (30, 31), 3), Request(2, (40, 41, 42, 43, 44), 3)]


def sampled_batch(completions) -> Batch:
    return to_batch(
        [
            Group(
                Problem(str(request.key), "", ""),
                request.prompt_tokens,
                tuple(Rollout(each, Grade(float(number % 2))) for number, each in enumerate(siblings)),
            )
            for request, siblings in zip(REQUESTS, completions, strict=True)
        ]
    )


@pytest.mark.parametrize("slots", [2, 9])
def test_the_embedded_samplers_log_probs_and_routes_are_the_learners(slots):
    model = small_moe(seed=2)
    sampler = EmbeddedSampler(model, tiny_tokenizer(), slots=slots, record_routes=True)
    completions = sampler.sample(REQUESTS, SamplingOptions(max_tokens=9), seed=0, step=0)
    batch = sampled_batch(completions)
    scores = score(model, **rows_of(batch), record=True)
    expected = some(scores.routes)
    assert_close(scores.logprobs, batch.rollout_logprobs, rtol=0, atol=1e-5)
    for row, completion in enumerate(each for siblings in completions for each in siblings):
        length = len(completion.tokens)
        routes = some(completion.routes)
        assert routes.shape == (length, 3, 2)
        assert (routes[-1] == -1).all()
        assert torch.equal(routes, expected.rows[row, :length])
        assert torch.equal(some(completion.prompt_routes), expected.prompts[int(batch.group[row])])


def test_routes_are_recorded_only_when_asked_and_change_nothing():
    model, options = small_moe(), SamplingOptions(max_tokens=6)
    plain = EmbeddedSampler(model, tiny_tokenizer()).sample(REQUESTS, options, seed=0, step=0)
    recorded = EmbeddedSampler(model, tiny_tokenizer(), record_routes=True).sample(REQUESTS, options, seed=0, step=0)
    assert plain == recorded
    assert all(each.routes is None and each.prompt_routes is None for siblings in plain for each in siblings)
    assert not any(router._forward_hooks for router in routers(model))


# The balance of the load


def learner(model, algorithm=GRPO, **changes) -> Learner:
    options = {"groups": 3, "minibatches": 1, "learning_rate": 1e-3, "warmup_steps": 0} | changes
    replay = options.pop("replay", None)
    return Learner(PlainPolicy(model), algorithm, LearnerOptions(**options), temperature=1.0, seed=0, replay=replay)


def gradient_of(model) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_balance_by_hand():
    """Two experts, top-1, one layer: logits 0 and log 3, so p is (1/4, 3/4), and once (3/4, 1/4)."""
    piece, log3 = RouterBalance(), torch.log(torch.tensor(3.0))
    logits = torch.tensor([[[0.0, log3]], [[log3, 0.0]], [[0.0, log3]], [[0.0, log3]]])
    counts = piece.assignments(logits, 1)
    assert counts.tolist() == [1, 3]
    # 2 (f·p): f = (1/4, 3/4), so 2 (1/16 + 9/16) = 1.25 for three tokens and 2 (3/16 + 3/16) = 0.75 for one.
    assert_close(piece(logits, counts / 4), torch.tensor([1.25, 0.75, 1.25, 1.25]))
    half = piece(logits.bfloat16(), counts / 4)
    assert half.dtype == torch.float32  # as every loss
    with pytest.raises(ValueError, match="coefficient is 0.0"):
        RouterBalance(0.0)


def test_balance_is_transformers_own_at_the_positions_that_predict():
    model, batch = wide_moe(), to_batch(random_groups())
    scores = score(model, **rows_of(batch), router_logits=True)
    piece, logits = RouterBalance(), some(scores.router_logits)
    assert logits.shape == (int(batch.lengths.sum()), 3, 8)
    load = piece.assignments(logits, 2) / (len(logits) * 3)
    assert float(load.sum()) == pytest.approx(2.0)
    by_layer: Any = tuple(logits.unbind(1))
    expected: Any = load_balancing_loss_func(by_layer, 8, 2)
    assert_close(piece(logits, load).mean(), expected.double(), rtol=1e-6, atol=0)  # theirs is in float32
    padded = score(model, **rows_of(batch), router_logits=True, layout="padded").router_logits
    assert_close(padded, logits, rtol=0, atol=1e-9)


@pytest.mark.slow("computes many updates")
@pytest.mark.parametrize("replay", [None, "old_policy"])
def test_balance_adds_up_over_micro_batches(replay):
    balanced = replace(GRPO, kl=None, extra=RouterBalance(0.5))
    found = []
    for budget in (10_000, 20):
        trainer = learner(wide_moe(), balanced, token_budget=budget, replay=replay, max_gradient_norm=1e9)
        batch = assemble(random_groups(), [], trainer, 16).batch
        assert len(list(trainer.passes.parts(batch))) == (1 if budget == 10_000 else 8)  # three groups, all split
        update = trainer.update(batch, fresh=True)
        found.append((update.stats.floats()["router_loss"], gradient_of(trainer.model)))
    (loss, whole), (same, parts) = found
    assert loss == pytest.approx(same, rel=1e-9)
    assert furthest(parts, whole) < 1e-7
    assert loss > 1.9  # balanced experts give the number of chosen ones, 2; others more


def test_balance_moves_the_gradient_as_autograd_says():
    """The whole term by hand: X · Σ f·P with f held, added to the policy's loss."""
    batch, coefficient = to_batch(random_groups()), 0.5
    gradients_of = []
    for extra in (None, RouterBalance(coefficient)):
        trainer = learner(wide_moe(), replace(GRPO, kl=None, extra=extra), max_gradient_norm=1e9)
        trainer.update(assemble(random_groups(), [], trainer, 16).batch, fresh=True)
        gradients_of.append(gradient_of(trainer.model))
    model = wide_moe()
    logits = some(score(model, **rows_of(batch), router_logits=True).router_logits)
    probabilities, chosen = logits.softmax(-1).mean(dim=(0, 1)), logits.topk(2).indices
    load = torch.bincount(chosen.flatten(), minlength=8).double() / chosen[..., 0].numel()
    (coefficient * 8 * (load * probabilities).sum()).backward()
    for without, with_it, parameter in zip(*gradients_of, model.parameters(), strict=True):
        expected = torch.zeros_like(without) if parameter.grad is None else parameter.grad
        assert_close(with_it - without, expected, rtol=1e-6, atol=1e-9)


def test_balance_leaves_out_tokens_off_the_mask():
    trainer = learner(wide_moe(), replace(GRPO, kl=None, extra=RouterBalance(0.5)))
    batch = assemble(random_groups(), [], trainer, 16).batch
    mask = batch.mask.clone()
    mask[0] = False
    masked, fewer = replace(batch, mask=mask), batch.rows(torch.arange(1, len(batch)))
    assert trainer.balance is not None
    loads = [trainer.balance.counted(trainer.passes, trainer.policy, each).load for each in (masked, fewer, batch)]
    assert_close(loads[0], loads[1])
    assert not torch.allclose(loads[0], loads[2])


def test_balance_works_with_checkpointed_layers():
    found = []
    for checkpointed in (False, True):
        model = small_moe()
        if checkpointed:
            switch_checkpoints_on(model)
            model.train()
        trainer = learner(model, replace(GRPO, kl=None, extra=RouterBalance(0.5)), max_gradient_norm=1e9)
        trainer.update(assemble(random_groups(), [], trainer, 16).batch, fresh=True)
        found.append(gradient_of(model))
    assert furthest(found[1], found[0]) < 1e-5


def test_balance_needs_experts_and_has_a_formula():
    with pytest.raises(ValueError, match="RouterBalance.*Qwen3ForCausalLM has no experts"):
        learner(tiny_model(hidden=32, layers=1, intermediate=32), replace(GRPO, extra=RouterBalance()))
    assert "0.001 · X Σ_i f_i·P_i" in objective(replace(GRPO, extra=(EntropyBonus(), RouterBalance())))[0]


def test_other_mixtures_are_refused():
    config = MixtralConfig(
        vocab_size=23, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    model = MixtralForCausalLM._from_config(config, dtype=torch.float32)
    with pytest.raises(ValueError, match="MixtralTopKRouter: only Qwen3-MoE"):
        needed_routers(model, "replay")


# Drift of the routes


def test_drift_by_hand():
    """Two tokens with a known route, two layers, two experts: one of four choices is lost at the first token."""
    before = torch.tensor([[[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[-1, -1], [-1, -1]]]])
    after = torch.tensor([[[[1, 0], [2, 5]], [[5, 4], [6, 7]], [[1, 2], [3, 4]]]])
    totals = drift_stats(before, after).totals
    assert [float(totals[f"drift_{name}"]) for name in ("positions", "experts", "tokens")] == [2, 0.25, 1]


@pytest.mark.parametrize("replay", [None, "old_policy"])
def test_the_drift_of_the_first_update_is_measured_with_and_without_replay(replay):
    model = small_moe(seed=3)
    trainer = learner(model, replace(GRPO, kl=None), replay=replay)
    batch = assemble(random_groups(), [], trainer, 16).batch
    trainer.set_learning_rate(10)
    updates = list(trainer.updates(batch))
    positions = [update.stats.totals.get("drift_positions") for update in updates]
    assert positions[0] == (batch.lengths[updates[0].rows] - 1).sum()
    assert positions[1:] == [None] * (len(updates) - 1)
    assert 0 < routing_metrics(updates[0].stats)["routing_drift"] < 1


# GSPO on packed mixtures


def test_gspo_weighs_a_completion_as_a_whole_and_a_clipped_one_not_at_all():
    """d loss / d log-prob is equal within a row, and exactly 0 in a clipped one: it has no gradient at all."""
    model = small_moe(seed=3)
    trainer = learner(model, replace(GSPO, gate=Clip(3e-4, 4e-4)))
    batch = assemble(random_groups(), [], trainer, 16).batch
    old = trainer.old_scores(batch).logprobs
    # Every other pair of rows is pushed out of the band on the side where its advantage is clipped.
    away = torch.where(batch.advantages > 0, -0.01, 0.01) * (torch.arange(len(batch)) % 4 < 2).unsqueeze(1)
    batch = replace(batch, old_logprobs=(old + away).float())
    scores = trainer.passes.scores(model, batch)
    scores.logprobs.retain_grad()
    loss, stats = _gspo_loss(trainer, batch, scores)
    loss.backward()
    coefficients, clipped = some(scores.logprobs.grad), torch.arange(len(batch)) % 4 < 2
    for row in range(len(batch)):
        own = coefficients[row][batch.mask[row]]
        assert (own == own[0]).all()
        assert bool(own[0] == 0) == bool(clipped[row])
    assert stats.floats()["blocked"] == pytest.approx(float(batch.mask[clipped].sum() / batch.mask.sum()))
    model.zero_grad()
    part = batch.rows(clipped.nonzero().squeeze(1))
    _gspo_loss(trainer, part, trainer.passes.scores(model, part))[0].backward()
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def _gspo_loss(trainer: Learner, batch: Batch, scores):
    return trainer.gradients.loss(batch, scores, batch.old_logprobs, trainer.gradients.plan(trainer.passes, batch)[0])
