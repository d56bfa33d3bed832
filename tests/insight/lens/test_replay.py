"""Stored steps replayed: the run's own loss to 1e-6, other algorithms beside it, parameters, and the command."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from proximo.algorithms import CLIP_COV, DAPO, GRPO, GSPO, PPO, SAPO, Algorithm, explain
from proximo.cli import main
from proximo.insight.folder import RunFolder
from proximo.insight.lens.gradients import _halves, check_tokens, half_gradients, parameter_gradients
from proximo.insight.lens.lens import look, policy_loss
from proximo.insight.lens.replay import (
    FIVE,
    OWN_ALGORITHM,
    chosen,
    compared,
    max_flipped,
    own_name,
    remarks,
    token_table,
)
from proximo.insight.lens.states import BLOCKED, TokenState
from proximo.losses import Clip, ClipCovariance, CurrentPolicy, GeometricClip, IcePop, TokenTruncated, TopEntropy
from proximo.models import load_model, load_tokenizer, tiny_model, tiny_moe, tiny_tokenizer
from proximo.models.shipped import resolve
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.options import CheckpointOptions
from proximo.samplers.mismatched import Mismatched
from proximo.samplers.sampler import SamplingOptions
from tests.fixture import ADVANTAGES, LOG_RATIO, MASK, OLD, assert_close
from tests.steps import batch_of, config, fixture_batch, fixture_step, stored, update

A = math.sqrt(3) / 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Callable[..., RunFolder]:
    """Small real runs, each made once."""
    made: dict[str, RunFolder] = {}

    def run(name: str, algorithm: Algorithm, *, steps: int = 1, **changes) -> RunFolder:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = _trained(folder, algorithm, steps, changes)
        return made[name]

    return run


def _trained(folder: Path, algorithm: Algorithm, steps: int, changes: dict) -> RunFolder:
    """Far enough from where it samples for gates to act."""
    training = {"groups": 4, "group_size": 4, "minibatches": 2, "learning_rate": 3e-3, "warmup_steps": 0}
    if isinstance(algorithm.anchor, CurrentPolicy):
        training["minibatches"] = 1
    small = RunConfig(
        algorithm=algorithm,
        device="cpu",
        sampling=SamplingOptions(max_tokens=6),
        training=TrainingOptions(**(training | changes.pop("training", {}))),
        evaluation=EvaluationOptions(problems=1),
        steps=steps,
        **changes,
    )
    torch.set_default_dtype(torch.float32)
    try:
        train(Run(small, folder, ProgressLines()))
    finally:
        torch.set_default_dtype(torch.float64)
    return RunFolder(folder)


def saved_teacher(folder: Path) -> str:
    tiny_model(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, seed=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


# The run's own algorithm


def assert_reproduced(run: RunFolder, number: int) -> list[TokenState]:
    """The step's loss and each update's, as they were logged; the states there are."""
    step, own = run.step(number), run.config.algorithm
    logged = dict(run.curve("policy_loss"))[number]
    replayed = policy_loss(step, own, run.config)
    assert replayed == pytest.approx(logged, rel=0, abs=1e-6)
    looks = [look(step, own, run.config, number=each) for each in range(step.passes)]
    losses = {place: loss for seen in looks for place, loss in seen.losses.items()}
    assert sorted(losses) == list(range(len(step.metadata["updates"])))
    for place, loss in losses.items():
        known = step.metadata["updates"][place]["policy_loss"]
        assert loss == pytest.approx(known or 0.0, rel=0, abs=1e-6)  # None: all rows of it were dead
    return [TokenState(state) for seen in looks for state in seen.state.unique().tolist()]


@pytest.mark.slow("replays steps of many algorithms")
@pytest.mark.parametrize("card", explain.CARDS, ids=lambda card: card.name)
def test_a_step_replayed_under_its_own_algorithm_has_the_logged_loss(card, runs, tmp_path):
    more = {"teacher": saved_teacher(tmp_path)} if card.name == "distill" else {}
    found = assert_reproduced(runs(card.name, card.value, **more), 1)
    if isinstance(card.value.gate, Clip | GeometricClip) and not isinstance(card.value.anchor, CurrentPolicy):
        assert set(found) & set(BLOCKED)  # otherwise it would say little


GENTLY = {"learning_rate": 1e-4}
OTHERS = {
    # algorithm, steps, and what else differs
    "epochs": (replace(SAPO, gate=Clip(0.2, 0.28, dual=2.0)), 1, {"training": {"epochs": 2}}),
    "single": (GRPO, 1, {"training": {"minibatches": 1}}),
    "mismatch": (replace(GRPO, correct=TokenTruncated(1.1)), 2, {"sampler": Mismatched(lag=1), "training": GENTLY}),
    "value": (PPO, 2, {"value": ValueOptions(pretrain_steps=1)}),
    # Dead rows are not trained on, but were among those that were chosen from.
    "ranked": (replace(SAPO, select=TopEntropy(0.5)), 1, {}),
    "covariant": (replace(SAPO, select=ClipCovariance(share=0.2, low=0.0)), 1, {}),
    # Its draw depends on how many updates there were before.
    "select": (replace(CLIP_COV, select=ClipCovariance(share=0.2, low=-5.0)), 2, {"training": GENTLY}),
}


def other(runs: Callable[..., RunFolder], name: str) -> RunFolder:
    algorithm, steps, changes = OTHERS[name]
    return runs(name, algorithm, steps=steps, **changes)


@pytest.mark.slow("replays steps of many algorithms")
@pytest.mark.parametrize("name", OTHERS)
def test_so_has_one_of_another_kind(name, runs):
    """Several passes, one update, a sampler of its own, a value model, tokens that are chosen among all."""
    algorithm, steps, _ = OTHERS[name]
    run = other(runs, name)
    found = assert_reproduced(run, steps)
    step = run.step(steps)
    if name == "epochs":
        assert step.passes == 2
        assert TokenState.HIGH in found
    elif name == "mismatch":
        assert look(step, algorithm, run.config).correction.unique().numel() > 3
    elif name == "select":
        assert TokenState.DROPPED in found
        assert step.metadata["updates"][0]["version"] == 2
    elif name in ("ranked", "covariant"):
        assert TokenState.DROPPED in found
        assert run.rows("metrics.jsonl")[1]["dead_rows"] > 0
    elif name == "value":
        assert run.step(1).is_value_only
        assert policy_loss(run.step(1), algorithm, run.config) is None
    else:
        assert_close(look(step, algorithm, run.config).ratio, torch.ones_like(step.batch.old_logprobs))


@pytest.mark.slow("replays many updates")
def test_a_value_models_run_is_looked_at_through_siblings_and_the_other_way_round(runs):
    run = other(runs, "value")
    views = {view.name: view for view in compared(run.step(2), run.config, chosen(run.config, FIVE))}
    assert views["ppo"].is_own
    anew = "the advantages are computed again by GroupNormalized from the stored data"
    assert anew in views["grpo"].seen.notes
    assert len(views["grpo"].seen.advantages[run.step(2).layout.of(0)].unique()) == 1  # one for all its tokens
    group = runs("grpo", GRPO)
    views = {view.name: view for view in compared(group.step(1), group.config, chosen(group.config, FIVE))}
    assert views["ppo"].seen.notes == ("no values were stored: the advantages are the run's own",)
    assert torch.equal(views["ppo"].seen.advantages, views["grpo"].seen.advantages)


def test_dead_rows_were_not_run_and_are_said_where_another_would_learn_from_them(runs):
    """GSPO runs no dead group; a return of each token's own would."""
    run = runs("gspo", GSPO)
    step = run.step(1)
    not_run = ~step.layout.any(~step.current[0].isnan())
    assert not_run.any()
    views = {view.name: view for view in compared(step, run.config, chosen(run.config, ["reinforce-pp"]))}
    assert f"{int(not_run.sum())} completions were not run in this update: their ratios are assumed to be 1" in (
        views["reinforce-pp"].seen.notes
    )
    assert views["gspo"].seen.notes == ()
    assert views["gspo"].tokens == int(step.batch.lengths[step.updates[0] >= 0].sum())
    assert views["gspo"].pushing < views["gspo"].tokens


