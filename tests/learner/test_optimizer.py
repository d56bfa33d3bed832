"""AdamW with float32 masters for half-precision weights: what is small adds up, and addresses stay."""

import copy
import gc
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from proximo.learner.optimizer import LOSS_SCALES, Optimizer
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.models import score, tiny_model, with_precision
from proximo.rl.config import TrainingOptions
from proximo.runs.config_changes import differences
from proximo.supervised.schedule import FitOptions


def weights(dtype: torch.dtype, size: int = 300, seed: int = 0) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(size, generator=random).to(dtype)), nn.Parameter(torch.ones(3, 2).to(dtype))]


def pull(parameters: list[nn.Parameter], number: int) -> torch.Tensor:
    """A loss whose gradient differs from call to call."""
    random = torch.Generator().manual_seed(100 + number)
    return torch.stack([(each.float() * torch.randn(each.shape, generator=random)).sum() for each in parameters]).sum()


def test_full_precision_is_plain_adamw_bit_for_bit():
    ours, plain = weights(torch.float32), weights(torch.float32)
    optimizer = Optimizer([ours[:1], ours[1:]], learning_rate=1e-2, weight_decay=0.1)
    expected = torch.optim.AdamW(plain, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    for step in range(3):
        optimizer.zero_grad()
        expected.zero_grad()
        pull(ours, step).backward()
        pull(plain, step).backward()
        assert ours[0].grad is not None
        assert float(optimizer.clip(0, 0.5)) == float(nn.utils.clip_grad_norm_(plain[:1], 0.5))
        optimizer.step()
        expected.step()
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)


def test_fused_differs_from_torchs_own_loop_by_rounding_only():
    fused, loop = weights(torch.float64), weights(torch.float64)
    optimizer = Optimizer([fused], learning_rate=1e-2)
    plain = torch.optim.AdamW(loop, lr=1e-2, betas=(0.9, 0.95), weight_decay=0)
    for step in range(5):
        optimizer.zero_grad()
        plain.zero_grad()
        pull(fused, step).backward()
        pull(loop, step).backward()
        optimizer.step()
        plain.step()
    assert_close(fused, loop, rtol=1e-12, atol=1e-14)


def test_micro_batches_are_summed_in_float32():
    # 1 + 255 · 2⁻⁸ = 1.996…, but bfloat16 loses each 2⁻⁸ beside 1: added one by one they vanish.
    parts = [1.0] + [2.0**-8] * 255
    halves = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    for part in parts:
        (halves * part).sum().backward()
    assert halves.grad is not None
    assert float(halves.grad) == 1.0

    halves.grad = None
    optimizer = Optimizer([[halves]], learning_rate=1.0)
    for part in parts:
        (halves * part).sum().backward()
        assert halves.grad is None, "the half-precision gradient is gone as soon as it is whole"
    [master] = optimizer.held(0)
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    assert float(master.grad) == sum(parts)


@pytest.mark.slow("computes many updates")
def test_micro_batches_of_a_model_add_up_better_than_in_bfloat16():
    model = with_precision(tiny_model(hidden=64, layers=2, intermediate=96), torch.bfloat16)
    parameters, tokens = list(model.parameters()), torch.randint(3, 90, (16, 1, 8), generator=torch.Generator())

    def backward(part: torch.Tensor) -> None:
        score(
            model, prompts=[[5, 6]], tokens=part, lengths=torch.tensor([8]), group=torch.tensor([0])
        ).logprobs.sum().backward()

    def taken() -> list[torch.Tensor]:
        found = [each.grad for each in parameters if each.grad is not None]
        model.zero_grad(set_to_none=True)
        assert len(found) == len(parameters)
        return found

    apart = []
    for part in tokens:
        backward(part)
        apart.append(taken())
    exact = [torch.stack(parts).double().sum(0) for parts in zip(*apart, strict=True)]
    for part in tokens:
        backward(part)
    rounded = taken()
    optimizer = Optimizer([parameters], learning_rate=1.0)
    for part in tokens:
        backward(part)
    held = [each.grad for each in optimizer.held(0)]

    def error(found) -> float:
        gap = sum(float((a.double() - b).norm() ** 2) for a, b in zip(found, exact, strict=True))
        return (gap / sum(float(b.norm() ** 2) for b in exact)) ** 0.5

    assert error(rounded) > 1e-3
    assert error(held) < 1e-6


