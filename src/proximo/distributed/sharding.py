"""A model in shards: FSDP2 around one root module whose call is a whole pass.

A pass walks through the submodules and reads the head's weight, and never calls the model itself. So the root that
gathers embedding, norm and head is a module of our own, whose forward is whatever pass it is given.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from proximo.distributed.mesh import Mesh
from proximo.models import supports_packing
from proximo.models.adapters.lora import has_adapter
from proximo.models.adapters.quantized import quantized_layers
from proximo.models.compiling import compile_between_hooks
from proximo.models.packing.attention import decoder_layers

HALVES = (torch.bfloat16, torch.float16)


class Root(nn.Module):
    """Module of everything whose shards one pass gathers. Its call runs a pass and returns that pass's tensors with a
    gradient, on which FSDP hangs what gathers the shards again for the backward pass."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return work()

    def run(self, work: Callable[[], Any]) -> Any:
        """Result of a pass."""
        results: list[Any] = []

        def forward() -> tuple[Tensor, ...]:
            results.append(work())
            return tuple(with_gradient(results[0]))

        self(forward)
        return results[0]


def with_gradient(result: Any) -> Iterator[Tensor]:
    """The tensors of a pass's result through which a gradient can reach the model. Of a view, what it is a view of:
    its gradient passes through there, and FSDP wants no views."""
    if isinstance(result, Tensor):
        if result.requires_grad:
            yield result if result._base is None else result._base
    elif isinstance(result, tuple):
        for each in result:
            yield from with_gradient(each)
    elif is_dataclass(result):
        for field in fields(result):
            yield from with_gradient(getattr(result, field.name))


def shard(model: PreTrainedModel, mesh: Mesh, dtype: torch.dtype, value: nn.Module | None = None) -> Root:
    """Shard a model's parameters in place, and those of a value model that shares its passes.

    They are whole wherever they are, on a CPU say; one layer at a time goes to the rank's device. All compute in
    `dtype`; shards of those that are trained are in float32. Gradients are summed over ranks in float32, not averaged:
    the weights of an update are over all its rows already.
    """
    half = dtype in HALVES
    narrow = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False) if half else MixedPrecisionPolicy()
    for layer in decoder_layers(model):
        fully_shard(_held(layer, dtype), mesh=mesh.devices, mp_policy=narrow)
        compile_between_hooks(layer)
    if value is not None:
        for each in _layers_of(value):
            fully_shard(_held(each, dtype), mesh=mesh.devices, mp_policy=narrow)
        if (head := dict(value.named_children()).get("head")) is not None:
            # In float32: half a digit of a value is not enough to learn from.
            fully_shard(_held(head, torch.float32), mesh=mesh.devices)
    # Of one shard nothing is saved by giving back what was gathered, and gathering it again costs time. An adapter is
    # switched off and on between passes, which torch must see on the shards.
    keeps = mesh.shard_size == 1 and not has_adapter(model)
    root = Root(*(each for each in (model, value) if each is not None))
    fully_shard(_held(root, dtype), mesh=mesh.devices, mp_policy=narrow)
    for module in _sharded(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if keeps:
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
    return root


def _held(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with the parameters that are whole still in the dtype of shards, whatever that of their files is."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype)
    return module


def _sharded(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _layers_of(value: nn.Module) -> Iterator[nn.Module]:
    """Layers of a value model's own."""
    children = dict(value.named_children())
    if isinstance(model := children.get("model"), PreTrainedModel):
        yield from decoder_layers(model)
    elif isinstance(layers := children.get("layers"), nn.ModuleList):
        yield from layers


def reshard(root: nn.Module) -> None:
    """Give back what passes gathered: if shards change meanwhile, the next pass would read the old weights."""
    for module in _sharded(root):
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The tensor that all ranks hold shards of; all of them ask together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, sharded: Tensor) -> Tensor:
    """Shard on this rank of a whole tensor that every rank has, laid out as another one is."""
    if not isinstance(sharded, DTensor) or not tensor.ndim:
        return tensor
    tensor = tensor.to(device=sharded.device)
    return distribute_tensor(tensor, sharded.device_mesh, sharded.placements, src_data_rank=None)


def like_shard(piece: Tensor, sharded: Tensor) -> Tensor:
    """A rank's own piece as its shard of a whole tensor, laid out as another one is."""
    if not isinstance(sharded, DTensor):
        return piece
    mesh, placements = sharded.device_mesh, sharded.placements
    return DTensor.from_local(
        piece.to(sharded.device), mesh, placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def local(tensor: Tensor) -> Tensor:
    """Part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def refill(copy: PreTrainedModel | None, model: PreTrainedModel) -> None:
    """Bring a whole copy up to date in place, so that whatever points at its memory stays valid; all ranks together,
    those without a copy too. Weights that are not trained are in it already."""
    copies = [None for _ in model.parameters()] if copy is None else list(copy.parameters())
    for weight, sharded in zip(copies, model.parameters(), strict=True):
        if sharded.requires_grad:
            gathered = whole(sharded.detach())
            if weight is not None:
                weight.copy_(gathered.to(weight.dtype), non_blocking=True)
    if copy is not None and copy.device.type == "cpu" and (device := model.device).type == "cuda":
        torch.cuda.synchronize(device)  # the host reads its copy as soon as this returns


def check_shardable(model: PreTrainedModel) -> None:
    """Refuse a model that cannot be in shards; ValueError."""
    if not supports_packing(model):
        kind = type(model).__name__
        raise ValueError(f"ranks: {kind} is outside the packed fast path, and cannot be sharded: leave ranks out")
    if quantized_layers(model):
        raise ValueError("ranks: a quantised base cannot be sharded: leave adapter.quantize_base out, or ranks")
