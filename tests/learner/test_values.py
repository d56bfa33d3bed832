"""Value models: three forms on packed groups, by hand and against the padded path; and what they are worth."""

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from proximo.algorithms import GRPO, PPO, VAPO
from proximo.learner.critic import Critic, kl_per_completion
from proximo.learner.learner import Learner
from proximo.learner.options import LearnerOptions
from proximo.learner.passes import Passes
from proximo.learner.policy import PlainPolicy
from proximo.losses import AdaptiveKl, Gae, KlReward, TokenWhitened, ValueLoss
from proximo.losses.advantage_inputs import advantages, feedback_of, returns_to_go
from proximo.losses.diagnostics import compare_baselines, error_by_position, explained_variance
from proximo.models import completion_states, score, tiny_model
from proximo.models.packing.attention import attention
from proximo.models.packing.layout import pad
from proximo.models.values import OwnLayers, OwnModel, TrunkHead, value_model
from proximo.rl.assemble import assemble, to_batch
from proximo.types import Completion, Grade, Group, Problem, Rollout
from tests.models.test_scoring import exact
from tests.policies import plain

FORMS = {"head": TrunkHead(), "layers": OwnLayers(2), "model": OwnModel()}


def small_model(seed: int = 1):
    return exact(tiny_model(hidden=32, layers=3, heads=2, kv_heads=1, intermediate=64, seed=seed).double())


def groups() -> list[Group]:
    """Two prompts of different length, five completions of different length, interleaved outcomes."""

    def rollout(tokens: tuple[int, ...], outcome: float) -> Rollout:
        return Rollout(Completion(tokens, (-0.5,) * len(tokens), "", "stop"), Grade(outcome))

    return [
        Group(Problem("a", "a", ""), (7, 8, 9), (rollout((10, 11, 1), 1.0), rollout((12, 1), 0.0))),
        Group(
            Problem("b", "b", ""),
            (20, 21, 22, 23, 24),
            (rollout((1,), 0.0), rollout((13, 14, 15, 1), 1.0), rollout((16, 17, 1), 0.0)),
        ),
    ]


