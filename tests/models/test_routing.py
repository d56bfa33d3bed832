"""Routing replay: exact on itself, worth its while when weights move, and wrong ones are caught."""

import json
from contextlib import ExitStack
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from torch.testing import assert_close
from transformers import Gemma2Config, Gemma2ForCausalLM

from proximo.algorithms import GRPO, SAPO
from proximo.config import toml
from proximo.learner.experts import to_replay
from proximo.learner.learner import Learner
from proximo.losses import EntropyBonus, KlLoss
from proximo.models import frozen_copy, score, tiny_model, tiny_moe, tiny_tokenizer
from proximo.models.routing import Routes, gate_weights, recording, replaying, routers
from proximo.rl.assemble import assemble, to_batch
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.samplers.embedded import Embedded, EmbeddedSampler, local_sampler
from proximo.samplers.mismatched import Mismatched
from proximo.samplers.plain import PlainSampler
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks.arithmetic import Arithmetic
from proximo.types import Group, Rollout
from proximo.types.batches import Batch
from tests.learner.test_moe import (
    REQUESTS,
    gradient_of,
    learner,
    random_groups,
    rows_of,
    sampled_batch,
    small_moe,
    some,
    spread,
)
from tests.models.test_scoring import SHAPE, furthest, switch_checkpoints_on


@pytest.fixture(scope="module")
def toy():
    """The toy of 6 layers and 16 experts, its weights once more with noise of 1e-3, rows, and their routes."""
    model = spread(tiny_moe(hidden=64, layers=6, experts=16))
    moved, random = frozen_copy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=random, dtype=torch.float32))
    rows = rows_of(to_batch(random_groups(siblings=6, longest=40)))
    with torch.no_grad():
        return model, moved, rows, score(model, **rows, record=True)


def moved(routes: Routes, tokens: int = 0, layers: int = 0) -> Routes:
    """Wrong by so many tokens or layers."""
    prompts = tuple(each.roll((tokens, layers), (0, 1)) for each in routes.prompts)
    return Routes(prompts, routes.rows.roll((tokens, layers), (1, 2)))


# The router


