import math

import pytest
import torch

from proximo.losses import CappedScore, Clip, GammaScore, GeometricClip, Reinforce, SoftGate, Unclipped
from proximo.losses.pieces.protocols import GateTraits
from tests.fixture import GOLDEN, LOG_RATIO, MASK, assert_close, golden

ONE = torch.ones(1, 1).bool()


def token(gate, ratio: float, advantage: float, logprob: float = -1.0) -> tuple[float, float, float]:
    """Loss of one token, its derivative by log π, and the share of the gradient let through."""
    logprobs = torch.tensor([[logprob]]).double().requires_grad_()
    log_ratio = logprobs - (logprob - math.log(ratio))
    advantages = torch.tensor([[advantage]]).double()
    loss = gate(log_ratio, logprobs, advantages, ONE).sum()
    (slope,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), slope.item(), gate.through(log_ratio.detach(), advantages).item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 2.0, -2.4, 0.0),  # good and already raised: clipped at 1.2
        (0.5, 2.0, -1.0, -1.0),  # good but lowered: pushed up again
        (1.5, -2.0, 3.0, 3.0),  # bad but raised: pushed down, unbounded
        (0.5, -2.0, 1.6, 0.0),  # bad and already lowered: clipped at 0.8
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
    ],
)
def test_the_four_quadrants_of_the_clip(ratio, advantage, loss, slope):
    result = token(Clip(0.2, 0.2), ratio, advantage)
    assert result[0] == pytest.approx(loss)
    assert result[1] == pytest.approx(slope)
    assert result[2] == float(slope != 0)


def test_low_and_high_are_two_widths():
    assert token(Clip(0.1, 0.3), 1.25, 1.0)[1] == pytest.approx(-1.25)
    assert token(Clip(0.3, 0.1), 1.25, 1.0)[1] == 0
    assert token(Clip(0.3, 0.1), 0.75, -1.0)[1] == pytest.approx(0.75)
    assert token(Clip(0.1, 0.3), 0.75, -1.0)[1] == 0


@pytest.mark.parametrize(
    ("name", "advantage", "ratio"),
    [
        ("dualclip A=-1.0 r=0.5 [ppo,dual c=3]", -1.0, 0.5),
        ("dualclip A=-1.0 r=2.0 [ppo,dual c=3]", -1.0, 2.0),
        ("dualclip A=-1.0 r=4.0 [ppo,dual c=3]", -1.0, 4.0),
        ("dualclip A=1.0 r=0.5 [ppo,dual c=3]", 1.0, 0.5),
        ("dualclip A=1.0 r=1.5 [ppo,dual c=3]", 1.0, 1.5),
        ("dualclip A=1.0 r=4.0 [ppo,dual c=3]", 1.0, 4.0),
    ],
)
def test_dual_clip(name, advantage, ratio):
    plain, dual = GOLDEN[name]
    assert token(Clip(0.2, 0.2), ratio, advantage)[0] == pytest.approx(-plain)
    assert token(Clip(0.2, 0.2, dual=3.0), ratio, advantage)[0] == pytest.approx(-dual)


def test_dual_clip_stops_the_gradient_of_an_exploded_bad_token_only():
    assert token(Clip(0.2, 0.2, dual=3.0), 4.0, -1.0)[1:] == (0.0, 0.0)
    assert token(Clip(0.2, 0.2, dual=3.0), 2.0, -1.0)[1:] == (pytest.approx(2.0), 1.0)


# Read as: 'sapo.gate[tau=1.0,r=0.5]', 'sapo.gate[tau=1.0,r=0.8]', 'sapo.gate[tau=1.0,r=1.0]',
# 'sapo.gate[tau=1.0,r=1.2]', 'sapo.gate[tau=1.0,r=2.0]', 'sapo.gate[tau=1.0,r=5.0]',
# 'sapo.gate[tau=1.05,r=0.5]', 'sapo.gate[tau=1.05,r=0.8]', 'sapo.gate[tau=1.05,r=1.0]',
# 'sapo.gate[tau=1.05,r=1.2]', 'sapo.gate[tau=1.05,r=2.0]', 'sapo.gate[tau=1.05,r=5.0]'.
@pytest.mark.parametrize("ratio", [0.5, 0.8, 1.0, 1.2, 2.0, 5.0])
@pytest.mark.parametrize(("tau", "advantage"), [(1.0, 1.0), (1.05, -1.0)])
def test_soft_gate_value_share_and_gradient(tau, advantage, ratio):
    value, share, slope = GOLDEN[f"sapo.gate[tau={tau},r={ratio}]"]
    loss, derivative, through = token(SoftGate(1.0, 1.05), ratio, advantage)
    assert loss == pytest.approx(-advantage * value)
    assert through == pytest.approx(share)
    assert derivative == pytest.approx(-advantage * slope)