def test_steps_below_the_spacing_of_bfloat16_add_up():
    # Around 1 bfloat16 has a spacing of 2⁻⁷; each step is about 1e-3, eight of them less than one spacing.
    halves, full = nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), nn.Parameter(torch.ones(4, dtype=torch.float32))
    optimizer, plain = Optimizer([[halves]], learning_rate=1e-3), Optimizer([[full]], learning_rate=1e-3)
    for _ in range(40):
        for parameter, its in ((halves, optimizer), (full, plain)):
            its.zero_grad()
            parameter.float().sum().backward()
            its.step()
    assert_close(full.detach(), torch.full((4,), 1 - 40e-3, dtype=torch.float32), rtol=0, atol=1e-4)
    assert torch.equal(halves.detach(), full.detach().bfloat16())
    [master] = optimizer.held(0)
    assert torch.equal(master.detach(), full.detach())


def test_gradients_too_small_for_float16_count_with_their_loss_scaled():
    small = 2.0**-30
    halves, plain = (nn.Parameter(torch.ones(3, dtype=torch.float16)) for _ in range(2))
    (plain * small).float().sum().backward()
    assert plain.grad is not None
    assert not plain.grad.any(), "float16 has nothing so small"
    optimizer = Optimizer([[halves]], learning_rate=1.0)
    for _ in range(2):
        optimizer.backward((halves.float() * small).sum())
    [master] = optimizer.held(0)
    assert not optimizer.overflowed()
    assert master.grad is not None
    assert torch.equal(master.grad, torch.full((3,), 2 * small))


def test_a_gradient_that_overflows_float16_is_asked_for_again_and_is_then_exact():
    halves = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer, sizes, asked = Optimizer([[halves]], learning_rate=1.0), [600.0, 3.0, 40_000.0, math.inf], []
    for size in sizes:
        tries = 0
        while tries == 0 or optimizer.overflowed():
            optimizer.zero_grad()
            optimizer.backward((halves.float() * size).sum())
            tries += 1
        [master] = optimizer.held(0)
        assert master.grad is not None
        assert torch.equal(master.grad, torch.full((3,), size))
        asked.append(tries)
    assert asked == [2, 1, 3, 3], "each update begins with the largest factor; what is infinite is the guard's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_other_precisions_are_never_scaled(dtype):
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = Optimizer([[weight]], learning_rate=1.0)
    optimizer.backward((weight.float() * math.inf).sum())
    assert not optimizer.overflowed()
    assert optimizer.held(0)[0].grad is not None
    wide = Optimizer([[nn.Parameter(torch.ones(3))]], learning_rate=1.0, computes_in=torch.float16)
    [held] = wide.held(0)
    wide.backward(held.sum())
    assert held.grad is not None
    assert float(held.grad[0]) == LOSS_SCALES[0], "passes in float16 over parameters in float32, as in shards"
    assert not wide.overflowed()
    assert torch.equal(held.grad, torch.ones(3))


def test_addresses_never_change():
    halves = weights(torch.bfloat16)
    before = [each.data_ptr() for each in halves]
    optimizer = Optimizer([halves], learning_rate=0.1)
    start = [each.detach().clone() for each in halves]
    for step in range(3):
        optimizer.zero_grad()
        pull(halves, step).backward()
        optimizer.clip(0, 1.0)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert [each.data_ptr() for each in halves] == before
    assert not any(torch.equal(now, then) for now, then in zip(halves, start, strict=True))


def test_clipping_sees_the_float32_gradient():
    halves = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = Optimizer([[halves]], learning_rate=1.0)
    (halves * torch.tensor([3.0, 4.0], dtype=torch.bfloat16)).sum().backward()
    assert float(optimizer.clip(0, 1.0)) == 5.0
    [master] = optimizer.held(0)
    assert master.grad is not None
    assert_close(master.grad, torch.tensor([0.6, 0.8], dtype=torch.float32), rtol=0, atol=1e-5)


