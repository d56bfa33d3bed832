"""What checkpointed layers keep for the backward pass, and where it waits."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from proximo.models import compiling, score, tiny_model
from proximo.models.compiling import checkpoint_layers
from proximo.models.packing.attention import decoder_layers
from tests.models.test_scoring import furthest

LAYERS = 4
ROWS = {
    "prompts": [[5, 6, 7]],
    "tokens": torch.tensor([[8, 9, 10, 11], [12, 13, 14, 0]]),
    "lengths": torch.tensor([4, 3]),
    "group": torch.tensor([0, 0]),
}
POSITIONS = 3 + 3 + 2
"""The last token of a completion is not run."""


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model(hidden=32, layers=LAYERS, heads=2, kv_heads=1, intermediate=64)


class Host(saved_tensors_hooks):
    """In place of torch's copies to the host, which on a CPU copy nothing."""

    moved: list[tuple[int, ...]]
    back: int

    def __init__(self, pin_memory: bool) -> None:
        def pack(tensor: Tensor) -> Tensor:
            Host.moved.append(tuple(tensor.shape))
            return tensor.clone()

        def unpack(tensor: Tensor) -> Tensor:
            Host.back += 1
            return tensor

        super().__init__(pack, unpack)


@pytest.fixture
def host(monkeypatch) -> type[Host]:
    Host.moved, Host.back = [], 0
    monkeypatch.setattr(compiling, "save_on_cpu", Host)
    return Host


def gradients(model: PreTrainedModel) -> list[Tensor]:
    model.zero_grad()
    score(model, **ROWS).logprobs.sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def kept(model: PreTrainedModel) -> int:
    """Numbers that a pass keeps for its backward pass, without its weights."""
    weights, numbers = {each.data_ptr() for each in model.parameters()}, 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal numbers
        numbers += tensor.numel() * (tensor.data_ptr() not in weights)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        score(model, **ROWS)
    return numbers


def test_each_checkpointed_layer_keeps_what_enters_it_and_no_more(model):
    found = []
    for number in range(LAYERS + 1):
        checkpoint_layers(model, number)
        found.append(kept(model))
    [saved] = {more - less for more, less in pairwise(found)}  # the same for each layer
    assert saved > 10 * POSITIONS * 32
    shorter = tiny_model(hidden=32, layers=LAYERS - 1, heads=2, kv_heads=1, intermediate=64)
    checkpoint_layers(shorter, LAYERS - 1)
    assert found[-1] - kept(shorter) == POSITIONS * 32


def test_the_first_layers_are_checkpointed(model):
    checkpoint_layers(model, 3)
    layers = [getattr(layer, "gradient_checkpointing", None) for layer in decoder_layers(model)]
    assert layers == [True, True, True, False]
    checkpoint_layers(model, 99)
    assert all(getattr(layer, "gradient_checkpointing", None) for layer in decoder_layers(model))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_checkpointed_layer_runs_twice(model, training, offload):
    """And not three times, where transformers' own checkpoint of a layer would be inside of ours."""
    runs = []
    layers = decoder_layers(model)
    for place, layer in enumerate(layers):
        layer.get_submodule("mlp").register_forward_pre_hook(lambda *_, place=place: runs.append(place))
    checkpoint_layers(model, 2, offload=offload)
    gradients(model.train(training))
    assert [runs.count(place) for place in range(LAYERS)] == [2, 2, 1, 1]
    assert [layer.gradient_checkpointing for layer in layers] == [True, True, False, False]


@pytest.mark.parametrize("number", [1, LAYERS])
def test_what_enters_a_layer_waits_on_the_host_and_nothing_else_does(model, host, number):
    expected = gradients(model)
    checkpoint_layers(model, number, offload=True)
    assert furthest(gradients(model), expected) == 0.0
    assert host.moved == [(1, POSITIONS, 32)] * number
    assert host.back == number
    with torch.no_grad():
        score(model, **ROWS)
    assert len(host.moved) == number


def test_layers_on_frozen_ones_are_offloaded_too(model, host):
    """What enters them has no gradient: an adapter's base is like that."""
    model.requires_grad_(False)
    decoder_layers(model)[1:].requires_grad_(True)
    expected = gradients(model)
    checkpoint_layers(model, LAYERS, offload=True)
    assert furthest(gradients(model), expected) == 0.0
    assert len(host.moved) == LAYERS
