"""Projections of the same inputs as one product: the layer's own numbers, on the model's own weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from proximo.models.packing.attention import NAME, decoder_layers, hidden_states
from proximo.samplers.embedded.cache import PrefillReader
from proximo.samplers.embedded.fused import is_plain
from proximo.samplers.embedded.merged_projections import joined_layers, joined_states, run_joined, side_by_side
from tests.samplers.embedded.test_fused import FAMILIES, build


@pytest.mark.parametrize("name", FAMILIES)
def test_a_joined_pass_is_the_models_own(name):
    model = build(name, torch.float64)
    tokens = torch.randint(model.config.vocab_size, (3, 7), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(7).expand(3, 7)
    with torch.no_grad():
        expected = hidden_states(model, tokens, positions, PrefillReader())
        joined = joined_layers(decoder_layers(model))
        found = joined_states(model, joined, run_joined, tokens, positions, PrefillReader())
        own = hidden_states(model, tokens, positions, PrefillReader())
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(own, expected)  # moving weights changes no number


def test_parts_of_a_whole_stay_parameters():
    first, second = (torch.nn.Parameter(torch.arange(6.0).reshape(n, 2) + n) for n in (3, 3))
    before = torch.cat((first.detach(), second.detach()))
    whole = side_by_side([first, second])
    assert torch.equal(whole, before)
    with torch.no_grad():
        second.add_(1)  # as an optimizer does
    assert torch.equal(whole[3:], second)
    assert not torch.equal(whole[3:], before[3:])
    again = side_by_side([first, second])
    assert again.data_ptr() == whole.data_ptr()
    assert again.shape == whole.shape
    # In another order they are not side by side.
    assert torch.equal(side_by_side([second, first])[:3], second)


def test_a_joined_model_saves_loads_and_learns(tmp_path):
    model = build("llama", torch.float64)
    layers = decoder_layers(model)
    assert all(is_plain(layer) for layer in layers)
    joined = joined_layers(layers)
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]]), use_cache=False).loss.backward()
    before = joined[layers[0]].states.clone()
    optimizer.step()
    rows = layers[0].get_submodule("self_attn.q_proj").get_parameter("weight")
    assert torch.equal(joined[layers[0]].states[: len(rows)], rows)
    assert not torch.equal(joined[layers[0]].states, before)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation=NAME)
    for (name, one), other in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, other), name
