"""Advantages from a teacher, from the correct completions alone and from pairs: values by hand, and their gradients."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import proximo
from proximo.algorithms import DISTILL, ONLINE_DPO, RFT, Algorithm
from proximo.losses import BestAgainstWorst, Dpo, Feedback, GroupCentred, Imitation, KeepCorrect, TeacherKl
from proximo.losses.advantage_inputs import feedback_of
from proximo.losses.pieces.credit import assign, assign_parts
from tests.fixture import assert_close

NAN = math.nan
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-0.4, -1.0, 9.0]])
TEACHER = torch.tensor([[-0.5, -3.0, -0.5], [-0.1, -1.2, 9.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def feedback(**changes) -> Feedback:
    known = {"rewards": torch.tensor([1.0, 0.0]), "group": torch.tensor([0, 0]), "mask": MASK}
    return Feedback(**(known | {"old_logprobs": OLD, "teacher_logprobs": TEACHER} | changes))


def test_a_teacher_rewards_the_tokens_that_it_finds_likelier():
    assert_close(assign(TeacherKl(), feedback()).advantages, [[0.5, -1.0, 0.0], [0.3, -0.2, 0.0]])
    assert_close(assign(TeacherKl(2.0), feedback()).advantages, [[1.0, -2.0, 0.0], [0.6, -0.4, 0.0]])
    # With later tokens' at a half: 0.5 + (−1 + 0/2)/2 = 0, 0.3 − 0.2/2 = 0.2.
    discounted = assign(TeacherKl(kl_discount=0.5), feedback()).advantages
    assert_close(discounted, [[0.0, -1.0, 0.0], [0.2, -0.2, 0.0]])


def test_a_teacher_with_rewards():
    both = assign(TeacherKl(of=GroupCentred()), feedback()).advantages
    assert_close(both, [[1.0, -0.5, 0.5], [-0.2, -0.7, 0.0]])
    unscored = assign(TeacherKl(), feedback(rewards=torch.tensor([1.0, NAN]))).advantages
    assert unscored[1].isnan().all()


def test_best_against_worst_by_hand():
    """Three of a group: best moved by 0.4, worst by −0.2, so β·margin is 0.3; the third and an equal group get 0."""
    old = torch.tensor([[-1.0, -1.0], [-2.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]])
    moved = torch.tensor([[-0.3, 0.1], [5.0, 5.0], [0.1, 0.3], [1.0, 1.0], [2.0, 2.0]])
    rows = Feedback(
        rewards=torch.tensor([0.0, 0.5, 1.0, 1.0, 1.0]),
        group=torch.tensor([7, 7, 7, 2, 2]),
        mask=torch.ones(5, 2, dtype=torch.bool),
        old_logprobs=old,
        ref_logprobs=old - moved,
    )
    push = 3 * 0.5 / (1 + math.exp(0.3))
    assert_close(BestAgainstWorst(0.5)(rows), [-push, 0.0, push, 0.0, 0.0])
    unscored = replace(rows, rewards=torch.tensor([0.0, 0.5, NAN, NAN, NAN]))
    found = BestAgainstWorst(0.5)(unscored)
    assert found[2:].isnan().all()
    assert found[0] < 0 < found[1]


def test_imitation_and_the_correct_completions():
    assert_close(Imitation()(feedback()), [1.0, 1.0])
    assert Imitation()(feedback(rewards=torch.tensor([NAN, 0.0]))).isnan().tolist() == [True, False]
    outcome, group = torch.tensor([1.0, 0.0, -1.0, 0.3, NAN]), torch.zeros(5, dtype=torch.long)
    assert KeepCorrect()(outcome, group).tolist() == [True, False, False, True, False]
    assert KeepCorrect(above=0.5)(outcome, group).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("advantage", [TeacherKl(kl_discount=0.9, of=GroupCentred()), BestAgainstWorst()])
def test_rows_in_parts_get_the_same(advantage):
    random = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.randint(1, 6, (6, 1), generator=random)
    mask[:3, 3:] = False
    rows = {"rewards": torch.rand(6, generator=random), "group": torch.tensor([0, 1, 0, 1, 0, 1]), "mask": mask}
    names = ("old_logprobs", "ref_logprobs", "teacher_logprobs")
    rows |= {name: -torch.rand(6, 5, generator=random) for name in names}
    whole = assign(advantage, Feedback(**rows)).advantages
    first = Feedback(**{name: each[:3, :3] if each.ndim == 2 else each[:3] for name, each in rows.items()})
    second = Feedback(**{name: each[3:] for name, each in rows.items()})
    parts = assign_parts(advantage, [first, second])
    assert_close(parts[0].advantages, whole[:3, :3])
    assert_close(parts[1].advantages, whole[3:])


def test_missing_logprobs_are_named():
    with pytest.raises(ValueError, match=r"teacher_logprobs is None, but TeacherKl.* reads it"):
        TeacherKl()(feedback(teacher_logprobs=None))
    with pytest.raises(ValueError, match=r"old_logprobs is None"):
        TeacherKl()(feedback(old_logprobs=None))
    with pytest.raises(ValueError, match=r"teacher_logprobs has shape"):
        feedback_of(torch.ones(2), torch.zeros(2), MASK, None, None, teacher_logprobs=OLD[:1])


REFUSED = [
    (lambda: TeacherKl(0.0), r"advantage.coefficient is 0"),
    (lambda: TeacherKl(kl_discount=2), r"advantage.kl_discount is 2"),
    (lambda: BestAgainstWorst(0.0), r"advantage.beta is 0"),
    (lambda: ONLINE_DPO.check_run(group_size=1, updates_per_batch=1), r"group_size is 1"),
    (lambda: ONLINE_DPO.check_run(group_size=2, updates_per_batch=2), r"training.minibatches × training.epochs is 2"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_what_each_needs():
    assert (DISTILL.needs_reference, RFT.needs_reference, ONLINE_DPO.needs_reference) == (False, False, True)
    RFT.check_run(group_size=1, updates_per_batch=1)


# Laws


class World:
    """All completions of two tokens from a vocabulary of three, with their probabilities."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.first = torch.randn(3, generator=random).requires_grad_()
        self.second = torch.randn(3, 3, generator=random).requires_grad_()
        self.teacher = (
            torch.randn(3, generator=random).log_softmax(0),
            torch.randn(3, 3, generator=random).log_softmax(1),
        )
        self.completions = torch.tensor(list(product(range(3), range(3))))

    def of(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = self.completions.T
        return torch.stack([first[a], second[a, b]], dim=1)

    @property
    def logprobs(self) -> Tensor:
        return self.of(self.first.log_softmax(0), self.second.log_softmax(1))

    def gradient(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [self.first, self.second]))

    def expected(self, algorithm: Algorithm) -> list[Tensor]:
        """The gradient of the algorithm's loss, over all completions by their probability: no sampling noise."""
        logprobs, mask = self.logprobs, torch.ones(9, 2, dtype=torch.bool)
        rows: dict[str, Any] = {
            "group": torch.zeros(9, dtype=torch.long),
            "mask": mask,
            "old_logprobs": logprobs.detach(),
        }
        credit, _ = proximo.advantages(
            algorithm, rewards=torch.zeros(9), teacher_logprobs=self.of(*self.teacher), **rows
        )
        probability = logprobs.detach().sum(dim=1, keepdim=True).exp().expand(9, 2)
        loss, _ = proximo.policy_loss(algorithm, logprobs=logprobs, advantages=credit, weights=probability, **rows)
        return self.gradient(loss)