# Beside one another, by hand


def views_of(step, own: Algorithm, *names: str) -> dict:
    settings = config(own)
    return {view.name: view for view in compared(step, settings, chosen(settings, names))}


def test_the_fixture_in_numbers(tmp_path):
    views = views_of(fixture_step(tmp_path), GRPO, *FIVE)
    assert list(views) == ["grpo", "ppo", "dapo", "gspo", "sapo"]  # the run's own first
    assert [view.is_own for view in views.values()] == [True, False, False, False, False]
    grpo, dapo, gspo, sapo = (views[name] for name in ("grpo", "dapo", "gspo", "sapo"))
    assert all(view.tokens == view.pushing == 10 for view in views.values())
    # GRPO clips 4 of 10 tokens, DAPO 3 of them, GSPO two completions of 2 and 1 tokens, SAPO none.
    assert [view.blocked for view in views.values()] == [0.4, 0.4, pytest.approx(0.3), pytest.approx(0.3), 0.0]
    assert_close(gspo.held_back, 0.3)
    through = 1 / torch.cosh(torch.where(ADVANTAGES > 0, 1.0, 1.05) * (LOG_RATIO.exp() - 1) / 2) ** 2
    assert_close(sapo.held_back, 1 - float(through[MASK].mean()))
    # DAPO opens e^0.22. GSPO opens the first tokens of rows 0 and 2 and closes the first of row 1.
    assert [(view.closed, view.opened) for view in (grpo, dapo, gspo, sapo)] == [(0, 0), (0, 1), (1, 2), (0, 4)]
    assert [view.flips for view in (grpo, dapo, gspo, sapo)] == [0.0, 0.1, 0.3, 0.4]
    assert max_flipped(dapo, grpo, 5) == [(3, 0)]
    assert set(max_flipped(gspo, grpo, 5)) == {(0, 0), (1, 0), (2, 0)}
    assert len(max_flipped(gspo, grpo, 2)) == 2
    # What is left of GRPO's gradient: three tokens of row 0, weighted 1/16, one of row 1, 1/8, two of row 2, 1/12.
    ratio = LOG_RATIO.exp()
    positive = float(ratio[0, 1:].sum()) / 16
    negative = float(ratio[1, 0]) / 8 + float(ratio[2, 1:3].sum()) / 12
    assert_close(grpo.positive, positive / (positive + negative))
    assert_close(grpo.negative, negative / (positive + negative))
    assert_close(grpo.policy_loss or 0.0, look(fixture_step(tmp_path), GRPO, config(GRPO)).losses[0])
    assert_close(grpo.norm, A * math.sqrt(float((ratio[0, 1:] / 16).square().sum() + (ratio[1, 0] / 8) ** 2
                                                + (ratio[2, 1:3] / 12).square().sum())))  # fmt: skip
    pull = float(grpo.seen.kl_gradient.abs().sum())
    assert_close(grpo.kl, pull / (pull + A * (positive + negative)))
    assert dapo.kl == 0.0