def stirred(value, seed: int = 3):
    """A head that says something: it starts at 0."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in value.named_parameters():
        if name.startswith("head"):
            parameter.data = torch.randn(parameter.shape, generator=random)
    return value


def estimates(value, policy, batch, layout: Literal["packed", "padded"]) -> Tensor:
    """Values of a batch by either layout, gradients to policy and value alike."""
    rows = {"prompts": batch.prompts, "tokens": batch.tokens, "lengths": batch.lengths, "group": batch.group}
    if value.needs_policy:
        with value.observing(policy):
            states = score(policy, **rows, layout=layout).states
        return value.estimate(batch, states)
    states = completion_states(value.model, **rows, layout=layout)
    return states.aligned(value.head(states.flat).squeeze(1))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_packed_values_and_gradients_are_the_padded_ones(form):
    policy, batch = small_model(), to_batch(groups())
    value = stirred(value_model(form, policy))
    results = {}
    layouts: tuple[Literal["packed", "padded"], ...] = ("packed", "padded")
    for layout in layouts:
        values = estimates(value, policy, batch, layout)
        weights = torch.linspace(-1, 2, values.numel(), dtype=torch.float64).view_as(values)
        parameters = [*policy.parameters(), *(p for _, p in value.named_parameters())]
        gradients = torch.autograd.grad((values * weights).sum(), parameters, allow_unused=True)
        results[layout] = values, [g for g in gradients if g is not None]
    assert_close(results["packed"][0], results["padded"][0], rtol=0, atol=1e-10)
    assert len(results["packed"][1]) == len(results["padded"][1]) > 2
    for packed, padded in zip(results["packed"][1], results["padded"][1], strict=True):
        assert_close(packed, padded, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_value_is_read_before_its_token_is_consumed(form):
    """By hand: the state at the end of what came before, normed, times the head; later tokens cannot matter."""
    policy, batch = small_model(), to_batch(groups())
    value: Any = stirred(value_model(form, policy))
    found = estimates(value, policy, batch, "packed")
    # All copies still equal the policy, so each form is head · (the policy's last state before the token).
    for row, length in enumerate(batch.lengths.tolist()):
        prompt, tokens = batch.prompts[int(batch.group[row])], batch.tokens[row, :length].tolist()
        for t in range(length):
            sequence = torch.tensor([[*prompt, *tokens[:t]]])
            with torch.no_grad(), attention(policy, "sdpa"):
                state = policy.model(input_ids=sequence, attention_mask=torch.ones_like(sequence)).last_hidden_state
            expected = value.head(state[0, -1]).squeeze()
            assert_close(found[row, t], expected, rtol=0, atol=1e-10)
        assert found[row, length:].count_nonzero() == 0


def test_gae_terminal_reward_and_value_loss_by_hand_on_packed_groups():
    batch = to_batch(groups())
    # Two groups of two and three rows, lengths 3, 2 | 1, 4, 3; values as a value model might give them.
    values = torch.tensor(
        [[0.5, 0.6, 0.8, 9.0], [0.4, 0.1, 9.0, 9.0], [0.3, 9.0, 9.0, 9.0], [0.2, 0.4, 0.6, 0.9], [0.5, 0.5, 0.2, 9.0]]
    )
    algorithm = replace(PPO, advantage=Gae(discount=1.0, decay=0.5), shape=None)
    found, returns = advantages(
        algorithm, rewards=batch.rewards, group=batch.group, mask=batch.mask, values=values, token_rewards=None
    )
    expected = torch.tensor(
        [
            # δ = 0.1, 0.2, 1 − 0.8: A = 0.1 + ½(0.2 + ½·0.2), 0.2 + ½·0.2, 0.2
            [0.25, 0.3, 0.2, 0.0],
            # δ = −0.3, −0.1
            [-0.35, -0.1, 0.0, 0.0],
            # a single token: nothing follows, the reward is 0
            [-0.3, 0.0, 0.0, 0.0],
            # δ = 0.2, 0.2, 0.3, 0.1
            [0.2 + 0.1 + 0.075 + 0.0125, 0.2 + 0.15 + 0.025, 0.35, 0.1],
            # δ = 0, −0.3, −0.2
            [-0.2, -0.4, -0.2, 0.0],
        ]
    )
    assert_close(found, expected)
    assert returns is not None
    assert_close(returns, torch.where(batch.mask, expected + values, 0.0))
    feedback = feedback_of(batch.rewards, batch.group, batch.mask, None, None)
    truth = returns_to_go(algorithm.advantage, feedback)
    assert_close(truth, batch.rewards.unsqueeze(1) * batch.mask)

    # The loss: ½ max over plain and clipped error, token mean over the 13 tokens, coefficient outside.
    rows = replace(batch, values=values, returns=returns)
    new = values + torch.tensor([0.0, 0.1, -0.5, 0.3])
    plain, near = new, values + torch.tensor([0.0, 0.1, -0.2, 0.2])
    error = torch.maximum((plain - returns).square(), (near - returns).square()) / 2
    weights = torch.full_like(values, 1 / 13) * batch.mask
    loss, stats = Critic(value_model(TrunkHead(), small_model()), ValueLoss(0.1, clip=0.2)).term(new, rows, weights)
    assert_close(stats.totals["value_loss"], (error * batch.mask).sum() / 13)
    assert_close(loss, 0.1 * (error * batch.mask).sum() / 13)
    assert_close(stats.totals["value_clip"], torch.tensor((3 + 1) / 13))  # columns 2 and 3 moved further than 0.2


def trainer(form, model=None, algorithm=PPO, **changes) -> Learner:
    model = model or small_model()
    options = replace(LearnerOptions(groups=2, minibatches=1, learning_rate=1e-3), **changes)
    return Learner(PlainPolicy(model), algorithm, options, temperature=1.0, seed=0, value=value_model(form, model))


@pytest.mark.slow("computes many updates")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("algorithm", [PPO, VAPO], ids=["ppo", "vapo"])
def test_an_update_does_not_depend_on_its_micro_batches(form, algorithm):
    gradients = []
    for budget in (1, 10_000):
        learner = trainer(form, algorithm=algorithm, token_budget=budget, max_gradient_norm=math.inf)
        assert learner.critic is not None
        stirred(learner.critic.model)
        learner.update(assemble(groups(), [], learner, 8).batch, fresh=True)
        gradients.append(
            [p.grad for p in [*plain(learner).parameters().values(), *plain(learner).value_parameters().values()]]
        )
    assert len(gradients[0]) == len(gradients[1])
    for one, many in zip(*gradients, strict=True):
        assert (one is None) == (many is None)
        if one is not None:
            assert_close(one, many, rtol=1e-8, atol=1e-12)


def value_gradient(form) -> tuple[list, list]:
    """Where a loss on values alone ends up: in the policy, in the value model's own parameters."""
    policy, batch = small_model(), to_batch(groups())
    value = stirred(value_model(form, policy))
    estimates(value, policy, batch, "packed").sum().backward()
    return [p.grad for p in policy.parameters()], [p.grad for _, p in value.named_parameters() if p.requires_grad]


