import math

import pytest
import torch

import proximo
from proximo import Algorithm
from proximo.algorithms import GRPO
from proximo.losses import (
    BatchScaled,
    BetaNormalized,
    Feedback,
    GroupCentred,
    GroupNormalized,
    LeaveOneOut,
    LiveScaled,
    SequenceWhitened,
    TokenWhitened,
)
from tests.fixture import GOLDEN, MASK, REWARDS, assert_close, golden

TWO_GROUPS = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 0], dtype=torch.float64)
TWO = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
NAN = math.nan


def feedback(rewards: torch.Tensor, group: torch.Tensor, lengths: list[int] | None = None) -> Feedback:
    lengths = lengths or [1] * len(rewards)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    return Feedback(rewards=rewards.double(), group=group, mask=mask)


def one_group(*rewards: float) -> Feedback:
    return feedback(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.long))


def test_group_normalized_in_four_dialects():
    group = one_group(1, 0, 0, 1)
    assert_close(GroupNormalized(ddof=1, epsilon=0.0)(group), golden("adv.grpo.paper_unbiased_eps0"))
    assert_close(GroupNormalized(ddof=0, epsilon=0.0)(group), golden("adv.grpo.paper_biased_eps0"))
    assert_close(GroupNormalized(epsilon=1e-4)(group), golden("adv.grpo.trl_ddof1_eps1e-4"))
    assert_close(GroupNormalized()(group), golden("adv.grpo.verl_ddof1_eps1e-6"))


def test_centred_and_leave_one_out():
    assert_close(GroupCentred()(one_group(1, 0, 0, 1)), golden("adv.dr_grpo"))
    assert_close(LeaveOneOut()(one_group(1, 0, 0, 1)), golden("adv.rloo"))
    # By hand: 5 − mean(1, 3) = 3, 1 − 4 = −3, 3 − 3 = 0.
    assert_close(LeaveOneOut()(one_group(5, 1, 3)), [3.0, -3.0, 0.0])


def test_two_groups_do_not_see_each_other():
    batch = feedback(TWO_GROUPS, TWO)
    assert_close(GroupNormalized()(batch), golden("adv2.grpo_verl").flatten())
    assert_close(BatchScaled(epsilon=1e-4)(batch), golden("adv2.trl_batch_scale").flatten())


def test_group_labels_may_be_scattered_and_arbitrary():
    order = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4])
    labels = torch.tensor([-7, 900])[TWO]
    assert_close(
        GroupNormalized()(feedback(TWO_GROUPS[order], labels[order])), golden("adv2.grpo_verl").flatten()[order]
    )


def test_whitening_by_sequence_and_by_token():
    by_sequence = SequenceWhitened(GroupCentred())(feedback(TWO_GROUPS, TWO))
    assert_close(by_sequence, golden("adv2.rpp_baseline_sequence_weighted").flatten())

    batch = feedback(TWO_GROUPS, TWO, lengths=[4, 2, 3, 1] * 2)
    by_token = TokenWhitened(GroupCentred())(batch).advantages
    assert_close(by_token[:, 0], golden("adv2.rpp_baseline_verl_tokenweighted").flatten())

    # The same with leave-one-out; that system adds 1e-4 to the std (2/3 here) where we add 1e-8 to the variance.
    leave_one_out = SequenceWhitened(LeaveOneOut(), epsilon=0.0)(feedback(TWO_GROUPS, TWO))
    std = LeaveOneOut()(feedback(TWO_GROUPS, TWO)).std()
    assert_close(leave_one_out * std / (std + 1e-4), golden("adv2.trl_rloo_norm").flatten())


def test_live_scaled_makes_up_for_dead_groups():
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1])
    assert_close(LiveScaled()(feedback(rewards, TWO)), golden("adv3.gpg_paper").flatten())


def test_beta_normalized():
    rates = [0.25, 0.5, 0.75, 0.6]
    rewards = torch.cat([(torch.arange(20) < round(20 * rate)).double() for rate in rates])
    batch = feedback(rewards, torch.arange(4).repeat_interleave(20))
    first_of_group = BetaNormalized()(batch)[::20]
    assert_close(first_of_group, golden("bnpo.A(R=1)"))
    assert_close((1 - torch.tensor(rates)) / first_of_group, golden("bnpo.fN"), tolerance=1e-7)
    alpha, beta = BetaNormalized.fit(torch.tensor(rates).double().repeat_interleave(20), batch)
    assert_close(torch.stack([3 * (alpha - 1), 3 * (beta - 1), alpha, beta]), golden("bnpo.[a,b,alpha,beta]"), 1e-7)


