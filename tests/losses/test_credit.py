import math
from dataclasses import replace

import pytest
import torch

import proximo
from proximo.algorithms import PPO, REINFORCE_PP, VAPO
from proximo.losses import (
    Clip,
    Feedback,
    Gae,
    GroupCentred,
    GroupNormalized,
    KlReward,
    ProcessNormalized,
    ReturnToGo,
    SignScaled,
    TokenMean,
    TokenWhitened,
    ValueLoss,
)
from proximo.losses.pieces.credit import assign_parts
from proximo.losses.pieces.protocols import AdvantageTraits
from tests.fixture import GOLDEN, GROUP, LOG_RATIO, MASK, OLD, REF, REWARDS, assert_close, golden

VALUES = torch.tensor([[0.2, 0.4, 0.9, 0.5, 0.7]]).double()
NAN = math.nan


def known(returns: torch.Tensor | None) -> torch.Tensor:
    assert returns is not None
    return returns


def one_row(mask: list[int] | None = None, reward: float = 1.0, token_rewards: torch.Tensor | None = None) -> Feedback:
    return Feedback(
        rewards=torch.tensor([reward]).double(),
        group=torch.tensor([0]),
        mask=torch.tensor([mask or [1, 1, 1, 1, 1]]).bool(),
        values=VALUES,
        token_rewards=token_rewards,
    )


def test_gae_by_hand():
    credit = Gae(decay=0.95)(one_row())
    assert_close(credit.advantages[0], golden("gae.full.l0.95"))
    assert_close(known(credit.returns)[0], golden("gae.full.returns.l0.95"))
    credit = Gae(decay=1.0)(one_row())
    assert_close(credit.advantages[0], golden("gae.full.l1.0"))
    assert_close(known(credit.returns)[0], golden("gae.full.returns.l1.0"))
    assert_close(Gae(discount=0.99, decay=0.95)(one_row()).advantages[0], golden("gae.g0.99.l0.95"))


def test_gae_with_decay_0_is_the_one_step_error():
    assert_close(Gae(decay=0.0)(one_row()).advantages[0], [0.2, 0.5, -0.4, 0.2, 0.3])


def test_gae_steps_over_a_token_the_policy_did_not_sample():
    credit = Gae(decay=0.95)(one_row(mask=[1, 1, 0, 1, 1]))
    expected = golden("gae.skip_obs.l0.95") * torch.tensor([1, 1, 0, 1, 1])
    assert_close(credit.advantages[0], expected)


def test_gae_steps_over_tokens_after_the_last_sampled_one_too():
    # The reward moves to the last sampled token: δ_2 = 1 − 0.9 there, and nothing flows in from the padding.
    credit = Gae(decay=0.5)(one_row(mask=[0, 1, 1, 0, 0]))
    assert_close(credit.advantages[0], [0, 0.5 + 0.5 * 0.1, 0.1, 0, 0])
    assert_close(known(credit.returns)[0], [0, 0.95, 1.0, 0, 0])


def test_whitening_over_tokens():
    credit = TokenWhitened(Gae(decay=0.95))(one_row())
    assert_close(credit.advantages[0], golden("gae.whiten_unbiased"))
    assert_close(known(credit.returns)[0], golden("gae.full.returns.l0.95"))


def test_whitening_a_single_token_or_equal_tokens_gives_zero():
    assert TokenWhitened(Gae())(one_row(mask=[0, 0, 1, 0, 0])).advantages.abs().sum() == 0
    flat = Feedback(torch.tensor([1.0, 1.0]), torch.tensor([0, 1]), torch.ones(2, 3).bool())
    assert TokenWhitened(ReturnToGo())(flat).advantages.abs().sum() == 0


def test_length_adaptive_decay_and_the_critics_own():
    gae = Gae(length_adaptive=0.05, critic_decay=1.0)
    lengths = torch.arange(100) < torch.tensor([[100], [10]])
    assert_close(gae.decays(lengths), [GOLDEN["vapo.lambda_len100_a0.05"], GOLDEN["vapo.lambda_len10_a0.05_clamped"]])
    credit = gae(one_row())
    assert_close(credit.advantages[0], [0.2, 0.5, -0.4, 0.2, 0.3])  # five tokens: λ = 0
    assert_close(known(credit.returns)[0], [1.0] * 5)  # λ = 1 for the critic


def test_return_to_go_discounts_over_sampled_tokens():
    token_rewards = torch.tensor([[0.1, 0.2, 100.0, 0.4, NAN]]).double()
    credit = ReturnToGo(discount=0.5)(one_row(mask=[1, 1, 0, 1, 1], token_rewards=token_rewards))
    assert_close(credit.advantages[0], [0.1 + 0.5 * 0.65, 0.2 + 0.5 * 0.9, 0, 0.4 + 0.5 * 1.0, 1.0])


def test_kl_in_the_reward_and_reinforce_pp():
    token_rewards = KlReward(0.05)(OLD, REF, MASK)
    expected = golden("kl_in_reward.row0_token_rewards") - torch.tensor([0, 0, 0, 1.0])
    assert_close(token_rewards[0], expected)
    whitened, returns = proximo.advantages(
        REINFORCE_PP, rewards=REWARDS, group=GROUP, mask=MASK, token_rewards=token_rewards
    )
    assert_close(known(returns), golden("rpp.returns"))
    assert_close(whitened, golden("rpp.adv"))