def test_what_is_rejected_is_held_back_whatever_its_gate_says(tmp_path):
    """The sampler's e^0.9 and e^−0.8 are rejected; the second was clipped already."""
    picky = replace(GRPO, correct=IcePop(0.5, 2.0))
    own, view = compared(fixture_step(tmp_path), config(GRPO), {"picky": picky})
    assert (own.held_back, view.held_back, view.blocked) == (pytest.approx(0.4), pytest.approx(0.5), 0.5)
    assert (view.closed, view.opened) == (1, 0)


def test_the_loss_is_of_all_passes_whichever_is_looked_at(runs):
    run = other(runs, "epochs")
    views = [compared(run.step(1), run.config, {}, number=number)[0] for number in (0, 1, -1)]
    logged = dict(run.curve("policy_loss"))[1]
    assert [view.policy_loss for view in views] == pytest.approx([logged] * 3, rel=0, abs=1e-6)
    assert views[0].blocked < views[1].blocked == views[2].blocked  # the policy goes on moving


def test_cosines_are_those_of_the_gradients(tmp_path):
    views = views_of(fixture_step(tmp_path), GRPO, *FIVE)
    flat = {name: view.seen.gradient.flatten() for name, view in views.items()}
    for name, view in views.items():
        for other, cosine in view.cosines.items():
            expected = torch.nn.functional.cosine_similarity(flat[name], flat[other], dim=0)
            assert_close(cosine, float(expected))
        assert view.cosines[name] == 1.0
        assert view.cosine == view.cosines["grpo"]
    assert views["gspo"].cosine < 0.9 < views["ppo"].cosine