@pytest.mark.parametrize("rates", [(0.25, 0.5, 0.75, 0.6), (0.05, 0.1, 0.9), (0.02, 0.03, 0.05)])
def test_beta_normalized_divides_by_the_density_with_the_least_variance(rates):
    """Of the gradient, as the paper measures it: E[p(1 − p) / f(p)²] for p of the batch's Beta law (a, b), whose
    logarithm is 2·ln B(α, β) + ln B(a + 3 − 2α, b + 3 − 2β) up to a constant."""
    spread = torch.tensor(rates).double()
    alpha, beta = BetaNormalized.fit(spread, feedback(spread, torch.arange(len(rates))))
    mean, variance = float(spread.mean()), float(spread.var())
    concentration = max(0.0, mean * (1 - mean) / variance - 1)

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    def log_variance(x: float, y: float) -> float:
        left, right = mean * concentration + 3 - 2 * x, (1 - mean) * concentration + 3 - 2 * y
        return 2 * log_beta(x, y) + log_beta(left, right)

    least = log_variance(float(alpha), float(beta))
    for far in (0.01, 0.1):
        others = [(far, 0), (-far, 0), (0, far), (0, -far), (far, far), (-far, -far), (far, -far), (-far, far)]
        assert all(log_variance(float(alpha) + x, float(beta) + y) > least for x, y in others)


def test_beta_normalized_with_three_halves_is_group_normalized_up_to_a_constant():
    # Rates 1/4 and 3/4: a = b = 1/2 gives α = β = 7/6; the density at p and 1 − p is the same by symmetry.
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0])
    advantages = BetaNormalized()(feedback(rewards, TWO))
    assert_close(advantages[0], -advantages[7])
    # The published check: with α = β = 3/2 the density is (8/π)·sqrt(p(1 − p)).
    density = (
        torch.distributions.Beta(torch.tensor(1.5), torch.tensor(1.5))
        .log_prob(torch.tensor([0.25, 0.5, 0.75, 0.6]))
        .exp()
    )
    spread = torch.tensor([0.25, 0.5, 0.75, 0.6]).sub(0.5).square().neg().add(0.25).sqrt()
    assert_close(density / spread, golden("bnpo.fN(alpha=beta=1.5)/sqrt(p(1-p)) == 8/pi"), tolerance=1e-5)


def test_beta_normalized_has_no_law_to_fit_in_one_group_and_refuses_rewards_beyond_one():
    assert_close(BetaNormalized()(one_group(1, 0, 0, 1)), [0.5, -0.5, -0.5, 0.5])
    with pytest.raises(ValueError, match="rewards run from -1 to 1"):
        BetaNormalized()(one_group(1, -1))


ALL = [GroupNormalized(), GroupCentred(), LeaveOneOut(), BatchScaled(), LiveScaled(), BetaNormalized()]


@pytest.mark.parametrize("advantage", ALL)
def test_a_group_of_one_and_a_unanimous_group_get_exactly_zero(advantage):
    assert advantage(one_group(0.7)).tolist() == [0.0]
    # Three tenths: their mean is not exactly 0.1, their std not exactly 0. Only max == min tells.
    assert advantage(one_group(0.1, 0.1, 0.1)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("advantage", ALL)
def test_an_unscored_completion_is_not_reward_zero(advantage):
    rewards = torch.tensor([1.0, NAN, 0, 1, 1, 1, NAN, 0])
    scored = ~rewards.isnan()
    with_holes = advantage(feedback(rewards, TWO))
    without = advantage(feedback(rewards[scored], TWO[scored]))
    assert with_holes[~scored].isnan().all()
    assert_close(with_holes[scored], without)


def test_a_group_left_with_one_scored_sibling_gets_zero_and_an_unscored_group_nan():
    group = torch.tensor([0, 0, 1, 1])
    advantages = GroupNormalized()(feedback(torch.tensor([NAN, 1.0, NAN, NAN]), group))
    assert advantages[1] == 0
    assert advantages[[0, 2, 3]].isnan().all()


def test_token_rewards_count_towards_the_total():
    token_rewards = torch.tensor([[0.25, 0.25], [0.0, 9.0]]).double()
    mask = torch.tensor([[True, True], [True, False]])
    advantages, _ = proximo.advantages(
        Algorithm(advantage=GroupCentred()),
        rewards=torch.tensor([0.0, 0.0]).double(),
        group=torch.tensor([0, 0]),
        mask=mask,
        token_rewards=token_rewards,
    )
    assert_close(advantages, [[0.25, 0.25], [-0.25, 0.0]])


def test_the_public_function_broadcasts_over_sampled_tokens_only():
    advantages, returns = proximo.advantages(GRPO, rewards=REWARDS, group=torch.zeros(4, dtype=torch.long), mask=MASK)
    expected = torch.tensor(GOLDEN["adv.grpo.verl_ddof1_eps1e-6"]).double().unsqueeze(1) * MASK
    assert_close(advantages, expected)
    assert returns is None


def test_bad_settings_say_field_value_and_remedy():
    with pytest.raises(ValueError, match=r"advantage.ddof is 2: 0 divides by G"):
        GroupNormalized(ddof=2)
    with pytest.raises(ValueError, match=r"advantage.epsilon is -1"):
        BatchScaled(epsilon=-1.0)
    with pytest.raises(ValueError, match=r"rewards has shape \(4, 1\), the mask requires \(4,\)"):
        proximo.advantages(GRPO, rewards=REWARDS.unsqueeze(1), group=torch.zeros(4, dtype=torch.long), mask=MASK)