def test_a_gradient_of_zero_is_not_no_gradient():
    halves = weights(torch.bfloat16)
    optimizer = Optimizer([halves], learning_rate=0.1, weight_decay=0.5)
    optimizer.zero_missing_gradients(0)
    optimizer.step()
    assert_close(halves[1].detach(), torch.full((3, 2), 0.95).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_is_loaded_goes_on_bit_for_bit(dtype):
    def train(parameters: list[nn.Parameter], optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            pull(parameters, step).backward()
            optimizer.step()

    through, stopped = weights(dtype), weights(dtype)
    train(through, Optimizer([through[:1], through[1:]], learning_rate=1e-3, weight_decay=0.1), range(6))
    first = Optimizer([stopped[:1], stopped[1:]], learning_rate=1e-3, weight_decay=0.1)
    train(stopped, first, range(3))
    state = first.state_dict()
    resumed = [nn.Parameter(each.detach().clone()) for each in stopped]
    second = Optimizer([resumed[:1], resumed[1:]], learning_rate=9.0)
    second.load_state_dict(state)
    train(stopped, first, range(3, 6))  # the one that it is from goes its own way
    train(resumed, second, range(3, 6))
    for one, other in zip(through, resumed, strict=True):
        assert torch.equal(one, other)


def test_a_state_of_another_precision_is_refused():
    halves, full = weights(torch.bfloat16), weights(torch.float32)
    state = Optimizer([full], learning_rate=1.0).state_dict()
    with pytest.raises(ValueError, match="0 masters"):
        Optimizer([halves], learning_rate=1.0).load_state_dict(state)


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_who_listens_no_more_leaves_gradients_alone(how):
    halves = weights(torch.bfloat16)
    optimizer = Optimizer([halves], learning_rate=1.0)
    if how == "closed":
        optimizer.close()
    else:
        del optimizer
        gc.collect()
    pull(halves, 0).backward()
    assert halves[0].grad is not None


def test_a_second_optimizer_of_the_same_half_precision_weights_is_refused():
    """It would see no gradient and train nothing; once the first is closed or gone, it may."""
    parameters = weights(torch.bfloat16)
    first = Optimizer([parameters], learning_rate=1e-2)
    with pytest.raises(ValueError, match="has an optimizer already.*close"):
        Optimizer([parameters], learning_rate=1e-2)
    pull(parameters, 0).backward()
    assert first.apply(1.0)[0] > 0
    copied = Optimizer([copy.deepcopy(parameters)], learning_rate=1e-2)
    first.close()
    second = Optimizer([parameters], learning_rate=1e-2)
    pull(parameters, 1).backward()
    assert second.apply(1.0)[0] > 0
    del second, copied
    Optimizer([parameters], learning_rate=1e-2)


# Options


def test_adam_s_options_reach_it_and_default_to_what_they_were():
    def group(**changes: float) -> dict:
        policy = PlainPolicy(tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16))
        policy.start(LearnerOptions(**changes), None, needs_reference=False)  # pyright: ignore[reportArgumentType]
        return policy.optimizer.param_groups[0]

    assert (group()["betas"], group()["eps"]) == ((0.9, 0.95), 1e-8)
    changed = group(adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6)
    assert (changed["betas"], changed["eps"]) == ((0.8, 0.9), 1e-6)
    fitted = FitOptions()
    assert (fitted.adam_beta1, fitted.adam_beta2, fitted.adam_epsilon) == (0.9, 0.95, 1e-8)


@pytest.mark.parametrize("options", [TrainingOptions, FitOptions])
@pytest.mark.parametrize(("name", "value"), [("adam_beta1", 1.0), ("adam_beta2", -0.1), ("adam_epsilon", 0.0)])
def test_adam_s_options_are_checked(options, name, value):
    with pytest.raises(ValueError, match=rf"\.{name} is {value}: give a"):
        options(**{name: value})


def test_a_config_from_before_the_options_is_the_same_config():
    before, after = "[training]\ngroups = 4\n", "[training]\ngroups = 4\nadam_beta1 = 0.9\nadam_epsilon = 1e-8\n"
    assert differences(before, after) == {}
    assert differences(before, after.replace("0.9", "0.8")) == {"training.adam_beta1": "was 0.9, now 0.8"}
