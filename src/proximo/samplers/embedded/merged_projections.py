"""Decoding with projections of the same inputs as one product: queries, keys and values; gate and up.

Their weights are laid side by side in memory, once, and stay the model's own parameters: an update is seen at once, and
nothing is there twice. A product over few rows is limited by how fast weights are read and, on a GPU, by how many
kernels are started: four a layer are better than seven.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from proximo.models.packing.attention import LayerReader, ModelReader, body, wide_sums
from proximo.samplers.embedded.attention import PagedLayer
from proximo.types.tensor_types import Float


@dataclass(frozen=True)
class Joined:
    """The weights of one decoder layer, of a family that `fused.is_plain` knows."""

    states: Float[Tensor, "O E"]
    """Weights of queries, keys and values."""
    bias: Float[Tensor, " O"] | None
    gated: Float[Tensor, "F E"]
    """Weights of gate and up."""
    gated_bias: Float[Tensor, " F"] | None


def run_joined(
    layer: Any,
    joined: Joined,
    hidden: Float[Tensor, "R S E"],
    added: Float[Tensor, "R S E"],
    angles: tuple[Tensor, Tensor],
    reader: LayerReader,
) -> tuple[Float[Tensor, "R S E"], Float[Tensor, "R S E"]]:
    """Run the layer on hidden + added; its output is in two parts, of which it is the sum.

    The sum is left to the next layer, where it is one kernel with the norm that follows.
    """
    hidden = hidden + added
    attention, mlp, width = layer.self_attn, layer.mlp, layer.self_attn.head_dim
    states = linear(layer.input_layernorm(hidden), joined.states, joined.bias).unflatten(-1, (-1, width))
    seen = _attended(attention, states, angles, reader)
    hidden = hidden + attention.o_proj(seen.flatten(2))
    gate, up = linear(layer.post_attention_layernorm(hidden), joined.gated, joined.gated_bias).chunk(2, dim=-1)
    return hidden, mlp.down_proj(mlp.act_fn(gate) * up)


def _attended(
    attention: Any, states: Float[Tensor, "R S HKK D"], angles: tuple[Tensor, Tensor], reader: LayerReader
) -> Float[Tensor, "R S H D"]:
    normed, turned = hasattr(attention, "q_norm"), getattr(attention, "use_rope", True)  # SmolLM3 has layers without
    if isinstance(reader, PagedLayer) and reader.kernels.attend_joined is not None:
        norms = (attention.q_norm.weight, attention.k_norm.weight) if normed else (None, None)
        epsilon = attention.q_norm.variance_epsilon if normed else 0.0
        flat = (angles[0][:, 0].float(), angles[1][:, 0].float()) if turned else (None, None)
        return reader.read_joined(states, norms, epsilon, flat, attention.scaling)
    keys = attention.k_proj.out_features // attention.head_dim
    query, key, value = states.split((states.shape[2] - 2 * keys, keys, keys), dim=2)
    if normed:
        query, key = attention.q_norm(query), attention.k_norm(key)
    if turned:
        query, key = _turned(query, angles), _turned(key, angles)
    query, key, value = (each.to(value.dtype).transpose(1, 2) for each in (query, key, value))
    return reader.read(query, key, value, attention.scaling)


def joined_states(
    model: nn.Module,
    joined: Mapping[nn.Module, Joined],
    run: Callable[..., tuple[Tensor, Tensor]],
    tokens: Tensor,
    positions: Tensor,
    reader: ModelReader,
) -> Float[Tensor, "R S E"]:
    """`hidden_states` of a model whose layers are all joined; `run` is `run_joined`, compiled or not."""
    trunk = body(model)
    hidden = trunk.get_submodule("embed_tokens")(tokens)
    dtype = hidden.dtype
    with wide_sums(dtype, hidden.device):
        hidden = hidden.to(torch.promote_types(dtype, torch.float32))
        angles = trunk.get_submodule("rotary_emb")(hidden, positions)
        added = torch.zeros_like(hidden, dtype=dtype)
        for number, (layer, weights) in enumerate(joined.items()):
            hidden, added = run(layer, weights, hidden, added, angles, reader.layer(number))
        return trunk.get_submodule("norm")(hidden + added).to(dtype)


def _turned(heads: Float[Tensor, "R S H D"], angles: tuple[Tensor, Tensor]) -> Float[Tensor, "R S H D"]:
    """Turn heads by the angles of their positions, as transformers writes it."""
    cosines, sines = (each.unsqueeze(2) for each in angles)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def joined_layers(layers: Iterable[Any]) -> dict[nn.Module, Joined]:
    """Each layer's weights side by side; where they are not, they are moved there."""
    return {layer: _joined(layer) for layer in layers}


def _joined(layer: Any) -> Joined:
    attention, mlp = layer.self_attn, layer.mlp
    states, gated = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    return Joined(
        states=side_by_side([each.weight for each in states]),
        bias=_biases(states),
        gated=side_by_side([each.weight for each in gated]),
        gated_bias=_biases(gated),
    )


def _biases(parts: Sequence[nn.Linear]) -> Tensor | None:
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts))
    return side_by_side(biases) if biases else None


@torch.no_grad()
def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of which the parameters are the parts, in order: they keep their names, values and gradients."""
    first, whole = parameters[0], sum(len(parameter) for parameter in parameters)
    offset = first.storage_offset()
    for parameter in parameters:
        together = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (together and parameter.storage_offset() == offset and parameter.is_contiguous()):
            break
        offset += parameter.numel()
    else:
        return first.detach().as_strided((whole, *first.shape[1:]), first.stride())
    moved = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, moved.split([len(each) for each in parameters]), strict=True):
        parameter.data = part
    return moved
