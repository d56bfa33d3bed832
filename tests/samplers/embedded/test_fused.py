"""The decode step by hand equals the modules' own, for every family, and keeps away from what it does not know."""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from proximo.models import tiny_model
from proximo.models.packing.attention import hidden_states, registered
from proximo.models.tiny import tiny_moe
from proximo.samplers.embedded import fused, prefill
from proximo.samplers.embedded.fused import decode_states
from proximo.samplers.embedded.prefill import ModelPasses
from proximo.system import machine
from tests.models.test_scoring import SHAPE as SCORED

# Weights larger than usual, so that an error cannot hide; larger still, float32 itself would be off by more than 1e-6.
SHAPE = SCORED | {"num_hidden_layers": 3, "initializer_range": 0.1}

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama of wide heads": (LlamaForCausalLM, LlamaConfig(**SHAPE, head_dim=10, rms_norm_eps=0.01)),
    "llama with gelu": (LlamaForCausalLM, LlamaConfig(**SHAPE, hidden_act="gelu")),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1])),
}


def build(family, dtype):
    kind, config = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = kind._from_config(config, dtype=torch.float64).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones and biases as zeros: nobody would see them go missing
                parameter.data.uniform_(0.5, 1.5)
    model.set_attn_implementation(registered())
    return model.to(dtype)


@dataclass
class Remembering:
    """Attention over six older keys and the new one; keeps what it was given."""

    rows: int
    seen: list[tuple[Tensor, ...]] = field(default_factory=list)

    def layer(self, number):
        return self

    def read(self, query, key, value, scale):
        random = torch.Generator().manual_seed(len(self.seen))
        older = torch.randn(2, self.rows, key.shape[1], 6, key.shape[3], generator=random, dtype=torch.float64)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(older.to(key), (key, value), strict=True))
        self.seen.append((query, key, value))
        return scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True).transpose(1, 2)


def both_ways(model, rows=5, length=1):
    """States, and all queries, keys and values, by hand and through the modules."""
    tokens = torch.arange(rows * length).view(rows, length) % 23
    positions = 3 * torch.arange(rows).unsqueeze(1) + torch.arange(6, 6 + length)
    results = []
    for way in (decode_states(model), partial(hidden_states, model)):
        reader = Remembering(rows)
        with torch.inference_mode():
            states = way(tokens, positions, reader)
        results.append([states, *(tensor for layer in reader.seen for tensor in layer)])
    return results


def error(found: Tensor, exact: Tensor) -> float:
    """The largest, in units of the largest number there is."""
    return float((found.double() - exact.double()).abs().max() / exact.abs().max())


@pytest.fixture(params=["copied", "own weights", "own weights, many rows"])
def size(request, monkeypatch):
    """A small model, a large one, and a large one with more rows than are few."""
    if request.param != "copied":
        monkeypatch.setattr(fused, "MAX_COPIED", 0)
    monkeypatch.setattr(machine, "FEW_ROWS", () if "many" in request.param else range(100))
    return request.param


@pytest.mark.slow("compares many layers")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 4])
def test_it_computes_what_the_modules_compute(length, family, size):
    model = build(family, torch.float64)
    assert isinstance(decode_states(model), fused._Fused)
    by_hand, expected = both_ways(model, length=length)
    assert len(by_hand) == 1 + 3 * 3
    for ours, theirs in zip(by_hand, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert error(ours, theirs) <= 1e-12


def assert_rounds_as_the_modules_do(model, exact, length=1):
    """In float32 two orders of summing differ by their rounding, which depends on the processor: the modules' own
    distance from float64 is the measure. A single rounding to bfloat16 would be four orders of magnitude off."""
    by_hand, theirs = both_ways(model, length=length)
    for ours, its, truth in zip(by_hand, theirs, both_ways(exact, length=length)[1], strict=True):
        assert ours.dtype == its.dtype == torch.float32
        assert error(ours, truth) <= 8 * max(error(its, truth), 2**-24)


@pytest.mark.slow("compares many layers")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 4])
def test_in_float32_it_rounds_no_worse_than_the_modules(length, family, size):
    assert_rounds_as_the_modules_do(build(family, torch.float32), build(family, torch.float64), length)