def test_only_a_head_on_the_trunk_moves_the_trunk():
    trunk, head = value_gradient(TrunkHead())
    assert sum(gradient is not None for gradient in trunk) > 30
    assert len(head) == 2
    for form in (TrunkHead(trains_trunk=False), OwnLayers(1), OwnModel()):
        policy, own = value_gradient(form)
        assert all(gradient is None for gradient in policy), form
        assert all(gradient is not None for gradient in own), form


def test_own_layers_are_copies_and_too_many_are_refused():
    policy = small_model()
    value = value_model(OwnLayers(2), policy)
    own = sum(parameter.numel() for _, parameter in value.named_parameters())
    layer = sum(parameter.numel() for parameter in policy.model.layers[0].parameters())
    assert own == 2 * layer + 32 + 33  # two layers, the norm, a head with a bias
    assert not {id(p) for _, p in value.named_parameters()} & {id(p) for p in policy.parameters()}
    with pytest.raises(ValueError, match=r"value.form.layers is 4, but the policy has 3"):
        value_model(OwnLayers(4), policy)
    with pytest.raises(ValueError, match=r"value.form.layers is 0"):
        OwnLayers(0)


@pytest.mark.slow("computes many updates")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_pretraining_moves_the_values_and_nothing_of_the_policy(form):
    learner = trainer(form, learning_rate=4e-3)
    before = [p.detach().clone() for p in plain(learner).parameters().values()]
    assembled = assemble(groups(), [], learner, 8)
    assert assembled.earned is not None
    batch = replace(assembled.batch, returns=assembled.earned)
    losses = [float(update.stats.totals["value_loss"]) for _ in range(60) for update in learner.value_updates(batch)]
    # What no value model can know: at the first token siblings share their state, not their return.
    least = (1 / 2 + 2 / 3) / 13 / 2
    assert losses[0] == pytest.approx(7 / 13 / 2)
    assert losses[-1] < 0.7 * losses[0] if isinstance(form, TrunkHead) else losses[-1] == pytest.approx(least, rel=0.05)
    assert all(torch.equal(old, new) for old, new in zip(before, plain(learner).parameters().values(), strict=True))
    assert learner.version == 0


def test_pretraining_is_not_held_by_the_clip():
    """Frozen returns: values 1 away from where they started still have a gradient."""
    critic = Critic(value_model(TrunkHead(), small_model()), ValueLoss(0.1, clip=0.2))
    assert critic.unclipped().loss == ValueLoss(0.1, clip=None)


