"""float16: gradients agree with exact ones, what overflows is computed again, and what is not finite is skipped."""

from collections.abc import Callable

import pytest
import torch

from proximo.algorithms import GRPO, PPO, Algorithm
from proximo.learner import optimizer
from proximo.learner.guard import Update
from proximo.learner.learner import Learner
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.models import tiny_model, with_precision
from proximo.rl.assemble import assemble
from tests.learner.test_limits import groups, state_of
from tests.policies import plain

pytestmark = pytest.mark.usefixtures("ordinary_precision")


def updated(dtype: torch.dtype, algorithm: Algorithm = GRPO, change: Callable = lambda learner: None) -> tuple:
    """A learner after one update, and the update."""
    model = tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=32, seed=1)
    model = with_precision(with_precision(model, torch.float16), dtype)
    torch.manual_seed(0)
    options = LearnerOptions(groups=4, minibatches=1, warmup_steps=0, learning_rate=1e-2)
    learner = Learner(PlainPolicy(model), algorithm, options, temperature=1.0, seed=0)
    learner.set_learning_rate(1)
    batch = assemble(groups(), [], learner, 8).batch
    change(learner)
    return learner, learner.update(batch, fresh=True)


@pytest.mark.parametrize("algorithm", [GRPO, PPO], ids=["GRPO", "PPO"])
def test_the_gradient_of_scaled_losses_is_that_of_double_precision(algorithm: Algorithm):
    """For the value model's own parameters too, which are in another group."""
    update: Update = updated(torch.float16, algorithm)[1]
    exact: Update = updated(torch.float64, algorithm)[1]
    assert update.skipped is None
    assert update.gradient_norm == pytest.approx(exact.gradient_norm, rel=0.01)
    assert (update.value_gradient_norm is None) == (algorithm is GRPO)
    if update.value_gradient_norm is not None:
        assert update.value_gradient_norm == pytest.approx(exact.value_gradient_norm, rel=0.01)


def test_a_gradient_that_overflows_is_computed_again_and_the_same_update_follows(monkeypatch):
    calm, _ = updated(torch.float16)
    monkeypatch.setattr(optimizer, "LOSS_SCALES", (2.0**40, *optimizer.LOSS_SCALES))
    passes = []
    learner, update = updated(torch.float16, change=lambda learner: counted(learner, passes))
    assert update.skipped is None
    assert len(passes) == 2, "one overflowed"
    assert all(map(torch.equal, state_of(learner), state_of(calm)))


def counted(learner: Learner, passes: list) -> None:
    """Note each pass of the model, at its last norm."""
    learner.model.get_submodule("model.norm").register_forward_hook(lambda *_: passes.append(1))


def test_what_is_not_finite_at_any_scale_is_skipped_and_changes_nothing():
    def break_gradient(learner: Learner) -> None:
        next(iter(learner.model.parameters())).register_hook(lambda gradient: gradient * float("nan"))

    learner, update = updated(torch.float16, change=break_gradient)
    assert update.skipped is not None
    assert "not finite" in update.skipped.reason
    fresh = tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=32, seed=1)
    with_precision(fresh, torch.float16)
    assert all(map(torch.equal, plain(learner).parameters().values(), fresh.parameters()))