def test_thirds_are_of_completions_and_alike_for_alike_lengths(tmp_path):
    """Lengths 4, 2, 3, 1 of one gradient each: the shortest third of four is one and a third of them."""
    ones = torch.ones_like(OLD)
    flat = replace(GRPO, weights=DAPO.weights, kl=None)  # every token counts the same
    step = fixture_step(tmp_path, torch.zeros_like(OLD), advantages=ones)
    (view,) = compared(step, config(flat), {})
    assert_close(torch.tensor(view.thirds), torch.tensor([1 + 2 / 3, 4 / 3 + 2, 1 + 4]) / 10)
    mask = torch.ones(5, 2).bool()
    batch = batch_of(mask, torch.zeros(5, dtype=torch.long), torch.arange(5.0), advantages=torch.ones(5, 2))
    (view,) = compared(stored(tmp_path, batch, [update(range(5), torch.zeros(5, 2))]), config(flat), {})
    assert_close(torch.tensor(view.thirds), torch.ones(3) / 3)


def test_an_algorithm_that_no_paper_has_goes_by_the_name_of_own(tmp_path):
    mine = replace(GRPO, gate=Clip(0.1, 0.5))
    assert own_name(config(mine)) == OWN_ALGORITHM
    assert own_name(config(replace(GSPO))) == "gspo"
    views = views_of(fixture_step(tmp_path), mine, "GRPO", "dr_grpo", "own")
    assert list(views) == ["own", "grpo", "dr-grpo"]
    assert views["own"].is_own
    with pytest.raises(ValueError, match="no algorithm is called 'grop'; the names are ppo, grpo,"):
        chosen(config(mine), ["grop"])


def test_what_was_skipped_is_in_no_number(tmp_path):
    current = OLD + LOG_RATIO
    poisoned = fixture_batch()
    advantages = poisoned.advantages.clone()
    advantages[2] = math.inf
    updates = [update([0, 1], current[:2]), update([2, 3], current[2:] * math.nan, skipped="advantages are not finite")]
    step = stored(tmp_path, replace(poisoned, advantages=advantages), updates)
    views = views_of(step, GRPO, "gspo", "sapo")
    assert views["grpo"].rows.tolist() == [True, True, False, False]
    assert views["grpo"].tokens == 6
    assert all(math.isfinite(view.cosine) and math.isfinite(view.norm) for view in views.values())
    assert views["grpo"].policy_loss == views["grpo"].seen.losses[0]
    assert remarks(step) == [
        "update 1 was skipped (advantages are not finite): its completions are left out of these numbers"
    ]


def test_steps_without_a_policy_update_give_no_numbers_and_say_so(tmp_path):
    empty = stored(tmp_path, fixture_batch(), [], trained=[], kept_groups=0)
    assert remarks(empty) == ["the step made no update: all completions were dropped or unscored"]
    blank = torch.full_like(OLD, math.nan)
    batch = fixture_batch(values=OLD, returns=OLD)
    alone = stored(tmp_path, batch, [update(range(4), blank)], value_only=True)
    assert remarks(alone) == ["the step trained only the value model: it has no policy loss"]
    for step, own in ((empty, DAPO), (alone, PPO)):
        for view in views_of(step, own, *FIVE).values():
            known = view.to_dict()
            assert known["policy_loss"] is None
            assert known["blocked"] is None
            assert known["cosine"] is None
            assert known["thirds"] == [None, None, None]
            assert (view.tokens, view.closed, view.opened, view.norm) == (0, 0, 0, 0.0)


def test_a_comparison_is_plain_json(tmp_path):
    view = views_of(fixture_step(tmp_path), GRPO, "gspo")["gspo"]
    known = json.loads(json.dumps(view.to_dict(), allow_nan=False))
    assert known["name"] == "gspo"
    assert known["cosines"].keys() == {"grpo", "gspo"}
    assert known["notes"] == []
    assert "seen" not in known
    assert "rows" not in known