def test_values_have_a_learning_rate_and_a_gradient_norm_of_their_own():
    model = small_model()
    value = value_model(OwnLayers(1), model)
    options = LearnerOptions(groups=2, minibatches=1, learning_rate=1e-3, warmup_steps=4)
    learner = Learner(PlainPolicy(model), PPO, options, temperature=1.0, seed=0, value=value, value_learning_rate=1e-2)
    assert learner.set_learning_rate(0) == pytest.approx(2.5e-4)
    assert [group["lr"] for group in plain(learner).optimizer.param_groups] == pytest.approx([2.5e-4, 2.5e-3])
    learner.set_learning_rate(10)
    assert [group["lr"] for group in plain(learner).optimizer.param_groups] == pytest.approx([1e-3, 1e-2])
    update = learner.update(assemble(groups(), [], learner, 8).batch, fresh=True)
    assert update.value_gradient_norm is not None
    assert update.value_gradient_norm > 0
    without = Learner(PlainPolicy(small_model()), GRPO, options, temperature=1.0, seed=0)
    assert without.update(assemble(groups(), [], without, 8).batch, fresh=True).value_gradient_norm is None


# What a value model is worth


def test_explained_variance_by_hand():
    returns = torch.tensor([[1.0, 1.0], [0.0, 9.0]])
    mask = torch.tensor([[True, True], [True, False]])
    assert float(explained_variance(returns, returns, mask)) == 1.0
    assert float(explained_variance(torch.full_like(returns, 0.3), returns, mask)) == pytest.approx(0.0, abs=1e-12)
    # Errors 0.5, 0.0, 0.0: variance 1/18 of a variance of 2/9.
    values = torch.tensor([[0.5, 1.0], [0.0, -7.0]])
    assert float(explained_variance(values, returns, mask)) == pytest.approx(0.75)
    assert math.isnan(float(explained_variance(values, torch.ones_like(returns), mask)))


def test_error_by_position_by_hand():
    values, returns = torch.zeros(2, 4), torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 7.0, 7.0]])
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    # The second row's two tokens stand in the first and the third quarter.
    found = error_by_position(values, returns, mask)
    assert_close(found, torch.tensor([math.sqrt(101 / 2), 2.0, math.sqrt(409 / 2), 4.0]))
    assert error_by_position(values, returns, mask & (torch.arange(4) < 1)).isnan().tolist() == [
        False,
        True,
        True,
        True,
    ]


def test_baselines_by_hand():
    # Outcomes 1, 0 | 1, 1, 0 | 1 alone; lengths 2, 1 | 1, 1, 1 | 2.
    returns = torch.tensor([[1.0, 1.0], [0.0, 9.0], [1.0, 9.0], [1.0, 9.0], [0.0, 9.0], [1.0, 1.0]])
    mask = torch.tensor([[True, True], [True, False], [True, False], [True, False], [True, False], [True, True]])
    group = torch.tensor([0, 0, 1, 1, 1, 2])
    values = torch.full_like(returns, 0.5)
    found = compare_baselines(values, returns, mask, group)
    # Siblings' means: 0, 1 | ½, ½, 1; the row without siblings is left out.
    assert float(found.group) == pytest.approx((1 + 1 + 1 + 0.25 + 0.25 + 1) / 6)
    assert float(found.value) == pytest.approx(0.25)
    assert math.isnan(float(compare_baselines(values, returns, mask, torch.arange(6)).group))


def test_kl_per_completion_by_hand():
    batch = to_batch(groups())
    assert kl_per_completion(batch) is None
    reference = batch.old_logprobs - 0.1 * batch.mask
    # 13 tokens of 0.1 nats, five completions.
    assert kl_per_completion(replace(batch, ref_logprobs=reference)) == pytest.approx(1.3 / 5, rel=1e-6)