def test_the_golden_router():
    logits = torch.tensor([[1.0, 0.9, -0.5, 0.2]], requires_grad=True)
    weights = gate_weights(logits, torch.tensor([[0, 3]]), renormalise=True)
    assert_close(weights, torch.tensor([[0.689974481, 0.310025519]]), rtol=0, atol=1e-7)
    weights[0, 0].backward()
    assert_close(logits.grad, torch.tensor([[0.213909697, 0.0, 0.0, -0.213909697]]), rtol=0, atol=1e-7)
    native = gate_weights(logits, torch.tensor([[0, 1]]), renormalise=True)
    assert_close(native, torch.tensor([[0.524979187, 0.475020813]]), rtol=0, atol=1e-7)
    # Without renormalising, the softmax over all four: e / (e + e^.9 + e^-.5 + e^.2).
    raw = gate_weights(logits, torch.tensor([[0, 3]]), renormalise=False)
    assert_close(raw.detach(), torch.tensor([[0.388003, 0.174341]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("renormalise", [True, False])
def test_a_routers_own_choice_gives_its_own_weights_to_the_bit(renormalise):
    router = routers(small_moe())[0]
    router.norm_topk_prob = renormalise
    states = torch.randn(50, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    logits, weights, chosen = router(states)
    assert torch.equal(gate_weights(logits, chosen, renormalise=renormalise), weights)


# Replay of a pass


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_replaying_itself_changes_nothing(toy, layout):
    model, _, rows, _ = toy
    with torch.no_grad():
        native = score(model, **rows, layout=layout, record=True)
        again = score(model, **rows, layout=layout, routes=native.routes, record=True)
    assert float((again.logprobs - native.logprobs).abs().max()) == 0.0
    assert torch.equal(some(again.routes).rows, some(native.routes).rows)
    completions, prompts = some(again.agreement)
    assert completions.overlap.tolist() == prompts.overlap.tolist() == [1.0] * 6
    assert int(completions.changed) == 0
    # Each row's last token is never consumed, and so has no route.
    assert int(completions.positions) == int((rows["lengths"] - 1).sum())


def test_routes_of_one_layout_serve_the_other(toy):
    model, _, rows, packed = toy
    with torch.no_grad():
        padded = score(model, **rows, layout="padded", routes=packed.routes)
    assert_close(padded.logprobs, packed.logprobs, rtol=0, atol=1e-4)
    assert torch.equal(some(padded.agreement)[0].overlap, torch.ones(6))


def test_replay_at_least_halves_what_moved_weights_do_to_ratios(toy):
    _, moved_model, rows, before = toy
    with torch.no_grad():
        native = score(moved_model, **rows, record=True)
        replayed = score(moved_model, **rows, routes=before.routes)
    where = before.states.where
    drift = [float((each.logprobs - before.logprobs)[where].abs().mean()) for each in (native, replayed)]
    changed = (some(native.routes).rows.sort(-1).values != before.routes.rows.sort(-1).values).flatten(2).any(-1)
    assert 0.2 < float(changed[where].float().mean()) < 0.7
    assert drift[1] < drift[0] / 2
    # The replay says itself how many tokens would have gone elsewhere: fewer, since those before them did not either.
    completions, _ = some(replayed.agreement)
    assert 0 < int(completions.changed) <= int(changed.sum())
    assert 0.9 < float(completions.overlap.mean()) < 1


def test_routers_learn_under_replay(toy):
    model, _, rows, before = toy
    scores = score(model, **rows, routes=moved(before.routes, layers=1))
    gradients = torch.autograd.grad(scores.logprobs.sum(), [router.weight for router in routers(model)])
    assert all(float(gradient.norm()) > 1e-3 for gradient in gradients)


def test_what_is_unknown_goes_where_the_router_says(toy):
    _, moved_model, rows, before = toy
    nothing = Routes((), torch.full_like(before.routes.rows, -1))
    with torch.no_grad():
        native = score(moved_model, **rows, record=True)
        assert torch.equal(score(moved_model, **rows, routes=nothing).logprobs, native.logprobs)
        # One row is known: it goes where it is sent, the others of its group as if nothing were replayed.
        one = nothing.rows.clone()
        one[2] = before.routes.rows[2]
        mixed = score(moved_model, **rows, routes=Routes((), one), record=True)
    assert torch.equal(some(mixed.routes).rows[2], before.routes.rows[2])
    others = [row for row in range(len(one)) if row != 2]
    assert_close(mixed.logprobs[others], native.logprobs[others], rtol=0, atol=1e-4)
    assert not torch.allclose(mixed.logprobs[2], native.logprobs[2], rtol=0, atol=1e-3)


def test_a_row_with_a_hole_is_unknown():
    """Half a choice is none: an expert of -1 must never be looked up."""
    model, holed = small_moe(), torch.tensor([[[0, 1]] * 3, [[0, 1], [-1, -1], [0, 1]]], dtype=torch.int16)
    states = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    with replaying(model, holed), recording(model) as recorder:
        for number in range(3):
            model.get_submodule(f"model.layers.{number}.mlp")(states)
    native = [router(states)[2][1].tolist() for router in routers(model)]
    assert recorder.chosen[0].tolist() == [[0, 1]] * 3
    assert recorder.chosen[1].tolist() == native


def test_hooks_leave_with_their_context(toy):
    model, _, _, before = toy
    with pytest.raises(ZeroDivisionError), replaying(model, before.routes.rows[0]), recording(model):
        raise ZeroDivisionError
    assert not any(router._forward_hooks for router in routers(model))


def test_routes_of_another_shape_are_refused(toy):
    model, _, _, before = toy
    wrong = "routes are of 5 layers and 2 experts a token, the model has 6 and 2"
    with pytest.raises(ValueError, match=wrong), replaying(model, before.routes.rows[0, :, :5]):
        pass


@pytest.mark.slow("replays many updates")
@pytest.mark.parametrize("replays", [False, True])
def test_checkpointed_layers_run_again_on_the_same_routes(toy, replays):
    model, _, rows, before = toy
    routes = moved(before.routes, layers=1) if replays else None
    found = []
    for checkpointed in (False, True):
        own = frozen_copy(model).requires_grad_(True)
        if checkpointed:
            switch_checkpoints_on(own)
            own.train()
        with ExitStack() as until:
            score(own, **rows, routes=routes, until=until).logprobs.sum().backward()
        assert not any(router._forward_hooks for router in routers(own))
        found.append(gradient_of(own))
    assert furthest(found[1], found[0]) == 0.0
    if replays:
        with pytest.raises(AssertionError, match="without their routes"):
            score(own, **rows, routes=routes)


# Samplers


def test_a_sampler_that_cannot_record_says_so():
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no experts"):
        EmbeddedSampler(tiny_model(hidden=32, layers=1, intermediate=32), tiny_tokenizer(), record_routes=True)
    other = Gemma2ForCausalLM._from_config(Gemma2Config(**SHAPE, head_dim=4), dtype=torch.float32)
    with pytest.raises(ValueError, match='replay="old_policy"'):
        PlainSampler(other, tiny_tokenizer(), record_routes=True)
    with pytest.raises(ValueError, match='replay="old_policy"'):
        local_sampler(other, tiny_tokenizer(), record_routes=True)


def recorded_groups(model, seed: int = 0) -> list[Group]:
    sampler = EmbeddedSampler(model, tiny_tokenizer(), record_routes=True)
    batch = sampled_batch(sampler.sample(REQUESTS, SamplingOptions(max_tokens=9), seed=seed, step=0))
    return list(batch.groups)


def test_completions_without_routes_are_unknown():
    groups = recorded_groups(small_moe())
    first = groups[0].rollouts[0]
    bare = Rollout(replace(first.completion, routes=None, prompt_routes=None), first.grade)
    group = replace(groups[0], rollouts=(bare, *groups[0].rollouts[1:]))
    batch = to_replay(to_batch([group, *groups[1:]]), "sampler")
    assert (some(batch.routes)[0] == -1).all()
    known = groups[0].rollouts[1].completion
    assert torch.equal(some(batch.routes)[1, : len(known.tokens)], some(known.routes))
    assert torch.equal(batch.prompt_routes[0], some(known.prompt_routes))
    silent = [replace(each, rollouts=(bare,)) for each in groups]
    with pytest.raises(ValueError, match="record_routes=True"):
        to_replay(to_batch(silent), "sampler")
    assert to_replay(to_batch(groups), "old_policy").routes is None


# Training


def off_policy(model, replay, **changes) -> Learner:
    return learner(model, replace(SAPO, kl=KlLoss(0.1)), minibatches=3, epochs=2, replay=replay, **changes)


@pytest.mark.slow("replays many updates")
def test_with_an_exact_sampler_both_replays_are_one():
    """R2 and R3, off-policy over six updates in micro-batches; and both differ from none."""
    weights = {}
    for replay in (None, "old_policy", "sampler"):
        model = small_moe(seed=4)
        trainer = off_policy(model, replay, token_budget=40)
        batch = assemble(recorded_groups(model), [], trainer, 16).batch
        assert (batch.routes is None) == (replay is None)
        updates = list(trainer.updates(batch))
        assert len(updates) == 6
        assert all(("routing_equal" in update.stats.totals) == (replay is not None) for update in updates)
        weights[replay] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    apart = float((weights["sampler"] - weights["old_policy"]).abs().max())
    assert apart < 1e-5 < float((weights[None] - weights["old_policy"]).abs().max())


def test_the_first_minibatch_agrees_and_later_ones_drift():
    model = small_moe(seed=4)
    trainer = off_policy(model, "old_policy", learning_rate=1e-2)
    batch = assemble(random_groups(), [], trainer, 16).batch
    updates = list(trainer.updates(batch))
    shares = [float(each.stats.totals["routing_equal"] / each.stats.totals["routing_positions"]) for each in updates]
    assert shares[0] == 1.0
    assert 0.3 < shares[-1] < 1.0
    consumed = int((batch.lengths[updates[0].rows] - 1).sum())
    assert int(updates[0].stats.totals["routing_positions"]) == consumed


def test_the_reference_is_never_replayed():
    model = small_moe(seed=4)
    trainer = off_policy(model, "sampler")
    batch = to_replay(to_batch(recorded_groups(model)), "sampler")
    spoilt = replace(batch, routes=some(batch.routes).roll(1, 2))
    plain = trainer.reference_logprobs(replace(batch, routes=None, prompt_routes=()))
    assert torch.equal(trainer.reference_logprobs(spoilt), plain)
    assert not torch.allclose(trainer.old_scores(spoilt).logprobs, plain)


def test_an_old_pass_that_records_is_always_run():
    model = small_moe()
    assert not learner(model, SAPO).needs_old_pass()  # one update a step
    assert learner(model, SAPO, replay="old_policy").needs_old_pass()
    assert not learner(model, SAPO, replay="sampler").needs_old_pass()


def test_routes_are_the_old_passes_in_any_micro_batches():
    model, groups = small_moe(), random_groups()
    batches = [
        assemble(groups[:2], groups[2:], learner(model, SAPO, replay="old_policy", token_budget=budget), 16).batch
        for budget in (10_000, 20)
    ]
    assert torch.equal(some(batches[0].routes), some(batches[1].routes))
    for whole, part in zip(batches[0].prompt_routes[:2], batches[1].prompt_routes, strict=False):
        assert torch.equal(whole, part)
        assert (whole >= 0).all()
    consumed = torch.arange(batches[0].tokens.shape[1]) < (batches[0].lengths - 1).unsqueeze(1)
    assert torch.equal((some(batches[0].routes) >= 0).flatten(2).all(-1), consumed)


@pytest.mark.slow("replays many updates")
def test_a_learner_replays_through_checkpointed_layers():
    norms = []
    for checkpointed in (False, True):
        model = small_moe(seed=4)
        trainer = off_policy(model, "old_policy")
        batch = assemble(random_groups(), [], trainer, 16).batch
        if checkpointed:
            switch_checkpoints_on(model)
            model.train()
        norms.append([update.gradient_norm for update in trainer.updates(batch)])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.slow("replays many updates")
@pytest.mark.parametrize(
    ("where", "tokens", "layers"),
    [("completions", 1, 0), ("completions", 0, 1), ("prompts", 1, 0), ("prompts", 0, 1)],
)
def test_a_wrong_replay_is_stopped_before_it_trains(toy, where, tokens, layers):
    model = frozen_copy(toy[0]).requires_grad_(True)
    trainer = learner(model, SAPO, replay="old_policy", minibatches=1)
    right = assemble(random_groups(siblings=6, longest=40), [], trainer, 64).batch
    wrong = moved(Routes(right.prompt_routes, some(right.routes)), tokens, layers)
    spoilt = _spoilt(right, wrong, where)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=f"of the experts replayed for the {where} in layer"):
        trainer.update(spoilt, fresh=True)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    trainer.update(right, fresh=True)


def _spoilt(batch: Batch, wrong: Routes, where: str) -> Batch:
    if where == "prompts":
        return replace(batch, prompt_routes=wrong.prompts)
    return replace(batch, routes=wrong.rows)


def test_a_dense_model_has_nothing_to_replay():
    dense = tiny_model(hidden=32, layers=1, intermediate=32)
    for replay in ("old_policy", "sampler"):
        with pytest.raises(ValueError, match=f"routing_replay is '{replay}', but Qwen3ForCausalLM has no experts"):
            learner(dense, SAPO, replay=replay)


# Runs


def config(model: str, **changes) -> RunConfig:
    small = RunConfig(
        # An untrained model gets nothing right: KL and entropy are what it learns from.
        algorithm=replace(GRPO, extra=EntropyBonus(0.1)),
        task=Arithmetic(held_out=8),
        model=model,
        device="cpu",
        sampling=SamplingOptions(max_tokens=5),
        training=TrainingOptions(groups=4, group_size=4, minibatches=2, learning_rate=3e-3, warmup_steps=0),
        evaluation=EvaluationOptions(problems=4),
        steps=2,
    )
    return replace(small, **changes)


@pytest.mark.slow("trains runs")
@pytest.mark.parametrize(
    ("replay", "sampler"), [("old_policy", Embedded()), ("sampler", Embedded()), ("sampler", Mismatched(lag=1))]
)
@pytest.mark.usefixtures("ordinary_precision")
def test_a_run_replays_and_keeps_the_routes(tmp_path, replay, sampler):
    small_moe().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    settings = config(str(tmp_path / "model"), routing_replay=replay, sampler=sampler)
    assert toml.loads(toml.dumps(settings), RunConfig) == settings
    train(Run(settings, tmp_path / "run", ProgressLines()))
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "routing_overlap" in row]
    assert len(steps) == 2
    assert all(0.5 < row["routing_overlap"] < 1 and 0 < row["routing_changed"] < 1 for row in steps)
    named = {name for row in metrics for name in row if name.startswith("routing")}
    assert named == {"routing_overlap", "routing_changed", "routing_drift", "routing_drift_tokens"}
    for row in pq.read_table(tmp_path / "run" / "rollouts" / "step-000001.parquet").to_pylist():
        assert (row["route_layers"], row["route_experts"]) == (3, 2)
        assert len(row["routes"]) == len(row["tokens"]) * 6
        assert len(row["prompt_routes"]) == len(row["prompt_tokens"]) * 6
        assert row["routes"][-6:] == [-1] * 6
        assert all(0 <= expert < 8 for expert in row["routes"][:-6] + row["prompt_routes"])


def test_a_run_without_replay_keeps_no_routes():
    assert config("somewhere").routing_replay is None
    assert to_batch(random_groups()).routes is None