def test_a_token_table_has_a_row_for_each_token_and_algorithm(tmp_path):
    step = fixture_step(tmp_path)
    views = views_of(step, GRPO, "gspo")
    rows = token_table(step, list(views.values())).to_pylist()
    assert len(rows) == 20
    assert [(each["row"], each["token"]) for each in rows[:5]] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    first, last = rows[0], rows[-1]
    assert (first["algorithm"], first["state"], first["piece"]) == ("grpo", "high", "0")
    assert first["ratio"] == pytest.approx(math.exp(0.3), rel=1e-12)
    assert (first["gate"], first["gradient"], first["weight"]) == (0.0, 0.0, 1 / 16)
    assert first["advantage"] == pytest.approx(A)
    assert (last["algorithm"], last["state"]) == ("gspo", "high")
    assert {each["correction"] for each in rows} == {1.0}


# Parameters


@pytest.fixture(scope="module")
def kept(runs) -> RunFolder:
    """Two steps of one update each, without anything in the loss but the policy's term, and every checkpoint."""
    changes = {"training": {"minibatches": 1, **GENTLY}, "checkpoints": CheckpointOptions(every=1, keep=5)}
    return runs("kept", SAPO, steps=2, **changes)


def test_the_gradient_of_the_parameters_is_the_one_that_training_had(kept):
    step = kept.step(2)
    model = load_model(str(kept.path / "checkpoints" / "step-000001"))
    views = compared(step, kept.config, chosen(kept.config, ["gspo", "dapo"]))
    found = parameter_gradients(model, step, kept.config, views)
    logged = step.metadata["updates"][0]["gradient_norm"]
    assert found.norms["sapo"] == pytest.approx(logged, rel=1e-4)
    assert found.gap == found.first_gap
    assert found.gap < 1e-5
    assert found.is_policy
    assert found.cosines["sapo"]["sapo"] == 1.0
    # One update: every ratio is 1, and GSPO's gradient is SAPO's. Of four groups three are dead: DAPO drops them.
    assert found.cosines["sapo"]["gspo"] == pytest.approx(1.0, abs=1e-6)
    assert found.norms["dapo"] > 3 * found.norms["sapo"]
    assert found.cosines["dapo"]["sapo"] == found.cosines["sapo"]["dapo"]


def test_small_passes_add_up_to_the_same_gradient(kept):
    step = kept.step(1)
    assert len(step.batch.group[step.layout.any(step.batch.advantages != 0)].unique()) > 1
    model = load_model(str(kept.path / "checkpoints" / "step-000001"))
    views = compared(step, kept.config, chosen(kept.config, ["dapo"]))
    whole = parameter_gradients(model, step, kept.config, views)
    tight = replace(kept.config, training=replace(kept.config.training, token_budget=20))
    split = parameter_gradients(model, step, tight, views)
    assert split.norms == pytest.approx(whole.norms, rel=1e-4)
    assert split.cosines["sapo"]["dapo"] == pytest.approx(whole.cosines["sapo"]["dapo"], abs=1e-5)


def test_two_halves_of_the_groups_add_up_and_are_compared(kept):
    step = kept.step(1)
    model = load_model(str(kept.path / "checkpoints" / "step-000001"))
    views = compared(step, kept.config, chosen(kept.config, ["dapo"]))
    for view in views:
        even, odd = _halves(step, view)
        assert torch.equal(even.seen.gradient + odd.seen.gradient, view.seen.gradient)
        groups = [set(step.batch.group[step.layout.any(half.seen.gradient != 0)].tolist()) for half in (even, odd)]
        assert not groups[0] & groups[1]
        assert abs(len(groups[0]) - len(groups[1])) <= 1
    whole = parameter_gradients(model, step, kept.config, views)
    found = half_gradients(model, step, kept.config, views)
    assert found.cosines == whole.cosines
    assert found.norms == whole.norms
    assert set(found.halves) == set(whole.norms)
    parts = parameter_gradients(model, step, kept.config, _halves(step, views[0]))
    own = views[0].name
    # |a + b|² = |a|² + |b|² + 2·|a|·|b|·cos
    a, b = (parts.norms[f"{own} {name}"] for name in ("even", "odd"))
    assert a**2 + b**2 + 2 * a * b * found.halves[own] == pytest.approx(whole.norms[own] ** 2, rel=1e-5)


