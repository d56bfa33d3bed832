"""The state of shards in a checkpoint: each rank writes its own, and reads the slices that it needs.

The files are safetensors, written and read by torch.distributed.checkpoint: a folder for each part of the state, with a
file for each rank. No rank ever holds the whole of it. Another number of ranks reads other slices, and a run of one
process reads all of them; ranks read the single files of such a run, too.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from proximo.distributed.mesh import Mesh
from proximo.distributed.sharding import like
from proximo.learner.named_tensors import STATE, by_name, check_named, optimizer_by_name
from proximo.learner.optimizer import MASTER
from proximo.learner.policy import VALUE_NAMES, PlainPolicy
from proximo.models import load_model
from proximo.models.adapters.files import adapter_tensors
from proximo.models.adapters.lora import adapter_parameters, has_adapter
from proximo.models.model_types import PreTrainedModel

Parts = Mapping[str, Mapping[str, Tensor]]
"""Tensors by name, for each part of a state."""


def write_shards(folder: Path, parts: Parts, mesh: Mesh) -> str | None:
    """Write each part of a state into a folder of its own; all ranks together, each what it holds. What went wrong on
    any of them, which all of them return: a rank that failed alone would leave the others waiting."""
    try:
        for part, tensors in parts.items():
            if tensors:
                writer = HuggingFaceStorageWriter(str(folder / part), save_distributed=True)
                # In one order: a resumed optimizer has another, by which torch would deal out what all ranks hold.
                held = {name: tensors[name].detach() for name in sorted(tensors)}
                save(held, storage_writer=writer, process_group=mesh.orders)
    except CheckpointException as error:
        return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))
    return None


def check_written(folder: Path, failures: list[str | None]) -> None:
    """Raise OSError, on rank 0, if the ranks could not write their shards."""
    if failures[0] is not None:
        raise OSError(f"{folder}: {failures[0]}")


def read_shards(folder: Path, part: str, known: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """A part of a state by today's names, laid out as the known tensors of these names are; all ranks together."""
    return _read(folder, part, lambda stored: by_name(stored, list(known)), lambda name: known.get(name), mesh)


def read_moments(folder: Path, known: Mapping[str, Tensor], mesh: Mesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """An optimizer's moments and float32 weights, by today's names and laid out as the known parameters are."""
    tensors = _read(
        folder,
        "optimizer",
        lambda stored: optimizer_by_name(stored, list(known), list(known)),
        lambda name: known.get(name.rpartition(".")[0]),
        mesh,
    )
    masters = {name.rpartition(".")[0]: each for name, each in tensors.items() if name.endswith(f".{MASTER}")}
    return {name: each for name, each in tensors.items() if not name.endswith(f".{MASTER}")}, masters


def _read(
    folder: Path,
    part: str,
    renamed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    known: Callable[[str], Tensor | None],
    mesh: Mesh,
) -> dict[str, Tensor]:
    with _files(folder, part) as files:
        if files is None:
            return {}
        targets = dict[str, Tensor]()
        for name, each in HuggingFaceStorageReader(files).read_metadata().state_dict_metadata.items():
            assert isinstance(each, TensorStorageMetadata)
            targets[name] = torch.empty(each.size, dtype=each.properties.dtype, device="meta")
        names = dict(zip(targets, renamed(targets), strict=True))
        for name, each in targets.items():
            targets[name] = _empty(each, known(names[name]))
        load(dict(targets), storage_reader=HuggingFaceStorageReader(files), process_group=mesh.orders)
    return {names[name]: each for name, each in targets.items()}


def _empty(stored: Tensor, known: Tensor | None) -> Tensor:
    """Room for a tensor: a shard of it, or all of it where it is none of ours; whoever reads it refuses it by name."""
    if isinstance(known, DTensor) and known.shape == stored.shape:
        return torch.empty_like(known, dtype=stored.dtype, requires_grad=False)
    return torch.empty(stored.shape, dtype=stored.dtype)


@contextmanager
def _files(folder: Path, part: str) -> Iterator[str | None]:
    """A folder with the files of a part alone: that of the shards, or one with a link to the single file."""
    single = folder / f"{part}.safetensors"
    if not single.exists():
        yield str(folder / part) if (folder / part).is_dir() else None
        return
    with tempfile.TemporaryDirectory() as linked:
        (Path(linked) / single.name).symlink_to(single.resolve())
        yield linked


def _parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


@torch.no_grad()
def restore(
    policy: PlainPolicy, copy: PreTrainedModel | None, folder: Path, state: Mapping[str, Any], mesh: Mesh
) -> None:
    """Read a checkpoint's folder into a policy's shards, and its model into the whole copy; all ranks together."""
    if has_adapter(policy.model):
        named = adapter_parameters
        stored = adapter_tensors(named(policy.model), folder)
    else:
        named = _parameters
        stored = named(load_model(str(folder), dtype=None))
    known, copies = named(policy.model), {} if copy is None else named(copy)
    check_named(known, stored, "the model", any_dtype=True)
    for name, weight in known.items():
        weight.copy_(like(stored[name].to(weight.dtype), weight))
    for name, weight in copies.items():
        weight.copy_(stored[name])
    parameters, values = policy.optimized(), policy.value_parameters()
    moments, masters = read_moments(folder / STATE, parameters, mesh)
    if not values:  # of a run whose algorithm was changed from one that has a value model
        moments, masters = (
            {name: each for name, each in tensors.items() if not name.startswith(VALUE_NAMES)}
            for tensors in (moments, masters)
        )
    for name, each in masters.items():
        parameters[name].copy_(each)
    references = policy.reference_tensors() if state["reference_was_reset"] and policy.has_reference else {}
    policy.load_state(
        state,
        {
            "optimizer": moments,
            "value": read_shards(folder / STATE, "value", values, mesh) if values else {},
            "reference": read_shards(folder / STATE, "reference", references, mesh) if references else {},
        },
    )
