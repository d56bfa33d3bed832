"""A model's pass by hand, without gradient: on a CPU, going through modules takes longer than a small one's arithmetic.

A small model's weights are laid out anew for each call of a sampler: queries, keys and values in one product, gate and
up in another, norms folded in, which costs less than one step. A large one spends its time inside the products: its own
weights are used where they are, in the order in which a library multiplies few rows fastest.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from proximo.models.model_types import PreTrainedModel
from proximo.models.packing.attention import LayerReader, ModelReader, body, decoder_layers, hidden_states
from proximo.system.machine import side_by_side
from proximo.types.tensor_types import Float, Int

MAX_COPIED = 8_000_000
"""Weights in the layers. Beyond it the copy costs more time and memory than the step saves."""

DecodeStates = Callable[[Tensor, Tensor, ModelReader], Tensor]
"""(tokens [R, S], positions [R, S], reader) to states [R, S, E]."""


def decode_states(model: PreTrainedModel) -> DecodeStates:
    """`hidden_states` up to rounding, of the model as it stands now: one new token for each row, or whole prompts.

    The result may hold a copy of the weights: ask again after an update.
    """
    trunk, layers = body(model), decoder_layers(model)
    if not _fits(trunk, layers):
        return partial(hidden_states, model)
    is_small = sum(weight.numel() for layer in layers for weight in layer.parameters()) <= MAX_COPIED
    with torch.no_grad():
        return _Fused(trunk, [_block(layer, _joined if is_small else _OwnWeights.of_parts) for layer in layers])


def _fits(trunk: nn.Module, layers: Iterable[nn.Module]) -> bool:
    """True on a CPU, for a known kind as transformers made it: nobody listens or has put something in its place."""
    if not all(is_plain(layer) for layer in layers):
        return False
    weights = [weight for layer in layers for weight in layer.parameters()]
    return all(is_exact(weight) for weight in weights) and not is_heard(trunk)


def is_exact(weight: Tensor) -> bool:
    """True if products with it are computed on a CPU, and in its own precision."""
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)


def is_heard(model: nn.Module) -> bool:
    """True if somebody listens to a part of it."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@cache
