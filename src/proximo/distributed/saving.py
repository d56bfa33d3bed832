"""The state of a sharded policy: gathered for a checkpoint, and read back into shards.

A checkpoint has the form of one process's, so a run can be resumed with another number of ranks, or with none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from proximo.distributed.sharding import like, whole
from proximo.models import load_model
from proximo.models.adapters.files import read_adapter
from proximo.models.adapters.lora import has_adapter
from proximo.training.learner.named_tensors import by_name, copy_named, optimizer_by_name
from proximo.training.learner.optimizer import MASTER
from proximo.training.learner.policy import PlainPolicy, Tensors
from proximo.training.runfolder.checkpoints import STATE
from proximo.training.runfolder.state import read_tensors

PARTS = ("optimizer", "value", "reference")


def gathered(policy: PlainPolicy, *, masters: bool) -> Tensors:
    """A policy's tensors, whole and on the CPU; all ranks ask together. `masters`: the weights too, because the saved
    model rounds them."""
    found = policy.tensors()
    if masters:
        found["optimizer"] |= {f"{name}.{MASTER}": each.detach() for name, each in policy.optimized().items()}
    return {part: {name: whole(each.detach()).cpu() for name, each in own.items()} for part, own in found.items()}


@torch.no_grad()
def restore(policy: PlainPolicy, copy: PreTrainedModel, folder: Path, state: Mapping[str, Any]) -> None:
    """Read a checkpoint's folder into a policy's shards, and its model into the whole copy."""
    if has_adapter(copy):
        read_adapter(copy, folder)
    else:
        stored = load_model(str(folder), dtype=copy.dtype)
        copy_named(dict(copy.named_parameters()), dict(stored.named_parameters()), "the model")
    for own, weight in zip(copy.parameters(), policy.model.parameters(), strict=True):
        weight.copy_(like(own.to(weight.dtype), weight))
    parts = {name: read_tensors(folder / STATE / f"{name}.safetensors") for name in PARTS}
    parameters = policy.optimized()
    moments = dict[str, Tensor]()
    for key, tensor in optimizer_by_name(parts["optimizer"], list(parameters), list(parameters)).items():
        name, _, kind = key.rpartition(".")
        if kind == MASTER and name in parameters:
            parameters[name].copy_(like(tensor, parameters[name]))
        else:
            moments[key] = _like_named(tensor, name, parameters)
    values, references = policy.value_parameters(), policy.reference_tensors() if parts["reference"] else {}
    policy.load_state(
        state,
        {
            "optimizer": moments,
            "value": _all_like(by_name(parts["value"], list(values)), values),
            "reference": _all_like(by_name(parts["reference"], list(references)), references),
        },
    )


def _all_like(stored: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _like_named(tensor, name, known) for name, tensor in stored.items()}


def _like_named(tensor: Tensor, name: str, known: Mapping[str, Tensor]) -> Tensor:
    """As it is where there is no such name: whoever reads it refuses it by name."""
    return like(tensor, known[name]) if name in known else tensor