def test_ppo_from_rewards_to_loss_on_one_row():
    gae_only = replace(PPO, advantage=Gae(decay=0.95))
    advantages, returns = proximo.advantages(
        gae_only,
        rewards=REWARDS[:1],
        group=GROUP[:1],
        mask=MASK[:1],
        values=torch.tensor([[0.2, 0.4, 0.6, 0.8]]).double(),
        token_rewards=KlReward(0.05)(OLD, REF, MASK)[:1],
    )
    assert_close(advantages[0], golden("ppo.row0.A"))
    assert_close(known(returns)[0], golden("ppo.row0.returns"))
    loss, _ = proximo.policy_loss(
        PPO,
        logprobs=(OLD + LOG_RATIO)[:1],
        old_logprobs=OLD[:1],
        advantages=advantages,
        mask=MASK[:1],
        group=GROUP[:1],
    )
    assert_close(loss, GOLDEN["ppo.row0.loss_clip.2"])


def test_process_rewards_by_hand():
    # Steps: 0.5 and 1 in row 0, then 0, 0, 1. Mean 0.5, biased variance 0.2; a step of reward 0 is a step.
    token_rewards = torch.full((4, 4), NAN).double()
    for row, position, reward in [(0, 1, 0.5), (0, 3, 1.0), (1, 1, 0.0), (2, 2, 0.0), (3, 0, 1.0)]:
        token_rewards[row, position] = reward
    batch = Feedback(REWARDS, GROUP, MASK, token_rewards=token_rewards)
    assert_close(ProcessNormalized(ddof=0, epsilon=0.0)(batch).advantages, golden("adv.grpo_process"))
    assert_close(ProcessNormalized(epsilon=0.0)(batch).advantages[0], [1.0, 1.0, 1.0, 1.0])
    equal = Feedback(REWARDS, GROUP, MASK, token_rewards=torch.where(token_rewards.isnan(), NAN, 0.1))
    assert ProcessNormalized()(equal).advantages.abs().sum() == 0


def test_a_process_step_counts_from_where_it_ends_backwards():
    token_rewards = torch.tensor([[1.0, NAN, NAN], [NAN, NAN, 0.0]]).double()
    batch = Feedback(
        torch.zeros(2).double(), torch.tensor([0, 0]), torch.ones(2, 3).bool(), token_rewards=token_rewards
    )
    half = 1 / math.sqrt(2)
    assert_close(ProcessNormalized(epsilon=0.0)(batch).advantages, [[half, 0, 0], [-half, -half, -half]])


def test_process_steps_of_a_group_are_compared_where_its_rows_come_in_parts():
    """Steps 1 and 2 in one part, 3 in the other: mean 2, deviation 1; a token gets what is still to end."""
    first = Feedback(
        rewards=torch.ones(1).double(),
        group=torch.tensor([4]),
        mask=torch.ones(1, 3).bool(),
        token_rewards=torch.tensor([[1.0, NAN, 2.0]]).double(),
    )
    second = replace(first, mask=torch.ones(1, 1).bool(), token_rewards=torch.tensor([[3.0]]).double())
    wide, narrow = assign_parts(ProcessNormalized(epsilon=0.0), [first, second])
    assert_close(wide.advantages, [[-1.0, 0.0, 0.0]])
    assert_close(narrow.advantages, [[1.0]])


def test_an_unscored_row_is_nan_and_out_of_the_whitening():
    mask = torch.ones(3, 2).bool()
    values = torch.tensor([[0.5, 0.1], [0.3, 0.2], [9.0, 9.0]]).double()
    rewards = torch.tensor([1.0, 0.0, NAN]).double()
    group = torch.tensor([0, 0, 0])
    whole, returns = proximo.advantages(PPO, rewards=rewards, group=group, mask=mask, values=values)
    part, _ = proximo.advantages(PPO, rewards=rewards[:2], group=group[:2], mask=mask[:2], values=values[:2])
    assert whole[2].isnan().all()
    assert known(returns)[2].isnan().all()
    assert_close(whole[:2], part)


def test_sign_scaled():
    batch = Feedback(REWARDS, GROUP, MASK)
    scaled = SignScaled(GroupCentred(), positive=1.0, negative=2.0)(batch).advantages
    assert_close(scaled[:, 0], [0.5, -1.0, -1.0, 0.5])


def test_values_and_token_rewards_are_asked_for():
    plain = Feedback(REWARDS, GROUP, MASK)
    with pytest.raises(ValueError, match="values is None: Gae needs"):
        Gae()(plain)
    with pytest.raises(ValueError, match="token_rewards is None: ProcessNormalized needs"):
        ProcessNormalized()(plain)
    with pytest.raises(ValueError, match=r"advantage.decay is 1.5: it must lie from 0 to 1"):
        Gae(decay=1.5)
    with pytest.raises(ValueError, match=r"advantage.length_adaptive is -1"):
        Gae(length_adaptive=-1.0)


def test_value_free_and_value_based_defaults():
    assert TokenWhitened(Gae(discount=1.0, decay=0.95)) == PPO.advantage
    assert PPO.extra == ValueLoss(0.1, clip=0.2)
    assert PPO.gate == Clip(0.2, 0.2)
    assert PPO.weights == TokenMean()
    assert AdvantageTraits.read(VAPO.advantage).needs_values
    assert not AdvantageTraits.read(GroupNormalized()).needs_values
