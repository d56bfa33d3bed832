"""AdamW's moments in 8 bits or on the host: the same steps, or nearly, and the same bytes after a resume."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from proximo.learner.footprint import parameter_bytes
from proximo.learner.optimizer import InBlocks, Optimizer, shape_of
from proximo.learner.options import Moments
from proximo.planning.holdings import component
from proximo.rl.preflight.estimate import Held

NAMES = ["matrix", "bias"]


@pytest.fixture(params=["8bit", "cpu"])
def kind(request):
    return request.param


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    shapes = ((80, 64), (10,))
    return [nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float32).to(dtype)) for shape in shapes]


def stepped(optimizer: Optimizer, parameters: list[nn.Parameter], steps: range, target: float = 0.5) -> None:
    """A noisy least-squares problem; the learning rate changes."""
    for step in steps:
        random = torch.Generator().manual_seed(100 + step)
        optimizer.set_rates(0.02 / (1 + step))
        optimizer.zero_grad()
        losses = [
            ((each.float() - target + torch.randn(each.shape, generator=random, dtype=torch.float32)) ** 2).mean()
            for each in parameters
        ]
        torch.stack(losses).sum().backward()
        optimizer.apply(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_on_the_host_change_no_bit(dtype):
    ours, plain = weights(dtype), weights(dtype)
    kinds: tuple[Moments, Moments] = ("cpu", "float32")
    for parameters, moments in zip((ours, plain), kinds, strict=True):
        optimizer = Optimizer([parameters], learning_rate=0.1, weight_decay=0.1, moments=moments)
        stepped(optimizer, parameters, range(6))
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(ours[0], weights(dtype)[0])


def test_large_moments_are_stored_in_a_byte_each():
    parameters = weights()
    optimizer = Optimizer([parameters], learning_rate=0.1, moments="8bit")
    stepped(optimizer, parameters, range(2))
    found = optimizer.tensors(NAMES)
    assert {name: (each.dtype, tuple(each.shape)) for name, each in found.items() if name.startswith("matrix")} == {
        "matrix.step": (torch.float32, ()),
        "matrix.exp_avg": (torch.int8, (80, 64)),
        "matrix.exp_avg_scales": (torch.float32, (20,)),
        "matrix.exp_avg_sq": (torch.uint8, (80, 64)),
        "matrix.exp_avg_sq_scales": (torch.float32, (20,)),
    }
    assert found["bias.exp_avg"].dtype == torch.float32
    assert float(found["matrix.step"]) == 2


@pytest.mark.parametrize(("name", "power", "most"), [("exp_avg", 4, 127), ("exp_avg_sq", 8, 255)])
def test_a_stored_moment_is_the_nearest_power_and_a_square_never_0(name, power, most):
    """Moments over 20 decades, the last block not whole; values are (code / most) ** power of the block's largest."""
    random = torch.Generator().manual_seed(1)
    moment = 10 ** (-20 * torch.rand(4100, generator=random, dtype=torch.float32))
    moment[0], moment[1] = 0.0, 1e-30  # a code of 0 for the second too, if squares were only rounded
    if name == "exp_avg":
        moment[1::2] *= -1
    held: dict[str, torch.Tensor] = {}
    InBlocks().store(name, moment, held)
    found = InBlocks().restore(name, held, moment)
    scales = torch.stack([block.abs().max() for block in moment.split(256)])
    assert torch.equal(held[f"{name}_scales"], scales)
    codes = ((moment.abs() / scales.repeat_interleave(256)[:4100]).double() ** (1 / power) * most).round()
    if name == "exp_avg_sq":
        codes[1:].clamp_(min=1)
        assert (found[1:] > 0).all()
    assert held[name].abs().tolist() == codes.tolist()
    expected = (codes / most) ** power * scales.repeat_interleave(256)[:4100] * moment.sign()
    assert_close(found.double(), expected, rtol=1e-5, atol=0)
    assert found[0] == 0
    large = moment.abs() > 0.01 * scales.repeat_interleave(256)[:4100]
    assert ((found - moment) / moment)[large].abs().max() < 0.07


def test_8_bit_moments_stay_near_and_learn_as_well():
    """50 steps; the weights move about 0.45 on average, and differ by 0.003 where this was written."""
    ours, plain, start = weights(), weights(), weights()
    kinds: tuple[Moments, Moments] = ("8bit", "float32")
    for parameters, moments in zip((ours, plain), kinds, strict=True):
        stepped(Optimizer([parameters], learning_rate=0.1, moments=moments), parameters, range(50))
    moved, gap = ((a - b).abs().mean().item() for a, b in ((plain[0], start[0]), (ours[0], plain[0])))
    assert 0 < gap < 0.03 * moved
    losses = [float(((each[0].detach() - 0.5) ** 2).mean()) for each in (ours, plain, start)]
    assert losses[1] < 0.98 * losses[2]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_optimizer_takes_the_same_steps(kind, dtype):
    whole, parted = weights(dtype), weights(dtype)
    stepped(Optimizer([whole], learning_rate=0.1, moments=kind), whole, range(6))
    first = Optimizer([parted], learning_rate=0.1, moments=kind)
    stepped(first, parted, range(3))
    stored = {name: each.clone() for name, each in first.tensors(NAMES).items()}
    first.close()
    again = Optimizer([parted], learning_rate=0.1, moments=kind)
    again.load_tensors(stored, NAMES)
    assert all(torch.equal(each, stored[name]) for name, each in again.tensors(NAMES).items())
    stepped(again, parted, range(3, 6))
    for one, other in zip(whole, parted, strict=True):
        assert torch.equal(one, other)
    # What was given is not shared.
    assert float(stored["matrix.step"]) == 3


def test_bytes_are_those_that_are_planned(kind):
    parameters = [nn.Parameter(torch.zeros(512, 512, dtype=torch.float32))]
    optimizer = Optimizer([parameters], learning_rate=0.1, moments=kind)
    gradient, number = 4 * 512 * 512, 512 * 512
    before = optimizer.pending_bytes - gradient
    assert before == component(Held("policy", number, trained=True), torch.float32, kind).moments
    assert parameter_bytes(torch.float32, trained=True, moments=kind) == 8 + before / number
    stepped(optimizer, parameters, range(1))
    assert optimizer.pending_bytes == 0
    held = optimizer.tensors(["matrix"])
    on_device = [each for name, each in held.items() if each.ndim and kind == "8bit"]
    assert before == sum(each.numel() * each.itemsize for each in on_device)
    assert all(tuple(each.shape) == shape_of(name, parameters[0]) for name, each in held.items() if each.ndim)


def test_moments_of_another_form_are_refused():
    parameters = weights()
    optimizer = Optimizer([parameters], learning_rate=0.1)
    stepped(optimizer, parameters, range(1))
    stored = optimizer.tensors(NAMES)
    with pytest.raises(ValueError, match=r"adam_moments is '8bit', and the checkpoint's moments are in another form"):
        Optimizer([parameters], learning_rate=0.1, moments="8bit").load_tensors(stored, NAMES)
