"""A frozen base model in 8 or 4 bits under an adapter (QLoRA).

Each linear layer of the decoder keeps its weights as codes and scales, and makes them dense for the time of a product,
forwards and backwards; sampler, learner and reference call the same layers, so all of them compute with the same
rounded weights. Embeddings, norms and the output head stay as they are, and so do experts that are no linear layers.
"""

from importlib import import_module
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from proximo.models.model_types import PreTrainedModel
from proximo.types.tensor_types import Float

Quantization = Literal["int8", "nf4"]
"""`int8`: 8 bits, one scale per row. `nf4`: 4 bits of the normal distribution's quantiles, one scale per 64 weights."""
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
BLOCK = 64
"""Weights that share a scale in nf4."""


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose weights are codes with scales. nf4 is bitsandbytes' own, code by code."""

    codes: Tensor
    scales: Float[Tensor, " S"]

    def __init__(self, layer: nn.Linear, kind: Quantization, rounded_to: torch.dtype) -> None:
        """Quantise the weights of `layer`, after they were rounded to a dtype."""
        nn.Module.__init__(self)  # not nn.Linear's, which would make dense weights
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.kind: Quantization = kind
        self.rounded_to = rounded_to
        weight = layer.weight.detach().to(rounded_to).float()
        codes, scales = _int8(weight) if kind == "int8" else _nf4(weight)
        self.codes, self.scales = nn.Parameter(codes, requires_grad=False), nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:  # without shapes, whose checks torch cannot compile
        if torch.is_grad_enabled() and input.requires_grad:
            output = _product(input, self.codes, self.scales, self.out_features)
        else:
            output = linear(input, _dense(self.codes, self.scales, self.out_features, self.in_features, input.dtype))
        return output if self.bias is None else output + self.bias

    @property
    def weight(self) -> Float[Tensor, "O I"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weights as products see them, in float32: made anew at each call."""
        return _dense(self.codes, self.scales, self.out_features, self.in_features, torch.float32)


def _dense(codes: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    if codes.dtype == torch.int8:
        return (codes * scales[:, None]).to(dtype)
    return torch.ops.bitsandbytes.dequantize_4bit(codes, scales, BLOCK, "nf4", (rows, columns), dtype)


@torch.library.custom_op("proximo::quantized_product", mutates_args=())
def _product(inputs: Tensor, codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    """x · weightᵀ, of which only the codes are kept for the backward pass."""
    return linear(inputs, _dense(codes, scales, rows, inputs.shape[-1], inputs.dtype))


@_product.register_fake
def _(inputs: Tensor, codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], rows))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tokens, codes, scales, _ = inputs
    ctx.save_for_backward(codes, scales)
    ctx.columns = tokens.shape[-1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    codes, scales = ctx.saved_tensors
    return gradient @ _dense(codes, scales, gradient.shape[-1], ctx.columns, gradient.dtype), None, None, None


_product.register_autograd(_backward, setup_context=_keep)


def _int8(weight: Float[Tensor, "O I"]) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1) / 127
    # A row of zeros has the scale 0, and any code will do.
    return (weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8), scales


def _nf4(weight: Float[Tensor, "O I"]) -> tuple[Tensor, Tensor]:
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    return codes, state.absmax


def check_quantization(kind: Quantization | None, device: str) -> None:
    """ValueError where the package for it is missing, or cannot do it on this device."""
    if kind != "nf4":
        return
    try:
        import_module("bitsandbytes")
    except Exception as error:  # a wrong build of it fails in many ways
        raise ValueError(
            f"adapter.quantize_base is 'nf4', which needs the package bitsandbytes ({_first_line(error)}): "
            "pip install 'proximo[qlora]', or use int8"
        ) from error
    try:
        codes, scales = _nf4(torch.ones(2, BLOCK, dtype=torch.float32, device=device))
        _dense(codes, scales, 2, BLOCK, torch.float32)
    except Exception as error:
        raise ValueError(
            f"adapter.quantize_base is 'nf4', which bitsandbytes cannot do on {device} ({_first_line(error)}): use int8"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


@torch.no_grad()
def quantize(model: PreTrainedModel, kind: Quantization, device: str, dtype: torch.dtype | None = None) -> None:
    """Quantise the decoder's linear layers in place, each on `device`, so that the dense model need not fit there.
    The weights are rounded to `dtype` first; None: they are taken as they are."""
    check_quantization(kind, device)
    for name, layer in quantizable(model):
        parent, _, child = name.rpartition(".")
        made = QuantizedLinear(layer.to(device), kind, dtype or layer.weight.dtype)
        setattr(model.get_submodule(parent), child, made)


def quantizable(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """The layers that are quantised, by name; the model may be a skeleton without weights."""
    trunk = model.base_model
    prefix = next(name for name, module in model.named_modules() if module is trunk)
    named = [(f"{prefix}.{name}" if prefix else name, each) for name, each in trunk.named_modules()]
    return [(name, each) for name, each in named if type(each) is nn.Linear]


def quantized_layers(module: nn.Module) -> list[tuple[str, QuantizedLinear]]:
    return [(name, each) for name, each in module.named_modules() if isinstance(each, QuantizedLinear)]


@torch.no_grad()
def dequantize(module: nn.Module, dtype: torch.dtype) -> None:
    """Put plain linear layers with the same rounded weights in the places of quantised ones."""
    for name, layer in quantized_layers(module):
        parent, _, child = name.rpartition(".")
        weight = layer.weight.to(dtype)
        # Not nn.Linear's own first weights, which draw from torch's generator.
        made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        made.weight, made.bias = nn.Parameter(weight), layer.bias
        setattr(module.get_submodule(parent), child, made)


def count_parameters(model: nn.Module) -> int:
    """Weights of a model, a quantised one counted once, without scales."""
    quantized = [each for _, each in quantized_layers(model)]
    held = sum(each.codes.numel() + each.scales.numel() for each in quantized)
    weights = sum(each.in_features * each.out_features for each in quantized)
    return sum(each.numel() for each in model.parameters()) - held + weights


def quantized_size(model: PreTrainedModel, kind: Quantization) -> tuple[int, int]:
    """Weights that quantisation would take, and their bytes with scales; the model may be a skeleton."""
    shapes = [(each.out_features, each.in_features) for _, each in quantizable(model)]
    weights = sum(rows * columns for rows, columns in shapes)
    if kind == "int8":
        return weights, weights + sum(4 * rows for rows, _ in shapes)
    return weights, sum(-(-rows * columns // 2) + 4 * -(-rows * columns // BLOCK) for rows, columns in shapes)