def test_it_is_for_the_demo_s_model():
    model = tiny_model()
    assert isinstance(decode_states(model), fused._Fused)
    assert_rounds_as_the_modules_do(model, tiny_model().double())


def test_asked_again_it_knows_an_update_and_the_model_is_left_as_it_was(size):
    model = build("qwen3", torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = torch.tensor([[3], [4]])
    hidden_states(model, places, places, Remembering(2))[..., 0].sum().backward()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    first, _ = both_ways(model)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    optimizer.step()
    second, expected = both_ways(model)
    assert (second[0] - first[0]).abs().max() > 1e-3
    torch.testing.assert_close(second[0], expected[0], rtol=0, atol=1e-12)
    assert all(weight.requires_grad and weight.grad is not None for weight in model.model.layers.parameters())


class Adapted(nn.Linear):
    """A projection with something added, as an adapter would."""

    def forward(self, input):
        return super().forward(input) + 1


def with_listener(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output)


def with_listener_before(model):
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda module, inputs: None)


class Wrapped(nn.Module):
    """An adapter of another build: the projection is inside, and its weight looks like the whole."""

    def __init__(self, inside):
        super().__init__()
        self.inside, self.out_features, self.bias = inside, inside.out_features, None

    @property
    def weight(self):
        return self.inside.weight

    def forward(self, input):
        return self.inside(input) + 1


def with_adapter(model):
    model.model.layers[2].mlp.up_proj = Adapted(16, 24, bias=False)


def with_wrapper(model):
    attention = model.model.layers[0].self_attn
    attention.v_proj = Wrapped(attention.v_proj)


def with_another_norm(model):
    model.model.layers[2].self_attn.k_norm = nn.RMSNorm(8)


def in_half_precision(model):
    model.to(torch.bfloat16)


def elsewhere(model):
    model.to("meta")


@pytest.mark.parametrize(
    "change",
    [
        with_listener,
        with_listener_before,
        with_adapter,
        with_wrapper,
        with_another_norm,
        in_half_precision,
        elsewhere,
    ],
)
def test_what_it_does_not_know_goes_through_the_modules(change):
    model = build("qwen3", torch.float64)
    change(model)
    way = decode_states(model)
    assert isinstance(way, partial)
    assert way.func is hidden_states


def test_mixtures_go_through_the_modules():
    assert isinstance(decode_states(tiny_moe()), partial)


def test_a_large_model_is_not_copied(monkeypatch):
    model = build("llama", torch.float64)
    weights = sum(weight.numel() for weight in model.model.layers.parameters())
    for most, kind in [(weights, fused._Product), (weights - 1, fused._OwnWeights)]:
        monkeypatch.setattr(fused, "MAX_COPIED", most)
        way = decode_states(model)
        assert isinstance(way, fused._Fused)
        assert isinstance(way.blocks[0].gated, kind)
    assert isinstance(way.blocks[0].gated, fused._OwnWeights)
    assert way.blocks[0].gated.parts[0] is model.model.layers[0].mlp.gate_proj


def test_without_mkl_products_are_the_modules_own(monkeypatch):
    monkeypatch.setattr(fused, "MAX_COPIED", 0)
    monkeypatch.setattr(machine, "FEW_ROWS", range(100))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    by_hand, expected = both_ways(build("qwen2", torch.float64))
    assert error(by_hand[0], expected[0]) <= 1e-12


def test_a_large_head_has_the_logits_of_a_small_one(monkeypatch):
    passes, states = ModelPasses(build("llama", torch.float64).requires_grad_(False), False), torch.randn(5, 16)
    small = passes.logits(states)
    monkeypatch.setattr(prefill, "MAX_COPIED", 0)
    large = ModelPasses(passes.model, False)
    assert large._is_large
    assert error(large.logits(states), small) <= 1e-12
    assert not ModelPasses(passes.model.bfloat16(), False)._is_large
