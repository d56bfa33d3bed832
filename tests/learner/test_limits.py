"""Where numbers or memory end: nothing that is not finite is applied, and running out of memory changes no result."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import proximo
from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO, Algorithm
from proximo.learner.guard import MIN_NORMS, Update, UpdateGuard
from proximo.learner.learner import Learner
from proximo.learner.memory import smaller_passes
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.losses import GeometricRejection, KeepAll
from proximo.models import tiny_model, tiny_tokenizer
from proximo.models.compiling import checkpoint_on_host, checkpoints
from proximo.models.out_of_memory import explaining_memory, is_out_of_memory
from proximo.models.packing.attention import body, decoder_layers
from proximo.rl.assemble import assemble
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.evidence import skipped_updates
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks.arithmetic import Arithmetic
from proximo.types import Completion, Grade, Group, Problem, Rollout
from proximo.types.batches import Batch
from tests.policies import plain
from tests.rows import read_rows

FIVE = {"PPO": PPO, "GRPO": GRPO, "DAPO": DAPO, "GSPO": GSPO, "SAPO": SAPO}
five = pytest.mark.parametrize("algorithm", FIVE.values(), ids=FIVE.keys())
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def learner(algorithm: Algorithm, layers: int = 1, **options) -> Learner:
    settings = replace(LearnerOptions(groups=4, minibatches=2, warmup_steps=0, learning_rate=1e-2), **options)
    model = tiny_model(hidden=16, layers=layers, heads=2, kv_heads=1, intermediate=32, seed=1).double()
    torch.manual_seed(0)
    return Learner(PlainPolicy(model), algorithm, settings, temperature=1.0, seed=0)


def groups(count: int = 4, outcomes: tuple[float, ...] = (1.0, 0.0, 0.0), lengths=(3, 5, 2)) -> list[Group]:
    found = []
    for number in range(count):
        said = [tuple(range(5 + number, 5 + number + length)) for length in lengths]
        rollouts = [
            Rollout(Completion(tokens, (-4.0,) * len(tokens), "said", "stop"), Grade(outcome))
            for tokens, outcome in zip(said, outcomes, strict=True)
        ]
        found.append(Group(Problem(f"p{number}", "p", None), (9, 8 + number), tuple(rollouts)))
    return found


def state_of(trainer: Learner) -> list[Tensor]:
    """Weights and everything the optimizer remembers."""
    parameters = [*plain(trainer).parameters().values(), *plain(trainer).value_parameters().values()]
    return [each.detach().clone() for each in (*parameters, *plain(trainer).tensors()["optimizer"].values())]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def poked(tensor: Tensor, value: float, row: int = 1, place: int = 0) -> Tensor:
    changed = tensor.clone()
    changed[row, place] = value
    return changed


# Not finite: six places, five algorithms, three values


def in_advantage(trainer: Learner, batch: Batch, value: float) -> Batch:
    return replace(batch, advantages=poked(batch.advantages, value))


def in_old_logprob(trainer: Learner, batch: Batch, value: float) -> Batch:
    return replace(batch, old_logprobs=poked(batch.old_logprobs, value))


def in_logit(trainer: Learner, batch: Batch, value: float) -> Batch:
    """One hidden state is all that the logits of one token are made of."""
    last = body(trainer.model).get_submodule("norm")

    def poke(module, given, states) -> Tensor:
        flat = states.reshape(-1, states.shape[-1]).clone()
        flat[1] = value  # the end of the first prompt
        return flat.reshape(states.shape)

    last.register_forward_hook(poke)
    return batch


def in_gradient(trainer: Learner, batch: Batch, value: float) -> Batch:
    weight = next(iter(trainer.model.parameters()))
    weight.register_hook(lambda gradient: poked(gradient, value))
    return batch


def in_loss(trainer: Learner, batch: Batch, value: float) -> Batch:
    whole = trainer.gradients.loss

    def broken(rows, scores, old, plan):
        loss, stats = whole(rows, scores, old, plan)
        return loss + value, replace(stats, totals=stats.totals | {"loss": stats.totals["loss"] + value})

    trainer.gradients.loss = broken
    return batch


PLACES = [in_advantage, in_old_logprob, in_logit, in_gradient, in_loss]


@cache
def after_one_update(algorithm: Algorithm) -> tuple[Learner, Batch]:
    """So that the optimizer has something to lose. To be copied: the same for all who ask."""
    trainer = learner(algorithm)
    batch = assemble(groups(), [], trainer, 8).batch
    assert trainer.update(batch, fresh=True).skipped is None
    return trainer, batch


@pytest.mark.slow("trains where memory ends")
@five
@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_one_number_that_is_not_finite_changes_nothing(place: Callable, value: float, algorithm: Algorithm):
    trainer, batch = deepcopy(after_one_update(algorithm))
    before, version = state_of(trainer), trainer.version
    update = trainer.update(place(trainer, batch, value), fresh=False)
    assert update.skipped is not None
    assert "not finite" in update.skipped.reason
    assert same(before, state_of(trainer))
    assert trainer.version == version
    assert trainer.guard.in_a_row == 1


def test_an_update_in_which_nothing_takes_part_moves_no_weight():
    """The momentum of earlier updates would: all tokens rejected, or no advantage in the whole step."""
    trainer = learner(replace(GRPO, kl=None, correct=GeometricRejection()))
    batch = assemble(groups(), [], trainer, 8).batch
    trusted = replace(batch, rollout_logprobs=batch.old_logprobs)
    assert not trainer.update(trusted, fresh=True).is_idle
    before = state_of(trainer)
    rejected = trainer.update(batch, fresh=False)
    assert (rejected.is_idle, rejected.skipped, rejected.gradient_norm) == (True, None, 0.0)
    assert rejected.stats.floats()["rejected"] == 1
    dead = replace(trusted, advantages=torch.zeros_like(batch.advantages))
    assert all(each.is_idle for each in trainer.updates(dead))
    assert same(before, state_of(trainer))
    # A minibatch without an advantage is a part of a step that has some: there the optimizer goes on.
    assert not trainer.update(dead, fresh=False).is_idle
    assert not same(before, state_of(trainer))


@five
def test_without_a_fault_the_same_update_is_applied(algorithm: Algorithm):
    """The control of the test above."""
    trainer, batch = deepcopy(after_one_update(algorithm))
    before = state_of(trainer)
    assert trainer.update(batch, fresh=False).skipped is None
    assert not same(before, state_of(trainer))
    assert trainer.guard.in_a_row == 0


@pytest.mark.slow("trains where memory ends")
@five
@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
def test_a_reward_that_is_not_finite_leaves_its_completion_out_and_nobody_else(algorithm: Algorithm, value: float):
    whole, others = learner(algorithm), learner(algorithm)
    spoilt = groups(outcomes=(1.0, 0.0, value))
    batch = assemble(spoilt, [], whole, 8).batch
    without = [replace(group, rollouts=group.rollouts[:2]) for group in spoilt]
    expected = assemble(without, [], others, 8).batch
    torch.testing.assert_close(batch.advantages, expected.advantages, rtol=0, atol=1e-12)
    assert len(batch) == 8
    for trainer, rows in ((whole, batch), (others, expected)):
        assert trainer.update(rows, fresh=True).skipped is None
    for ours, theirs in zip(list(plain(whole).parameters().values()), plain(others).parameters().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@five
def test_a_finite_reward_whose_square_is_not_is_no_silent_success(algorithm: Algorithm):
    trainer = learner(algorithm)
    batch = assemble(groups(outcomes=(1e200, 0.0, 1.0)), [], trainer, 8).batch
    before = state_of(trainer)
    update = trainer.update(batch, fresh=True)
    if update.skipped is None:  # spread over by an infinite standard deviation: advantages of 0
        assert bool(batch.advantages.isfinite().all())
        assert math.isfinite(update.gradient_norm)
    else:
        assert same(before, state_of(trainer))


@pytest.mark.slow("trains where memory ends")
@five
@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
def test_what_is_masked_may_hold_anything(algorithm: Algorithm, value: float):
    """A token that does not train, with a number that is not finite in all that is known about it."""
    results = []
    for stands_there in (0.0, value):
        trainer = learner(algorithm)
        batch = assemble(groups(), [], trainer, 8).batch
        mask = batch.mask.clone()
        mask[1, 4] = False
        names = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "returns")
        known = {name: tensor for name in names if (tensor := getattr(batch, name)) is not None}
        spoilt = {name: poked(tensor, stands_there, row=1, place=4) for name, tensor in known.items()}
        update = trainer.update(replace(batch, mask=mask, **spoilt), fresh=False)
        assert update.skipped is None
        assert math.isfinite(update.gradient_norm)
        results.append(state_of(trainer))
    assert same(*results)


def test_the_controller_of_the_kl_does_not_take_what_is_not_finite():
    from proximo.losses import AdaptiveKl, KlReward

    trainer = learner(replace(PPO, shape=KlReward(0.1, controller=AdaptiveKl(target=1.0, horizon=4))))
    trainer.adapt_kl(math.nan, 4)
    assert trainer.kl_reward is not None
    assert trainer.kl_reward.coefficient == 0.1


def test_the_next_update_is_as_if_the_skipped_one_had_never_been():
    results = []
    for faulty in (True, False):
        trainer = learner(GRPO)
        batch = assemble(groups(), [], trainer, 8).batch
        trainer.update(batch, fresh=True)
        if faulty:
            assert trainer.update(in_advantage(trainer, batch, math.nan), fresh=False).skipped is not None
        trainer.update(batch, fresh=False)
        results.append(state_of(trainer))
    assert same(*results)


def test_the_value_models_own_update_is_guarded_too():
    trainer = learner(PPO)
    batch = assemble(groups(), [], trainer, 8).batch
    assert trainer.update_value(batch).skipped is None
    before = state_of(trainer)
    assert batch.returns is not None
    assert trainer.update_value(replace(batch, returns=poked(batch.returns, math.nan))).skipped is not None
    assert same(before, state_of(trainer))


# Evidence


def test_evidence_names_the_rows_and_the_parameters_at_fault(tmp_path: Path):
    trainer = learner(GRPO)
    batch = assemble(groups(), [], trainer, 8).batch
    bad_row = trainer.update(in_advantage(trainer, batch, math.inf), fresh=True)
    fine = trainer.update(batch, fresh=True)
    bad_gradient = trainer.update(in_gradient(trainer, batch, math.nan), fresh=False)
    spoilt = replace(batch, advantages=poked(batch.advantages, math.inf))
    first, last = skipped_updates(tmp_path, 12, spoilt, [bad_row, fine, bad_gradient])
    assert first.kind == last.kind == "skipped_update"
    assert "evidence/step-000012-update-0.json" in first.message
    assert "advantages holds a number that is not finite" in first.message
    found = json.loads((tmp_path / "evidence" / "step-000012-update-0.json").read_text())
    [row] = found["rows"]
    assert row["problem"] == "p0"
    assert row["text"] == "said"
    assert row["advantages"][0] == "inf"
    assert row["tokens"] == [5, 6, 7, 8, 9]
    found = json.loads((tmp_path / "evidence" / "step-000012-update-2.json").read_text())
    assert len(found["rows"]) == 12
    assert found["parameters"] == ["model.embed_tokens.weight"]
    assert found["gradient_norm"] == "nan"


def test_evidence_that_cannot_be_written_does_not_end_a_run(tmp_path: Path):
    trainer = learner(GRPO)
    batch = assemble(groups(), [], trainer, 8).batch
    update = trainer.update(in_advantage(trainer, batch, math.nan), fresh=True)
    (tmp_path / "evidence").write_text("a file in its place")
    [notice] = skipped_updates(tmp_path, 0, batch, [update])
    assert "could not be written" in notice.message


# Spikes


def norms_seen(guard: UpdateGuard, batch: Batch, *norms: float) -> list[bool]:
    """Which of these gradients would be skipped, one after the other."""
    from proximo.learner.guard import GradientPass

    return [guard._refused(batch, GradientPass(), [norm, 0.0]) is not None for norm in norms]


def guard(**options) -> tuple[UpdateGuard, Batch]:
    trainer = learner(GRPO, **options)
    return trainer.guard, assemble(groups(), [], trainer, 8).batch


def test_a_spike_is_skipped_and_does_not_move_the_median():
    watch, batch = guard(skip_spikes=10.0)
    assert not any(norms_seen(watch, batch, *[2.0] * MIN_NORMS))
    assert norms_seen(watch, batch, 20.0, 20.1, 1e6, 1e6, 20.1) == [False, True, True, True, True]
    assert watch.in_a_row == 4
    assert norms_seen(watch, batch, 2.0) == [False]
    assert watch.in_a_row == 0


def test_the_first_updates_and_gradients_of_zero_say_nothing():
    watch, batch = guard(skip_spikes=10.0)
    assert not any(norms_seen(watch, batch, *[0.0] * 50, *[1.0] * (MIN_NORMS - 1), 1e6))
    # The 1e6 is the last of MIN_NORMS: from now on there is a median, and it is 1.
    assert norms_seen(watch, batch, 0.0, 11.0) == [False, True]


def test_by_default_a_spike_is_applied_and_reported_once():
    watch, batch = guard()
    assert not any(norms_seen(watch, batch, *[1.0] * MIN_NORMS, 101.0, 500.0, 1.0, 99.0, 101.0))
    first, second = watch.take_notices()
    assert first.kind == "spike"
    assert "101 times the median" in first.message
    assert "training.skip_spikes" in first.message
    assert "101 times" in second.message
    assert watch.take_notices() == []


def test_a_skipped_spike_leaves_weights_and_optimizer_alone():
    trainer = learner(GRPO, skip_spikes=20.0)
    batch = assemble(groups(), [], trainer, 8).batch
    for _ in range(MIN_NORMS):
        assert trainer.update(batch, fresh=False).skipped is None
    before = state_of(trainer)
    handles = [each.register_hook(lambda gradient: 1e6 * gradient) for each in trainer.model.parameters()]
    update = trainer.update(batch, fresh=False)
    assert update.skipped is not None
    assert "times the median" in update.skipped.reason
    assert same(before, state_of(trainer))
    assert trainer.version == MIN_NORMS  # of the updates that were applied
    for handle in handles:
        handle.remove()
    assert trainer.update(batch, fresh=False).skipped is None


def test_the_guards_state_goes_through_json():
    watch, batch = guard(skip_spikes=10.0)
    norms_seen(watch, batch, *[2.0] * MIN_NORMS, 1e9)
    watch.max_tokens = 77
    other, _ = guard(skip_spikes=10.0)
    other.load(json.loads(json.dumps(watch.state())))
    assert other.state() == watch.state()
    assert norms_seen(other, batch, 20.0, 20.1) == [False, True]
    assert (other.in_a_row, other.max_tokens) == (1, 77)


def test_too_many_in_a_row_end_the_run():
    watch, batch = guard(skip_spikes=10.0, max_skipped=2)
    norms_seen(watch, batch, *[1.0] * MIN_NORMS, 1e9)
    watch.check()
    norms_seen(watch, batch, 1e9)
    with pytest.raises(ValueError, match=r"2 updates in a row were skipped .*evidence.*learning_rate"):
        watch.check()


@pytest.mark.parametrize("value", [1.0, 0.0, -3.0, math.nan])
def test_a_multiple_that_makes_no_sense_is_refused(value: float):
    with pytest.raises(ValueError, match="training.skip_spikes is"):
        TrainingOptions(skip_spikes=value)


# Memory


def runs_out_over(trainer: Learner, tokens: int, error: Exception) -> list[int]:
    """From now on the model fails in a pass over more tokens than this; how many there were each time."""
    failed: list[int] = []

    def fail(module, given):
        if given[0].numel() > tokens:
            failed.append(given[0].numel())
            raise error

    body(trainer.model).get_submodule("embed_tokens").register_forward_pre_hook(fail)
    return failed


OUT = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to"),
    "python": MemoryError(),
}


@pytest.mark.slow("trains where memory ends")
@five
@pytest.mark.parametrize("error", OUT.values(), ids=OUT.keys())
def test_out_of_memory_in_an_update_halves_the_passes_and_changes_nothing_else(algorithm: Algorithm, error: Exception):
    plain, short = learner(algorithm, minibatches=1), learner(algorithm, minibatches=1)
    batches = [assemble(groups(), [], each, 8).batch for each in (plain, short)]
    failed = runs_out_over(short, 20, error)  # four groups have 12 tokens each; the last of a completion is not run
    updates: list[Update] = []
    for trainer, batch in zip((plain, short), batches, strict=True):
        updates.append([trainer.update(batch, fresh=True), trainer.update(batch, fresh=False)][1])
    assert failed == [36]  # once: the smaller budget is kept
    assert short.passes.token_budget == short.guard.max_tokens == 24
    for ours, theirs in zip(state_of(short), state_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    torch.testing.assert_close(updates[0].logprobs, updates[1].logprobs, rtol=0, atol=1e-9)
    [notice] = short.guard.take_notices()
    assert notice.kind == "out_of_memory"
    assert "training.token_budget = 24" in notice.message
    assert plain.guard.take_notices() == []


@pytest.mark.slow("trains where memory ends")
@five
def test_out_of_memory_before_the_updates(algorithm: Algorithm):
    plain, short = learner(algorithm), learner(algorithm)
    failed = runs_out_over(short, 20, OUT["cuda"])
    expected, batch = (assemble(groups(), [], each, 8).batch for each in (plain, short))
    assert failed == [36]
    torch.testing.assert_close(batch.old_logprobs, expected.old_logprobs, rtol=0, atol=1e-6)
    assert short.passes.token_budget == 24


def test_out_of_memory_in_the_references_pass():
    trainer = learner(GRPO)
    reference = plain(trainer).reference
    assert reference is not None
    batch = assemble(groups(), [], trainer, 8).batch
    other = learner(GRPO)
    plain(other).model = reference
    failed = runs_out_over(other, 20, OUT["cpu"])
    again = trainer.reference_logprobs(batch)
    assert failed == [36]
    assert batch.ref_logprobs is not None
    torch.testing.assert_close(again, batch.ref_logprobs, rtol=0, atol=1e-6)


def test_gradients_of_passes_before_the_one_that_failed_are_dropped():
    plain, short = learner(GRPO, minibatches=1), learner(GRPO, minibatches=1, token_budget=24)
    batches = [assemble(groups(), [], each, 8).batch for each in (plain, short)]
    passes: list[int] = []

    def fail(module, given):
        passes.append(given[0].numel())
        if len(passes) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    body(short.model).get_submodule("embed_tokens").register_forward_pre_hook(fail)
    for trainer, batch in zip((plain, short), batches, strict=True):
        trainer.update(batch, fresh=True)
    assert passes == [18, 18, 9, 9, 9, 9]
    for ours, theirs in zip(state_of(short), state_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def gradients_of(trainer: Learner) -> list[Tensor]:
    return [each.grad for each in trainer.model.parameters() if each.grad is not None]


@pytest.mark.slow("trains where memory ends")
def test_a_group_that_does_not_fit_is_split():
    plain, short = learner(GRPO, minibatches=1), learner(GRPO, minibatches=1)
    batches = [assemble(groups(), [], each, 8).batch for each in (plain, short)]
    failed = runs_out_over(short, 8, OUT["cuda"])  # a group has 9 tokens that are run, its longest row has 6
    for trainer, batch in zip((plain, short), batches, strict=True):
        trainer.update(batch, fresh=True)
    assert failed == [36, 18, 9]
    assert (short.passes.token_budget, short.passes.checkpointed) == (6, 0)
    for ours, theirs in zip(gradients_of(short), gradients_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)  # the model's norms are in float32
    assert "larger groups are split" in short.guard.take_notices()[-1].message


@pytest.mark.slow("trains where memory ends")
def test_a_completion_that_does_not_fit_is_checkpointed_and_offloaded():
    """Five layers, so two more each time."""
    plain, short = (learner(GRPO, layers=5, minibatches=1) for _ in range(2))
    batches = [assemble(groups(), [], each, 8).batch for each in (plain, short)]
    layers: Any = decoder_layers(short.model)
    failed: list[int] = []

    def fail(module, given):
        number = sum(layer.gradient_checkpointing for layer in layers)
        if number < 5 or layers[0]._gradient_checkpointing_func.func is not checkpoint_on_host:
            failed.append(number)
            raise OUT["cuda"]

    body(short.model).get_submodule("embed_tokens").register_forward_pre_hook(fail)
    for trainer, batch in zip((plain, short), batches, strict=True):
        trainer.update(batch, fresh=True)
    assert failed == [0, 0, 0, 0, 2, 4, 5]
    assert (short.passes.token_budget, short.passes.checkpointed, short.passes.offloaded) == (6, 5, True)
    for ours, theirs in zip(gradients_of(short), gradients_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    messages = [notice.message.split("same result: ")[1] for notice in short.guard.take_notices()]
    assert [message.split(" from now on")[0] for message in messages] == [
        "all passes have 24 tokens at most",
        "all passes have 12 tokens at most",
        "all passes have 6 tokens at most",
        "2 of 5 layers run again in the backward pass",
        "4 of 5 layers run again in the backward pass",
        "5 of 5 layers run again in the backward pass",
        "what checkpointed layers keep waits in the host's memory",
    ]


@pytest.mark.slow("trains where memory ends")
def test_a_single_completion_that_does_not_fit_ends_in_a_hint():
    trainer = learner(GRPO)
    batch = assemble(groups(), [], trainer, 8).batch
    before = state_of(trainer)
    failed = runs_out_over(trainer, 5, OUT["cuda"])
    said = r"single completion and its prompt \(CUDA out of memory.*\), with all layers checkpointed and offloaded"
    with pytest.raises(ValueError, match=said + ".*cannot be split.*sampling.max_tokens"):
        trainer.update(batch, fresh=True)
    # Halves, then single rows: with every layer kept, checkpointed, and offloaded.
    assert failed == [36, 18, 9, 6, 6, 6]
    assert same(before, state_of(trainer))


@pytest.mark.slow("trains where memory ends")
def test_without_a_gradient_nothing_is_checkpointed():
    """Nothing is kept there anyway."""
    trainer = learner(GRPO)
    failed = runs_out_over(trainer, 5, OUT["cuda"])
    with pytest.raises(ValueError, match=r"single completion and its prompt \(CUDA out of memory[^)]*\): it cannot be"):
        assemble(groups(), [], trainer, 8)
    assert failed == [36, 18, 9, 6]
    assert not checkpoints(trainer.model)


def test_another_failure_is_nobody_elses():
    trainer = learner(GRPO)
    batch = assemble(groups(), [], trainer, 8).batch
    runs_out_over(trainer, 20, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        trainer.update(batch, fresh=True)
    assert trainer.guard.take_notices() == []


def test_a_lowered_budget_outlives_a_new_plan_and_a_new_process(monkeypatch):
    from proximo.learner import memory

    trainer = learner(GRPO, minibatches=1)
    batch = assemble(groups(), [], trainer, 8).batch
    runs_out_over(trainer, 20, OUT["cuda"])
    trainer.update(batch, fresh=True)
    monkeypatch.setattr(memory, "is_planned_on", lambda _: True)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 2**40)
    trainer.plan_memory(batch)  # a machine with room for all
    trainer.update(batch, fresh=False)
    assert trainer.passes.token_budget == 24
    again = learner(GRPO, minibatches=1)
    again.guard.load(trainer.guard.state())
    again.update(batch, fresh=True)
    assert again.passes.token_budget == 24


def test_halves_by_hand():
    trainer = learner(GRPO)
    batch = assemble(groups(), [], trainer, 8).batch
    budgets = []
    passes = trainer.passes
    while (smaller := smaller_passes(passes, batch)) is not None:
        budgets.append((smaller.token_budget, len(list(smaller.parts(batch)))))
        passes = smaller
    # A group has 2 + 3 + 5 + 2 tokens: with 6 in a pass each row is alone, the longest with its 2 + 5.
    assert budgets == [(24, 2), (12, 4), (6, 12)]
    steps = []
    while (smaller := smaller_passes(passes, batch, layers=6)) is not None:
        steps.append((smaller.token_budget, smaller.checkpointed, smaller.offloaded))
        passes = smaller
    # A quarter of the layers at a time.
    assert steps == [(6, 2, False), (6, 4, False), (6, 6, False), (6, 6, True)]


def test_completions_without_tokens_are_a_pass_that_cannot_be_smaller():
    trainer = learner(GRPO, token_budget=1)
    batch = assemble(groups(lengths=(0, 0, 0), outcomes=(1.0, 0.0, 0.0)), [], trainer, 8).batch
    assert smaller_passes(trainer.passes, batch) is None


def test_what_allocators_say_is_understood():
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**55)
    assert is_out_of_memory(failure.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
    with (
        pytest.raises(ValueError, match=r"out of memory \(MemoryError\): sleep more"),
        explaining_memory("sleep more"),
    ):
        raise MemoryError
    with pytest.raises(KeyError), explaining_memory("sleep more"):
        raise KeyError


# Batches with nothing in them: each of the five algorithms, six kinds


def case_of(kind: str) -> list[Group]:
    if kind == "group of one":
        return groups(outcomes=(1.0,), lengths=(3,))
    if kind == "all rewards equal":
        return groups(outcomes=(1.0, 1.0, 1.0))
    if kind == "one group without variance":
        return [*groups(3), groups(4, outcomes=(0.0, 0.0, 0.0))[3]]
    if kind == "a completion without tokens":
        return groups(lengths=(3, 0, 2))
    return groups()


KINDS = ("a completion without tokens", "all masked", "group of one", "one group without variance", "log-ratio ±100")


@five
@pytest.mark.parametrize("kind", [*KINDS, "all rewards equal"])
def test_degenerate_batches_are_finite(kind: str, algorithm: Algorithm):
    trainer = learner(replace(algorithm, keep=KeepAll()))  # DAPO's keep would leave nothing of some
    said = case_of(kind)
    batch = assemble(said, [], trainer, 8).batch
    if kind == "all masked":
        batch = replace(batch, mask=torch.zeros_like(batch.mask))
    if kind == "log-ratio ±100":
        signs = torch.tensor([100.0, -100.0]).repeat(len(batch))[: len(batch), None]
        batch = replace(batch, old_logprobs=batch.old_logprobs + signs.float())
    assert bool(batch.advantages.isfinite().all())
    update = trainer.update(batch, fresh=True)
    assert update.skipped is None
    assert all(map(math.isfinite, update.stats.floats().values()))
    assert math.isfinite(update.gradient_norm)
    assert all(bool(each.isfinite().all()) for each in state_of(trainer))
    if trainer.critic is None and kind in ("group of one", "all rewards equal"):
        assert not batch.advantages.any()
    if trainer.critic is None and kind == "one group without variance":
        assert batch.advantages.any(dim=1).tolist() == [True] * 9 + [False] * 3
    if kind == "all masked" and not algorithm.kl:
        assert update.gradient_norm == 0.0


@five
def test_a_loss_of_nothing_is_zero(algorithm: Algorithm):
    for rows in (0, 2):
        logprobs = torch.zeros(rows, 3, requires_grad=True)
        loss, _ = proximo.policy_loss(
            algorithm,
            logprobs=logprobs,
            old_logprobs=torch.zeros(rows, 3),
            advantages=torch.ones(rows, 3),
            mask=torch.zeros(rows, 3, dtype=torch.bool),
            group=torch.zeros(rows, dtype=torch.long),
            ref_logprobs=torch.zeros(rows, 3),
        )
        assert float(loss.detach()) == 0.0
        loss.backward()
        assert logprobs.grad is not None
        assert not logprobs.grad.any()


# Whole runs


def run_of(folder: Path, **changes) -> Run:
    small = RunConfig(
        algorithm=GRPO,
        task=Arithmetic(held_out=4),
        model="tiny-arithmetic",
        device="cpu",
        sampling=SamplingOptions(max_tokens=4),
        training=TrainingOptions(groups=4, group_size=4, minibatches=2, learning_rate=1e-3),
        evaluation=EvaluationOptions(problems=2),
        steps=3,
    )
    return Run(replace(small, **changes), folder, ProgressLines())


@pytest.mark.usefixtures("ordinary_precision")
def test_a_run_whose_gradients_break_skips_counts_keeps_evidence_and_ends(tmp_path: Path, capsys):
    run = run_of(tmp_path)
    before = [each.detach().clone() for each in run.model.parameters()]
    next(iter(run.model.parameters())).register_hook(lambda gradient: poked(gradient, math.nan))
    with pytest.raises(ValueError, match=r"6 updates in a row were skipped \(training.max_skipped is 5\)"):
        train(run)
    assert all(map(torch.equal, before, run.model.parameters()))
    steps = [row for row in read_rows(tmp_path / "metrics.jsonl") if "updates" in row]
    assert [(row["updates"], row["skipped_updates"]) for row in steps] == [(2, 2)] * 3
    assert not any("policy_loss" in row for row in steps)  # of updates that were applied
    events = read_rows(tmp_path / "events.jsonl")
    assert [row["kind"] for row in events] == ["skipped_update"] * 6
    assert len(list((tmp_path / "evidence").iterdir())) == 6
    assert "evidence/step-000001-update-0.json" in capsys.readouterr().err


@pytest.mark.slow("trains where memory ends")
@pytest.mark.usefixtures("ordinary_precision")
def test_a_run_that_runs_out_of_memory_goes_on_in_smaller_passes(tmp_path: Path):
    plain = run_of(tmp_path / "plain")
    train(plain)
    short = run_of(tmp_path / "short")
    # Only where a gradient is asked for: the sampler uses the model, too.
    failed: list[int] = []

    def fail(module, given) -> None:
        if torch.is_grad_enabled() and given[0].numel() > 30:
            failed.append(given[0].numel())
            raise torch.OutOfMemoryError("CUDA out of memory")

    body(short.model).get_submodule("embed_tokens").register_forward_pre_hook(fail)
    train(short)
    assert failed
    events = read_rows(tmp_path / "short" / "events.jsonl")
    assert [row["kind"] for row in events] == ["out_of_memory"] * len(failed)
    for ours, theirs in zip(short.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    state = tmp_path / "short" / "checkpoints" / "step-000003" / "state" / "run_state.json"
    assert json.loads(state.read_text())["parts"]["learner"]["guard"]["max_tokens"] == short.learner.passes.token_budget


@pytest.mark.usefixtures("ordinary_precision")
def test_sampling_that_runs_out_of_memory_says_what_to_make_smaller(tmp_path: Path, monkeypatch):
    run = run_of(tmp_path)

    def stream(*given, **named):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(run.samplers.evaluation, "stream", stream)
    with pytest.raises(ValueError, match=r"Tried to allocate 9 GiB.*sampling.max_tokens.*training.group_size"):
        train(run)


@pytest.mark.usefixtures("ordinary_precision")
def test_dynamic_sampling_that_never_fills_ends_each_step_with_a_diagnosis(tmp_path: Path):
    """A model that knows nothing is wrong about everything."""
    policy = tmp_path / "policy"
    tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=32, seed=1).save_pretrained(policy)
    tiny_tokenizer().save_pretrained(policy)
    training = TrainingOptions(groups=2, group_size=2, minibatches=1, refill_rounds=3)
    run = run_of(tmp_path / "run", algorithm=DAPO, model=str(policy), training=training, steps=2)
    train(run)
    steps = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "updates" in row]
    assert [(row["rounds"], row["updates"], row["dead_groups"]) for row in steps] == [(3, 0, 1.0)] * 2
    events = read_rows(tmp_path / "run" / "events.jsonl")
    assert [row["kind"] for row in events] == ["empty_step", "empty_step", "finding"]
    assert "groups of 3 rounds, as KeepMixed does" in events[0]["message"]
    assert "too hard or too easy" in events[0]["message"]
