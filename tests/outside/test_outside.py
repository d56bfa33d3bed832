"""Pieces from outside the package do what they say in every stage: loss, rules, collector, learner, lens and words."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

import proximo
from proximo import losses
from proximo.algorithms import DAPO, GRPO, GSPO, SAPO, Algorithm, UnusualChoice
from proximo.algorithms.explain import nearest, objective, stages
from proximo.insight.lens.explanations import why
from proximo.insight.lens.lens import look, policy_loss
from proximo.insight.lens.states import TokenState
from proximo.learner.rounding import gate_width
from proximo.losses import KeepAll, KlLoss, LossInputs, plan_step, rows_of
from proximo.rl.assemble import assemble
from proximo.rl.config import RunConfig
from proximo.rl.metrics import kl_metrics
from proximo.rl.preflight.preflight import preflight
from proximo.runs.records import DataCursor
from tests.fixture import ADVANTAGES, GROUP, LOG_RATIO, MASK, OLD, REF, ROLLOUT, assert_close, matrix, run
from tests.outside import pieces
from tests.rl.test_training import FakeTask, collector, group_of, learner
from tests.steps import config, fixture_step, rows_seen

PLAIN = replace(GRPO, kl=None)
A = math.sqrt(3) / 2
WEIGHTS = matrix([[1 / 16] * 4, [1 / 8] * 2 + [0] * 2, [1 / 12] * 3 + [0], [1 / 4, 0, 0, 0]])
"""Of GRPO on the fixture."""

KINDS = {
    losses.GateProtocol: [pieces.Wall(), pieces.WholeScore()],
    losses.KeepProtocol: [pieces.KeepNone(), pieces.KeepRight()],
    losses.ExtraProtocol: [pieces.Spring(), pieces.FirstRow()],
    losses.AnchorProtocol: [pieces.Between()],
    losses.RatioProtocol: [pieces.Halved()],
    losses.SelectionProtocol: [pieces.NoFirst()],
    losses.CorrectionProtocol: [pieces.Rejecting()],
    losses.WeightsProtocol: [pieces.RootMean()],
    losses.AdvantageProtocol: [pieces.Doubled(), pieces.Countdown()],
    losses.ShapeProtocol: [pieces.Brevity()],
    losses.DivergenceProtocol: [pieces.Absolute()],
}


@pytest.mark.parametrize("protocol", KINDS, ids=lambda protocol: protocol.__name__)
def test_a_stranger_satisfies_the_protocol_and_inherits_nothing(protocol: type):
    for piece in KINDS[protocol]:
        assert isinstance(piece, protocol)
        assert type(piece).__bases__ == (object,)
    assert not isinstance(print, protocol)  # what can be called is no piece yet


def everything() -> Algorithm:
    """Every stage answered from outside."""
    return Algorithm(
        shape=pieces.Brevity(),
        keep=pieces.KeepRight(),
        advantage=pieces.Doubled(),
        anchor=pieces.Between(),
        ratio=pieces.Halved(),
        gate=pieces.Wall(),
        select=pieces.NoFirst(),
        kl=KlLoss(0.5, pieces.Absolute()),
        weights=pieces.RootMean(),
        extra=(pieces.Spring(), pieces.FirstRow()),
    )


# The loss


def test_each_stage_calls_its_stranger():
    z = (OLD + LOG_RATIO - (OLD + ROLLOUT) / 2) / 2
    counts = matrix([[4], [2], [3], [1]])
    weights = MASK / counts.sqrt() / counts.sqrt().sum()
    first = MASK & (torch.arange(4) > 0)
    expected = {
        "policy_loss": (-z.clamp(-0.28, 0.28).exp() * ADVANTAGES * weights * first).sum(),
        "kl_loss": (0.5 * (OLD + LOG_RATIO - REF).abs() * weights).sum(),
        "extra_loss": (LOG_RATIO.square() * weights).sum() - (OLD + LOG_RATIO)[0].mean(),
    }
    loss, _, stats = run(everything(), outcome=torch.zeros(4))
    for name, value in expected.items():
        assert_close(stats.totals[name], value)
    assert_close(loss, sum(expected.values()))


def test_an_extra_with_a_huge_coefficient_changes_the_loss():
    plain, with_spring = run(PLAIN)[0], run(replace(PLAIN, extra=pieces.Spring(1e6)))[0]
    assert_close(with_spring - plain, 1e6 * (LOG_RATIO.square() * WEIGHTS).sum(), 1e-6)


def test_an_extra_plans_over_the_whole_step():
    algorithm = replace(PLAIN, extra=pieces.FirstRow())
    tensors: dict[str, Any] = {
        "logprobs": OLD,
        "old_logprobs": OLD,
        "advantages": ADVANTAGES,
        "mask": MASK,
        "group": GROUP,
    }
    inputs = LossInputs(**tensors, outcome=torch.zeros(4))
    (weights,) = plan_step(algorithm, rows_of(algorithm, inputs)).rows(slice(0, 2)).extra_weights
    assert weights is not None
    assert_close(weights, matrix([[0.25] * 4, [0.0] * 4]))
    with pytest.raises(ValueError, match="weights is a tensor.*FirstRow.*weights=None"):
        proximo.policy_loss(algorithm, **tensors, outcome=torch.zeros(4), weights=WEIGHTS)
    with pytest.raises(ValueError, match="outcome is None, but FirstRow"):
        proximo.policy_loss(algorithm, **tensors)


def test_an_anchor_that_reads_the_sampler_asks_for_it():
    with pytest.raises(ValueError, match="rollout_logprobs is None, but the anchor is Between"):
        run(replace(PLAIN, anchor=pieces.Between()), rollout_logprobs=None)


def test_advantages_of_rows_and_of_tokens():
    rewards, mask = torch.tensor([1.0, 2.0]), torch.tensor([[True, True, True], [True, False, False]])
    tensors = {"rewards": rewards, "group": torch.tensor([0, 0]), "mask": mask}
    rows, _ = proximo.advantages(replace(PLAIN, advantage=pieces.Doubled()), **tensors)
    assert_close(rows, [[2, 2, 2], [4, 0, 0]])
    tokens, _ = proximo.advantages(replace(PLAIN, advantage=pieces.Countdown()), **tensors)
    assert_close(tokens, [[0.25, 0.5, 1], [2, 0, 0]])
    whitened, _ = proximo.advantages(replace(PLAIN, advantage=losses.TokenWhitened(pieces.Countdown())), **tensors)
    assert_close(whitened[mask].mean(), 0.0)


# The rules


def test_a_score_of_whole_completions_is_accepted_where_the_gate_says_so():
    accepted = replace(GSPO, gate=pieces.WholeScore())
    loss, _, _ = run(accepted)
    ratio = (LOG_RATIO.sum(dim=1) / MASK.sum(dim=1)).exp().clamp(max=2).unsqueeze(1)
    assert_close(loss, (-ratio * ADVANTAGES * (OLD + LOG_RATIO) * WEIGHTS).sum())
    with pytest.raises(ValueError, match="is a score form, ratio SequenceRatio.* spans a sequence"):
        replace(GSPO, gate=pieces.TokenScore())


def test_a_piece_has_rules_of_its_own():
    with pytest.raises(ValueError, match="Opinionated wants no KL"):
        replace(GRPO, gate=pieces.Opinionated())
    with pytest.warns(UnusualChoice, match="Opinionated is unusual"):
        replace(PLAIN, gate=pieces.Opinionated())


def test_rules_ask_what_a_piece_says():
    with pytest.raises(ValueError, match="correct is .*anchor Between.*use None"):
        replace(PLAIN, anchor=pieces.Between(), correct=pieces.Rejecting())
    with pytest.raises(ValueError, match="ratio SequenceRatio.* pools a row, advantage Countdown"):
        replace(GSPO, advantage=pieces.Countdown())
    with pytest.raises(ValueError, match="group_size is 1: Doubled compares siblings"):
        replace(PLAIN, advantage=pieces.Doubled()).check_run(group_size=1, updates_per_batch=1)
    assert gate_width(replace(PLAIN, gate=pieces.Wall())) == 0.2


# Keep


def test_a_keep_that_drops_every_group_trains_none():
    collected = collector(pieces.KeepNone()).collect(DataCursor(), step=0, version=0)
    assert collected.groups == ()
    assert len(collected.dropped) == 4
    assert collected.rounds == 1  # it does not ask for others in their place


def test_a_keep_that_refills_gets_other_prompts():
    class NoneRight(FakeTask):
        def grade(self, problems, completions):
            return [replace(grade, outcome=0.0) for grade in super().grade(problems, completions)]

    collected = collector(pieces.KeepRight(), task=NoneRight(), refill_rounds=3).collect(
        DataCursor(), step=0, version=0
    )
    assert (collected.groups, collected.rounds) == ((), 3)


def test_rows_that_a_keep_leaves_out_do_not_train():
    algorithm = replace(PLAIN, keep=pieces.KeepRight())
    assembled = assemble([group_of([1.0, 0.0, math.nan, 1.0], [2, 3, 2, 4])], [], learner(algorithm), 8)
    assert assembled.index.tolist() == [0, 3]
    assert assembled.unscored == 1
    # They are in the comparison all the same.
    assert assembled.batch.advantages[:, 0].tolist() == pytest.approx([1 / math.sqrt(3)] * 2, abs=1e-5)
    everyone = assemble([group_of([1.0, 0.0, math.nan, 1.0], [2, 3, 2, 4])], [], learner(PLAIN), 8)
    assert everyone.index.tolist() == [0, 1, 3]


# The learner


def test_a_learner_trains_on_strangers():
    algorithm = replace(everything(), keep=KeepAll(), extra=pieces.Spring(), shape=None)
    torch.manual_seed(0)
    trainer = learner(algorithm)
    assembled = assemble([group_of([1.0, 0.0], [2, 3]), group_of([0.0, 1.0], [4, 1])], [], trainer, 8)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    assert all(update.skipped is None for update in trainer.updates(assembled.batch))
    assert any(not old.equal(new) for old, new in zip(before, trainer.model.parameters(), strict=True))


# The lens


def test_the_lens_counts_what_a_hard_gate_blocks(tmp_path):
    algorithm = replace(PLAIN, gate=pieces.Wall())
    step = fixture_step(tmp_path)
    seen = rows_seen(step, algorithm, config(algorithm))
    far = MASK & (LOG_RATIO.abs() > 0.28)
    assert int(far.sum()) == 5
    assert torch.equal(seen.blocked, far)
    assert seen.state[0, 0] == TokenState.HIGH
    assert seen.state[2, 0] == TokenState.LOW
    assert not seen.gradient[far].any()
    assert why(step, look(step, algorithm, config(algorithm)), 0, 0) == (
        "A > 0 and ratio 1.3499, which Wall blocks: no gradient"
    )


def test_an_extra_shows_in_the_lens(tmp_path):
    seen = {}
    for coefficient in (0.0, 1e6):
        algorithm = replace(PLAIN, extra=pieces.Spring(coefficient))
        seen[coefficient] = look(fixture_step(tmp_path), algorithm, config(algorithm))
    assert not seen[0.0].extra_gradient.any()
    assert_close(seen[1e6].extra_gradient, (2e6 * LOG_RATIO * WEIGHTS)[MASK], 1e-6)
    assert torch.equal(seen[0.0].gradient, seen[1e6].gradient)


def test_the_lens_gives_the_loss_of_strangers(tmp_path):
    algorithm = replace(everything(), keep=KeepAll(), advantage=GRPO.advantage, shape=None)
    _, _, stats = run(algorithm, outcome=torch.tensor([1.0, 0, 0, 1]))
    found = policy_loss(fixture_step(tmp_path), algorithm, config(algorithm))
    assert found == pytest.approx(float(stats.totals["policy_loss"]), rel=0, abs=1e-6)


def test_a_row_level_keep_leaves_the_lens_as_it_leaves_training(tmp_path):
    algorithm = replace(DAPO, keep=pieces.KeepRight(), shape=None)
    seen = rows_seen(fixture_step(tmp_path), algorithm, config(algorithm))
    assert seen.takes_part.any(dim=1).tolist() == [True, False, False, True]
    assert seen.notes == ("2 completions are left out of the update and its denominator",)


# In words


def test_explain_says_what_is_not_given():
    lines = objective(everything())
    assert lines[0].startswith("J(θ) = RootMean (formula not given) [ Wall (formula not given) − 0.5 · KL ]")
    assert lines[0].endswith("]  − (log π − log π_old)²  − FirstRow (formula not given)")
    assert "R = task score + Brevity (formula not given)" in lines
    gates = next(peers for stage, _, peers in stages(everything()) if stage == "gate")
    assert [each.trl for each in gates] == ["not given"]
    assert nearest(everything()).name


# Pieces that break their promise are named, and nothing is left out without a word


@dataclass(frozen=True)
class NeedsValues:
    """An extra whose need nobody meets."""

    needs: ClassVar[tuple[str, ...]] = ("values",)

    def term(self, rows):
        return torch.ones_like(rows.logprobs)


@dataclass(frozen=True)
class Misspelt(NeedsValues):
    needs: ClassVar[tuple[str, ...]] = ("entropie",)


@dataclass(frozen=True)
class Scalar:
    """A gate, ratio, weights, keep, extra and advantage that return one number."""

    def __call__(self, *arguments):
        return torch.tensor(1.0)

    def through(self, log_ratio, advantages):
        return torch.ones_like(log_ratio)

    def of_rows(self, counts, group):
        return torch.tensor(1.0)

    def term(self, rows):
        return 1.0


@dataclass(frozen=True)
class LooksAtEntropy(NeedsValues):
    """Reads what it has not asked for."""

    needs: ClassVar[tuple[str, ...]] = ()

    def term(self, rows):
        assert rows.entropy is None
        return torch.zeros_like(rows.logprobs)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (NeedsValues(), "NeedsValues has a term and needs values: only ValueLoss"),
        (Misspelt(), "Misspelt.needs is ('entropie',), but a piece's needs must be a tuple of 'entropy' or 'outcome'"),
    ],
)
def test_a_need_that_nobody_meets_is_refused(extra, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(GRPO, extra=extra)


@pytest.mark.parametrize("stage", ["ratio", "gate", "weights", "extra", "advantage", "keep", "shape"])
def test_an_answer_of_the_wrong_shape_names_the_piece(stage):
    algorithm = replace(GRPO, **{stage: Scalar()})
    trainer = learner(algorithm)
    groups = [group_of([1.0, 0.0], [2, 3]), group_of([0.0, 1.0], [4, 1])]

    def train() -> None:
        list(trainer.updates(assemble(groups, [], trainer, 8).batch))

    with pytest.raises(ValueError, match=rf"^{stage} Scalar returned .*: it must return a tensor of shape "):
        train()


def test_entropy_without_a_gradient_is_not_shown():
    trainer = learner(replace(GRPO, extra=LooksAtEntropy()))
    groups = [group_of([1.0, 0.0], [2, 3]), group_of([0.0, 1.0], [4, 1])]
    assert all(update.skipped is None for update in trainer.updates(assemble(groups, [], trainer, 8).batch))


@dataclass(frozen=True)
class TokenReward:
    """A reward of single tokens that has no coefficient, and one of whole rows that says it is one."""

    of_rows: bool
    per_token: ClassVar[bool] = True

    def __call__(self, old_logprobs, ref_logprobs, mask):
        reward = (ref_logprobs - old_logprobs) * mask
        return reward.sum(dim=1) if self.of_rows else reward


def test_a_reward_of_single_tokens_from_outside_needs_no_controller():
    groups = [group_of([1.0, 0.0], [2, 3]), group_of([0.0, 1.0], [4, 1])]
    with pytest.raises(ValueError, match=r"^shape TokenReward returned .*\(4,\): .* shape \(4, 4\)$"):
        assemble(groups, [], learner(replace(PLAIN, shape=TokenReward(of_rows=True))), 8)
    trainer = learner(replace(PLAIN, shape=TokenReward(of_rows=False)))
    assemble(groups, [], trainer, 8)
    trainer.adapt_kl(1.0, 4)
    assert kl_metrics(1.0, trainer.kl_reward) == {"reference_kl": 1.0}
    trainer.load(trainer.state())


# A member that Proximo reads, of another type: the piece means something else by the name


def member(name: str, value: Any, of: type = pieces.Wall) -> Any:
    return dataclass(frozen=True)(type("Mine", (of,), {name: value}))()


@pytest.mark.parametrize(
    ("stage", "piece", "message"),
    [
        ("gate", member("band", "wide"), "Mine.band is 'wide', but a piece's band must be (a number, a number): give"),
        ("gate", member("band", (1.0,)), "Mine.band is (1.0,), but a piece's band must be (a number, a number)"),
        ("gate", member("width", True), "Mine.width is True, but a piece's width must be a number"),
        ("gate", member("statistics", 3), "Mine.statistics is 3, but a piece's statistics must be a function or None"),
        (
            "gate",
            member("fades", lambda self: False),
            "Mine.fades is a method, but a piece's fades must be True or Fal",
        ),
        (
            "keep",
            member("refills", 1, pieces.KeepRight),
            "Mine.refills is 1, but a piece's refills must be True or Fal",
        ),
        (
            "correct",
            member("reads", "row", pieces.Rejecting),
            "Mine.reads is 'row', but a piece's reads must be 'token'",
        ),
        ("select", member("needs_entropy", "no", pieces.NoFirst), "Mine.needs_entropy is 'no', but"),
        ("weights", member("with_limit", 5, pieces.RootMean), "Mine.with_limit is 5, but"),
        ("shape", member("is_off", "x", pieces.Brevity), "Mine.is_off is 'x', but"),
    ],
)
def test_a_member_of_another_type_is_refused_by_name(stage, piece, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(PLAIN, **{stage: piece})


@pytest.mark.parametrize("name", ["reward", "ratio", "tokens", "blocked_positive", "rewards/format", "loss"])
def test_statistics_may_not_take_the_name_of_a_metric(name):
    def statistics(self, log_ratio, advantages, mask):
        return {"mine": log_ratio, name: log_ratio}

    run_config = RunConfig(algorithm=replace(PLAIN, gate=member("statistics", statistics)))
    with pytest.raises(ValueError, match=f"^gate Mine.statistics names '{name}', which every run logs itself"):
        preflight(run_config)


@pytest.mark.parametrize("gate", [GRPO.gate, SAPO.gate, member("statistics", lambda self, ratio, *rest: {"m": ratio})])
def test_statistics_of_their_own_name_are_logged(gate):
    preflight(RunConfig(algorithm=replace(PLAIN, gate=gate)))


def test_a_statistic_of_the_wrong_shape_is_refused():
    gate = member("statistics", lambda self, ratio, *rest: {"m": ratio.sum()})
    with pytest.raises(ValueError, match=r"^gate Mine returned a tensor of shape \(\)"):
        run(replace(PLAIN, gate=gate))


# Numbers that are not finite


@dataclass(frozen=True)
class Dividing:
    """A gate, ratio and extra that is not finite: in what it returns, in its gradient, or in its statistics."""

    how: str = "value"

    def __call__(self, log_ratio, *rest):
        spoilt = {"value": log_ratio / 0.0, "gradient": (log_ratio * 0.0).sqrt() + log_ratio}
        return spoilt.get(self.how, log_ratio)

    def through(self, log_ratio, advantages):
        return torch.full_like(log_ratio, math.nan if self.how == "through" else 1.0)

    def statistics(self, log_ratio, advantages, mask):
        return {"mine": torch.full_like(log_ratio, math.inf if self.how == "statistics" else 1.0)}

    def term(self, rows):
        return self(rows.logprobs)


@pytest.mark.parametrize(
    ("stage", "how", "message"),
    [
        ("gate", "value", "gate Dividing returned a number that is not finite"),
        ("gate", "gradient", "gate Dividing has a gradient that is not finite"),
        ("gate", "through", "gate.through of Dividing returned a number that is not finite"),
        ("gate", "statistics", "gate.statistics of Dividing returned a number that is not finite"),
        ("ratio", "value", "ratio Dividing returned a number that is not finite"),
        ("extra", "value", "extra Dividing returned a number that is not finite"),
        ("extra", "gradient", "extra Dividing has a gradient that is not finite"),
    ],
)
def test_a_piece_that_is_not_finite_is_named(stage, how, message):
    trainer = learner(replace(PLAIN, **{stage: Dividing(how)}), max_skipped=1)
    groups = [group_of([1.0, 0.0], [2, 3]), group_of([0.0, 1.0], [4, 1])]
    update = trainer.update(assemble(groups, [], trainer, 8).batch, fresh=False)
    assert update.skipped is not None
    assert update.skipped.reason.endswith(f"; {message}, and the policy's log-probs are finite")
    with pytest.raises(ValueError, match=rf"Correct the piece: {message}$"):
        trainer.guard.check()