def test_soft_gate_uses_the_negative_temperature_at_zero_advantage():
    assert token(SoftGate(1.0, 3.0), 2.0, 0.0)[2] == pytest.approx(1 / math.cosh(1.5) ** 2)


def test_mean_soft_gate_is_close_to_the_gate_of_the_sequence_ratio():
    opening, sequence, error, bound = GOLDEN["sapo.reduction.row0"]
    row = LOG_RATIO[:1]
    # The reduction is stated for gates on log r: sech²(τ·z/2), token by token and on the mean.
    token_gate = (1 / (row / 2).cosh().square()).mean().item()
    sequence_gate = 1 / math.cosh(row.mean().item() / 2) ** 2
    assert token_gate == pytest.approx(opening)
    assert sequence_gate == pytest.approx(sequence)
    assert abs(token_gate - sequence_gate) == pytest.approx(error)
    assert error <= bound == pytest.approx(row.var(correction=0).item() / 4)


def test_unnormalised_soft_gate_is_tau_over_four_of_the_paper():
    paper, plain = SoftGate(5.0, 5.0), SoftGate(5.0, 5.0, normalised=False)
    for ratio in (0.7, 1.0, 1.4):
        assert token(plain, ratio, 1.0)[1] == pytest.approx(5 / 4 * token(paper, ratio, 1.0)[1])
    assert token(plain, 1.0, 1.0)[2] == pytest.approx(1.25)


def test_capped_score_keeps_every_gradient():
    assert token(CappedScore(high=0.28), 2.0, 1.0, logprob=-0.5) == (pytest.approx(0.64), -1.28, pytest.approx(0.64))
    assert token(CappedScore(high=0.28), 0.1, -1.0)[1] == pytest.approx(0.1)
    assert token(CappedScore(high=0.2, low=0.2), 0.1, -1.0)[1] == pytest.approx(0.8)


def test_reinforce_and_unclipped():
    assert token(Reinforce(), 3.0, 2.0, logprob=-0.5) == (pytest.approx(1.0), -2.0, 1.0)
    assert token(Unclipped(), 3.0, 2.0) == (pytest.approx(-6.0), pytest.approx(-6.0), 1.0)


def test_gamma_score_by_hand():
    # A ≥ 0: e^3 · 2² · e^−6 = 4e^−3. A < 0: e^2 · 2³ · e^−4 = 8e^−2.
    assert token(GammaScore(), 2.0, 1.0)[1] == pytest.approx(-4 * math.exp(-3))
    assert token(GammaScore(), 2.0, -1.0)[1] == pytest.approx(8 * math.exp(-2))
    assert token(GammaScore(), 2.0, -1.0)[2] == pytest.approx(4 * math.exp(-2))


def test_geometric_clip_clips_before_it_pools():
    gate = GeometricClip(0.2, 0.2)
    log_ratio = torch.tensor([[0.5, -0.1, 0.0]]).double()
    up, down = torch.ones(1, 3).double(), -torch.ones(1, 3).double()
    mask = torch.tensor([[True, True, False]])
    assert_close(gate(log_ratio, log_ratio, up, mask)[0, 0], -math.exp((0.2 - 0.1) / 2))
    assert_close(gate(-log_ratio, log_ratio, down, mask)[0, 0], math.exp((-0.2 + 0.1) / 2))
    assert_close(gate.through(log_ratio, up)[0], [0, 1, 1])
    assert_close(gate.through(log_ratio, down)[0], [1, 1, 1])


def test_clip_blocks_what_through_says_it_blocks():
    advantages = torch.where(torch.arange(4).unsqueeze(1) % 3 == 0, 1.0, -1.0).double().expand(4, 4)
    for gate in (Clip(0.2, 0.28), Clip(0.2, 0.28, dual=3.0), SoftGate(1.0, 1.05), Unclipped(), CappedScore(high=0.28)):
        logprobs = LOG_RATIO.clone().requires_grad_()
        loss = gate(logprobs if not GateTraits.read(gate).score_form else LOG_RATIO, logprobs, advantages, MASK).sum()
        (slope,) = torch.autograd.grad(loss, logprobs)
        assert_close(slope, -gate.through(LOG_RATIO, advantages) * LOG_RATIO.exp() * advantages)


def test_token_ratios_of_the_fixture():
    assert_close(LOG_RATIO.exp() * MASK, golden("ratios.token"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clip(-0.1, 0.2), "gate.low -0.1"),
        (lambda: Clip(0.2, 0.28, dual=1.2), r"gate.dual is 1.2: the dual clip must lie above 1 \+ high = 1.28"),
        (lambda: SoftGate(0.0, 1.0), "gate.tau_pos 0.0"),
        (lambda: GeometricClip(-1.0, 1.0), "gate.low -1.0"),
        (lambda: CappedScore(high=-1.0), "gate.low None, gate.high -1.0"),
        (lambda: GammaScore(rate_pos=0.0), "must all be positive"),
    ],
)
def test_bad_settings_say_field_and_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()