def test_a_model_is_compared_with_what_the_first_update_saw(runs):
    """Later ones have moved on."""
    run = runs("grpo", GRPO)
    step = run.step(1)
    model = load_model(resolve(run.config.model))
    found = parameter_gradients(model, step, run.config, compared(step, run.config, {}))
    assert found.first_gap < 1e-5 < 1e-2 < found.gap
    assert found.is_policy
    assert found.to_dict()["is_policy"] is True


def test_another_checkpoint_is_told_from_the_steps_policy(kept):
    step = kept.step(2)
    model = load_model(str(kept.path / "checkpoints" / "step-000002"))
    found = parameter_gradients(model, step, kept.config, compared(step, kept.config, {}))
    assert found.first_gap > 1e-2
    assert not found.is_policy


def test_a_step_without_a_gradient_has_none_of_the_parameters(kept, tmp_path):
    step = fixture_step(tmp_path, torch.zeros_like(OLD), advantages=torch.zeros_like(OLD))
    model = load_model(str(kept.path / "checkpoints" / "step-000002"))
    found = parameter_gradients(model, step, config(GRPO), compared(step, config(GRPO), {}))
    assert found.norms == {"grpo": 0.0}
    assert math.isnan(found.cosines["grpo"]["grpo"])
    assert math.isnan(found.gap)


def test_routes_are_replayed_on_the_way(tmp_path):
    """Of a mixture of experts: sent where its routes say, the gradient is another than where its routers would."""
    model = tiny_moe(hidden=32, layers=2, heads=2, kv_heads=1, experts=4, intermediate=32)
    batch = fixture_batch()
    routes = torch.zeros(4, 4, 2, 2, dtype=torch.int16)
    routes[..., 1] = 1  # the first two experts, everywhere
    prompt_routes = (routes[0, :1],)
    step = stored(tmp_path, replace(batch, routes=routes, prompt_routes=prompt_routes), [update(range(4), OLD)])
    views = compared(step, config(SAPO), {})
    replayed = parameter_gradients(model, step, config(SAPO), views)
    free = parameter_gradients(model, replace(step, batch=replace(step.batch, routes=None)), config(SAPO), views)
    assert abs(replayed.norms["sapo"] - free.norms["sapo"]) > 1e-4  # float32 is good for 1e-6
    assert replayed.gap != free.gap


def test_a_model_of_other_tokens_is_refused(kept):
    step = kept.step(2)
    check_tokens(step, load_tokenizer(str(kept.path / "checkpoints" / "step-000002")))
    other = tiny_tokenizer()
    other.backend_tokenizer.add_tokens(["more"])
    check_tokens(step, other)  # more than the run's is no harm
    shifted = replace(step, batch=replace(step.batch, tokens=step.batch.tokens + 1))
    with pytest.raises(ValueError, match=r"tokenizer spells '.'.*give a checkpoint of this run"):
        check_tokens(shifted, other)
    far = replace(step, batch=replace(step.batch, tokens=step.batch.tokens + 1000))
    with pytest.raises(ValueError, match=r"tokenizer lacks '.+give a checkpoint of this run"):
        check_tokens(far, other)
    beyond = replace(far, pieces=[[""] * len(each) for each in step.pieces])  # a model may have more rows than tokens
    check_tokens(beyond, other)


# The command


def test_the_command_says_it_all(runs, capsys):
    run = other(runs, "epochs")
    assert main(["replay", str(run.path), "--step", "1", "--as", "gspo", "grpo"]) == 0
    printed = capsys.readouterr().out
    assert f"step 1 of {run.path}, pass 1 (0 to 1)" in printed
    assert "replayed, it differs by" in printed
    assert "own (the run)" in printed  # a dual clip is no paper's DAPO
    assert "cosines between the gradients with respect to the log-probs" in printed
    assert "grpo: no reference was stored: its KL in the loss is left out" in printed
    assert "gspo: A " in printed or "gspo: the completion's ratio" in printed