def coefficient(learner: Learner) -> float:
    assert learner.kl_reward is not None
    return learner.kl_reward.coefficient


def test_the_coefficient_follows_the_controller():
    adaptive = replace(PPO, shape=KlReward(0.05, controller=AdaptiveKl(target=1.0, horizon=100)))
    learner = trainer(TrunkHead(), algorithm=adaptive)
    learner.adapt_kl(2.0, completions=50)
    assert coefficient(learner) == pytest.approx(0.05 * 1.1)
    learner.adapt_kl(0.95, completions=50)
    assert coefficient(learner) == pytest.approx(0.05 * 1.1 * (1 - 0.05 * 0.5))
    fixed = trainer(TrunkHead())
    fixed.adapt_kl(2.0, completions=50)
    assert coefficient(fixed) == 0.05
    # What the reward then charges.
    model = learner.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batch = assemble(groups(), [], learner, 8).batch
    assert batch.ref_logprobs is not None
    charge = coefficient(learner) * (batch.old_logprobs - batch.ref_logprobs)
    truth = assemble(groups(), [], learner, 8).earned
    assert truth is not None
    first = torch.where(batch.mask, -charge, 0.0).sum(dim=1) + batch.rewards
    assert_close(truth[:, 0], first, rtol=0, atol=1e-6)


@pytest.mark.slow("computes many updates")
def test_every_form_learns_what_a_prompt_is_worth():
    """Prompt a always earns 1, prompt b 0: after some updates the values say so."""
    for form in FORMS.values():
        learner = trainer(form, learning_rate=1e-2, algorithm=replace(PPO, shape=None, extra=ValueLoss(1.0, clip=None)))
        told = [
            replace(group, rollouts=tuple(replace(each, grade=Grade(float(number == 0))) for each in group.rollouts))
            for number, group in enumerate(groups())
        ]
        for _ in range(20):
            list(learner.updates(assemble(told, [], learner, 8).batch))
        batch = assemble(told, [], learner, 8).batch
        assert batch.values is not None
        worth = [float(batch.values[batch.mask & (batch.group == number).unsqueeze(1)].mean()) for number in (0, 1)]
        assert worth[0] > 0.7, (form, worth)
        assert worth[1] < 0.3, (form, worth)


def test_passes_without_a_policy_where_none_is_needed():
    """A model of its own does not run the policy to be trained."""
    policy, batch = small_model(), to_batch(groups())
    value = value_model(OwnModel(), policy)
    calls = []
    policy.register_forward_hook(lambda *_: calls.append(1))
    policy.model.register_forward_hook(lambda *_: calls.append(1))
    Passes(1.0, 1000).values(policy, value, batch)
    assert not calls
    assert pad(batch.prompts, batch.tokens, batch.lengths, batch.group).tokens.shape == (5, 9)


def test_whitening_keeps_the_targets():
    learner = trainer(TrunkHead())
    assert learner.algorithm.advantage == TokenWhitened(Gae(1.0, 0.95))
    assembled = assemble(groups(), [], learner, 8)
    batch = assembled.batch
    assert float(batch.advantages[batch.mask].mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(batch.advantages[batch.mask].std()) == pytest.approx(1.0, abs=1e-6)
    assert batch.returns is not None
    assert float(batch.returns[batch.mask].max()) == pytest.approx(1.0)


def test_returns_to_go_have_the_algorithms_discount():
    algorithm = replace(PPO, advantage=TokenWhitened(Gae(discount=0.5)))
    rewards, mask, group = torch.tensor([1.0]), torch.tensor([[True, False, True, True]]), torch.tensor([0])
    found = returns_to_go(algorithm.advantage, feedback_of(rewards, group, mask, None, None))
    assert_close(found, torch.tensor([[0.25, 0.0, 0.5, 1.0]]))  # no discount passes at a token nobody sampled