def test_with_all_later_tokens_it_is_the_gradient_of_the_reverse_kl():
    world = World()
    found = world.expected(replace(DISTILL, advantage=TeacherKl(kl_discount=1.0)))
    logprobs, teacher = world.logprobs.sum(dim=1), world.of(*world.teacher).sum(dim=1)
    for ours, exact in zip(found, world.gradient((logprobs.exp() * (logprobs - teacher)).sum()), strict=True):
        assert_close(ours, exact)


def test_without_later_tokens_it_is_the_gradient_of_each_tokens_reverse_kl():
    """Each token answers for the distribution that it was drawn from; where the text goes is held constant."""
    world = World()
    found = world.expected(DISTILL)
    first, second = world.first.log_softmax(0), world.second.log_softmax(1)
    of_first = (first.exp() * (first - world.teacher[0])).sum()
    of_second = (second.exp() * (second - world.teacher[1])).sum(dim=1)
    exact = world.gradient(of_first + (first.detach().exp() * of_second).sum())
    for ours, wanted in zip(found, exact, strict=True):
        assert_close(ours, wanted)


def test_online_dpo_has_the_gradient_of_dpos_loss():
    random = torch.Generator().manual_seed(3)
    mask = torch.arange(6) < torch.randint(1, 7, (12, 1), generator=random)
    group, rewards = torch.arange(12) % 3, torch.rand(12, generator=random)
    logprobs = (-torch.rand(12, 6, generator=random)).requires_grad_()
    reference = -torch.rand(12, 6, generator=random)
    rows: dict[str, Any] = {"group": group, "mask": mask, "old_logprobs": logprobs.detach(), "ref_logprobs": reference}
    credit, _ = proximo.advantages(ONLINE_DPO, rewards=rewards, **rows)
    loss, _ = proximo.policy_loss(ONLINE_DPO, logprobs=logprobs, advantages=credit, **rows)
    [found] = torch.autograd.grad(loss, logprobs)

    moved = ((logprobs - reference) * mask).sum(dim=1)
    pairs = [(group == number).nonzero().squeeze(1) for number in range(3)]
    best = torch.stack([rows[rewards[rows].argmax()] for rows in pairs])
    worst = torch.stack([rows[rewards[rows].argmin()] for rows in pairs])
    [exact] = torch.autograd.grad(Dpo(beta=0.1)(moved[best], moved[worst]).mean(), logprobs)
    assert_close(found, exact)


def test_rejection_sampling_has_the_gradient_of_the_likelihood_of_what_is_kept():
    logprobs = OLD.clone().requires_grad_()
    rows: dict[str, Any] = {"group": torch.tensor([0, 0]), "mask": MASK, "old_logprobs": OLD}
    credit, _ = proximo.advantages(RFT, rewards=torch.tensor([1.0, 1.0]), **rows)
    loss, _ = proximo.policy_loss(RFT, logprobs=logprobs, advantages=credit, **rows)
    [found] = torch.autograd.grad(loss, logprobs)
    assert_close(found, MASK / -5)