def test_the_command_as_data(kept, capsys, tmp_path):
    out = tmp_path / "new" / "tokens.parquet"
    model = str(kept.path / "checkpoints" / "step-000001")
    flags = ["--step", "2", "--pass", "0", "--as=dapo", "--json", "--out", str(out), "--model", model]
    assert main(["replay", str(kept.path), *flags]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert [each["name"] for each in data["algorithms"]] == ["sapo", "dapo"]
    assert data["algorithms"][0]["policy_loss"] == pytest.approx(data["logged_policy_loss"], abs=1e-6)
    assert (data["step"], data["pass"], data["passes"]) == (2, 0, 1)
    assert data["model"]["model"] == model
    assert data["model"]["cosines"]["sapo"]["sapo"] == 1.0
    assert "written to" in captured.err
    table = pq.read_table(out)
    assert table.num_rows == 2 * int(kept.step(2).batch.lengths.sum())
    assert main(["replay", str(kept.path), "--step", "1"]) == 0  # and with nothing asked for, the five
    assert "ppo" in capsys.readouterr().out


def test_with_a_model_the_command_says_which(kept, capsys):
    """Of a run the newest checkpoint."""
    assert main(["replay", str(kept.path), "--step", "2", "--as", "gspo", "--model", str(kept.path)]) == 0
    printed = capsys.readouterr().out
    assert f"{kept.path / 'checkpoints' / 'step-000002'}: its log-probs are " in printed
    assert "not the policy that the step began with" in printed
    assert "cosines between the gradients with respect to its parameters" in printed


def test_steps_without_anything_to_replay_are_answered(runs, capsys):
    run = other(runs, "value")
    assert main(["replay", str(run.path), "--step", "1"]) == 0
    assert "the step trained only the value model" in capsys.readouterr().out
    assert main(["replay", str(run.path), "--step", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["algorithms"][0]["policy_loss"] is None


WRONG = [
    (["{run}"], "replay needs --step N: there are 1 to 2"),
    (["--step", "1"], "proximo replay takes one run's folder, not no run"),
    (["{run}", "{run}", "--step", "1"], "proximo replay takes one run's folder, not "),
    (["{run}", "--step", "1", "--fast"], "proximo replay takes one run's folder, not "),
    (["nowhere", "--step", "1"], "nowhere is no run: there is no such folder"),
    (["{run}", "--step", "7"], "has no rollouts of step 7: there are 1 to 2"),
    (["{run}", "--step", "-1"], "--step -1: give a whole number, from 0 on"),
    (["{run}", "--step", "٣"], "give a whole number, from 0 on"),
    (["{run}", "--step", "1", "--pass", "1"], "--pass 1: step 1 has 1, counted from 0"),
    (["{run}", "--step", "1", "--as", "grop"], "no algorithm is called 'grop'"),
    (["{run}", "--step", "1", "--model", "{run}/rollouts"], "there is no config.json"),
    (["{run}", "--step", "1", "--out", "{run}/run.json"], "the file exists"),
    (["{run}", "--step", "1", "--out", "{run}/run.json/tokens.parquet"], "run.json"),
]


@pytest.mark.parametrize(("arguments", "complaint"), WRONG)
def test_what_cannot_be_is_refused_in_a_line(arguments, complaint, kept, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["replay", *(each.replace("{run}", str(kept.path)) for each in arguments)])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert "Traceback" not in said


def test_help_and_nothing_at_all(capsys):
    assert main(["replay", "--help"]) == 0
    assert main(["replay"]) == 0
    assert capsys.readouterr().out.count("usage: proximo replay RUN --step N") == 2


def test_what_a_model_said_cannot_steer_the_terminal(runs, kept, monkeypatch, capsys):
    run = other(runs, "epochs")
    step = run.step(1)
    evil = "\x1b[31m[bold]\u202e\0"
    hostile = replace(step, pieces=[[evil] * len(each) for each in step.pieces], prompt=[evil * 9] * len(step.prompt))
    monkeypatch.setattr(RunFolder, "step", lambda self, number: hostile)
    assert main(["replay", str(run.path), "--step", "1"]) == 0
    printed = capsys.readouterr().out
    assert "\\x1b[31m[bold]" in printed
    assert not set(printed) & set("\x1b\u202e\0")