def _classes() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """Layers that the block below computes, and their norms; a subclass may differ."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm
    from transformers.models.smollm3.modeling_smollm3 import SmolLM3DecoderLayer, SmolLM3RMSNorm

    layers = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer, SmolLM3DecoderLayer)
    return layers, (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, SmolLM3RMSNorm)


def is_plain(layer: Any) -> bool:
    """True if a layer is of a known kind, with nothing put in the place of its parts."""
    known, known_norms = _classes()
    if type(layer) not in known:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linear = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    linear += (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return all(type(each) is nn.Linear for each in linear) and all(type(each) in known_norms for each in norms)


@dataclass(frozen=True)
class _Fused:
    trunk: nn.Module
    blocks: Sequence["_Block"]

    @torch.no_grad()
    def __call__(
        self, tokens: Int[Tensor, "R S"], positions: Int[Tensor, "R S"], reader: ModelReader
    ) -> Float[Tensor, "R S E"]:
        hidden = self.trunk.get_submodule("embed_tokens")(tokens)
        cosines, sines = self.trunk.get_submodule("rotary_emb")(hidden, positions)
        half = sines.shape[-1] // 2
        # The sign of the half that is turned backwards, once for all layers.
        sines = torch.cat((-sines[..., :half], sines[..., half:]), dim=-1)
        angles = cosines.flatten(0, 1).unsqueeze(1), sines.flatten(0, 1).unsqueeze(1)
        hidden = hidden.flatten(0, 1)
        for number, block in enumerate(self.blocks):
            hidden = block.run(hidden, angles, reader.layer(number), rows=len(tokens))
        return self.trunk.get_submodule("norm")(hidden).unflatten(0, tokens.shape)


@dataclass(frozen=True)
class _Product:
    """x · weightᵀ + bias."""

    weight: Float[Tensor, "O I"]
    bias: Float[Tensor, " O"] | None

    def of(self, inputs: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        return linear(inputs, self.weight, self.bias)

    def added(self, inputs: Float[Tensor, "R I"], to: Float[Tensor, "R O"]) -> Float[Tensor, "R O"]:
        total = torch.addmm(to, inputs, self.weight.T)
        return total if self.bias is None else total.add_(self.bias)


@dataclass(frozen=True)
class _OwnWeights:
    """The same with a model's own weights, which are not copied."""

    parts: tuple[nn.Linear, ...]
    scale: Float[Tensor, " I"] | None
    """Weight of the norm before them."""

    @classmethod
    def of_parts(cls, *parts: nn.Linear, behind: Any = None) -> "_OwnWeights":
        return cls(parts, None if behind is None else behind.weight)

    def of(self, inputs: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        scaled = inputs if self.scale is None else inputs * self.scale
        product = side_by_side(scaled, *(part.weight for part in self.parts))
        for part, target in zip(self.parts, product.split([part.out_features for part in self.parts], 1), strict=True):
            if part.bias is not None:
                target.add_(part.bias)
        return product

    def added(self, inputs: Float[Tensor, "R I"], to: Float[Tensor, "R O"]) -> Float[Tensor, "R O"]:
        return self.of(inputs).add_(to)


@dataclass(frozen=True)
class _Block:
    """One decoder layer. Its norms' weights belong to the products behind them, except where heads have their own."""

    states: _Product | _OwnWeights
    """Queries, keys and values."""
    output: _Product | _OwnWeights
    gated: _Product | _OwnWeights
    """Gate and up."""
    down: _Product | _OwnWeights
    activation: nn.Module
    epsilons: tuple[float, float]
    """Epsilons of the norms before attention and before the gate."""
    head_norm: tuple[Float[Tensor, "HK D"], float] | None
    """Weight and epsilon, of families that have norms on queries and keys."""
    heads: tuple[int, int]
    """Numbers of heads of queries, and of keys and values."""
    width: int
    scale: float
    turns: bool
    """True if positions turn its queries and keys."""

    def run(
        self, hidden: Float[Tensor, "RS E"], angles: tuple[Tensor, Tensor], reader: LayerReader, *, rows: int
    ) -> Float[Tensor, "RS E"]:
        """Run at the positions of all rows, one row after another."""
        states = self.states.of(_normed(hidden, self.epsilons[0])).unflatten(1, (-1, self.width))
        asking, value = states.split((sum(self.heads), self.heads[1]), dim=1)
        if self.head_norm is not None:
            weight, epsilon = self.head_norm
            asking = _normed(asking, epsilon).mul_(weight)
        if self.turns:
            cosines, sines = angles
            asking = (asking * cosines).addcmul_(asking.roll(self.width // 2, dims=-1), sines)
        query, key = asking.split(self.heads, dim=1)
        query, key, value = (each.unflatten(0, (rows, -1)).transpose(1, 2) for each in (query, key, value))
        seen = reader.read(query, key, value, self.scale)
        hidden = self.output.added(seen.reshape(len(hidden), -1), to=hidden)
        gate, up = self.gated.of(_normed(hidden, self.epsilons[1])).chunk(2, dim=1)
        return self.down.added(self.activation(gate).mul_(up), to=hidden)


def _block(layer: Any, together: Callable[..., _Product | _OwnWeights]) -> _Block:
    """Block of a layer; `together` makes a product of projections, with the norm that they stand behind."""
    attention, mlp = layer.self_attn, layer.mlp
    first, second, width = layer.input_layernorm, layer.post_attention_layernorm, attention.head_dim
    heads = attention.q_proj.out_features // width, attention.k_proj.out_features // width
    head_norm = None
    if hasattr(attention, "q_norm"):
        norms = zip((attention.q_norm, attention.k_norm), heads, strict=True)
        weight = torch.cat([norm.weight.expand(count, -1) for norm, count in norms])
        head_norm = weight, attention.q_norm.variance_epsilon
    return _Block(
        states=together(attention.q_proj, attention.k_proj, attention.v_proj, behind=first),
        output=together(attention.o_proj),
        gated=together(mlp.gate_proj, mlp.up_proj, behind=second),
        down=together(mlp.down_proj),
        activation=mlp.act_fn,
        epsilons=(first.variance_epsilon, second.variance_epsilon),
        head_norm=head_norm,
        heads=heads,
        width=width,
        scale=attention.scaling,
        turns=bool(getattr(attention, "use_rope", True)),  # SmolLM3 has layers without
    )


def _joined(*parts: nn.Linear, behind: Any = None) -> _Product:
    """A copy of projections; the weight of a norm that they stand behind becomes part of them."""
    if behind is None:
        [part] = parts
        return _Product(part.weight, part.bias)
    weight = torch.cat(tuple(part.weight for part in parts)).mul_(behind.weight)
    biases = tuple(part.bias for part in parts if part.bias is not None)
    assert len(biases) in (0, len(parts))
    return _Product(weight, torch.cat(biases) if biases else None)


def _normed(inputs: Float[Tensor, "*R E"], epsilon: float) -> Float[Tensor, "*R E"]:
    """Normalise without the norm's weight, and in float32 whatever comes in, as transformers does it."""
    return rms_norm(inputs.float(), inputs.shape[-1:], None, epsilon).to(inputs.dtype)
