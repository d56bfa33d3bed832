"""Tensors of a checkpoint by name: written, read and copied. Format 1 numbered them in the order of their parameters.

Tensors are in one file, NAME.safetensors, or in a folder NAME with a file for each rank of a run on several processes.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from proximo.learner.optimizer import MASTER
from proximo.system.opening import check_file, refuse_foreign

LEARNER = ("sampled_version", "trusts_sampler", "kl_coefficient", "token_budget", "is_planned", "checkpointed", "guard")
POLICY = ("version", "reference_was_reset")
STATE = "state"
"""Subfolder of a checkpoint for everything that is not the model's."""
PARTS = ("optimizer", "value", "reference")
"""Groups of a policy's tensors that are not in the model's files."""


def write_parts(folder: Path, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write a policy's tensors into the folder of a checkpoint's state, a file for each part."""
    for part, tensors in parts.items():
        write_tensors(folder / f"{part}.safetensors", tensors)


def read_parts(checkpoint: Path, *, without: str | None = None) -> dict[str, dict[str, Tensor]]:
    """Tensors that `write_parts` wrote; `without` the value model, whose moments have this prefix: the checkpoint is of
    a run whose algorithm was changed from one that has such a model."""
    parts = {part: read_tensors(checkpoint / STATE / f"{part}.safetensors") for part in PARTS}
    if without is not None:
        moments = {name: each for name, each in parts["optimizer"].items() if not name.startswith(without)}
        parts |= {"value": {}, "optimizer": moments}
    return parts


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, if there are any. They are copied, since safetensors refuses tensors that share memory."""
    if tensors:
        save_file({name: each.detach().to("cpu", copy=True).contiguous() for name, each in tensors.items()}, path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors file, or of the folder in its place in which each rank wrote its own shards."""
    if path.exists():
        return load_file(check_file(path))
    if not path.with_suffix("").is_dir():
        return {}
    refuse_foreign(path.with_suffix(""))
    return _read_shards(path.with_suffix(""))


def _read_shards(folder: Path) -> dict[str, Tensor]:
    """Whole tensors from the shards that ranks wrote, read by this process alone."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    tensors = dict[str, Tensor]()
    for name, each in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        assert isinstance(each, TensorStorageMetadata)
        tensors[name] = torch.empty(each.size, dtype=each.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors


def by_name(stored: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors under today's names, given in the parameters' order; tensors that have names keep them."""
    if not all(key.isdigit() for key in stored):
        return dict(stored)
    return {_name(names, int(key)): tensor for key, tensor in stored.items()}


def optimizer_by_name(
    stored: Mapping[str, Tensor], names: Sequence[str], half_names: Sequence[str]
) -> dict[str, Tensor]:
    """The same of moments, and of masters, which were numbered among the half-precision parameters alone."""
    renamed = {}
    for key, tensor in stored.items():
        kind, _, number = key.rpartition(".")
        if number.isdigit():
            key = f"{_name(half_names if kind == MASTER else names, int(number))}.{kind}"
        renamed[key] = tensor
    return renamed


def parts_by_name(parts: Mapping[str, Any]) -> dict[str, Any]:
    """State of the parts of a run, which was stored in one flat table."""
    if "learner" in parts:
        return dict(parts)
    learner = {name: parts[name] for name in LEARNER} | {"policy": {name: parts[name] for name in POLICY}}
    guard = dict(learner["guard"])
    learner["guard"] = {"max_tokens": guard.pop("most_tokens", None)} | guard
    return {"learner": learner, "unscored": parts["unscored"], "sampler": {"versions": parts["snapshot_versions"]}}


def _name(names: Sequence[str], number: int) -> str:
    """A number beyond the parameters of this run stays one, and is refused as a name that only the file has."""
    return names[number] if number < len(names) else str(number)


@torch.no_grad()
def copy_named(targets: Mapping[str, Tensor], stored: Mapping[str, Tensor], what: str) -> None:
    """Copy tensors into others of the same names; ValueError, with what differs, where they are not the same."""
    check_named(targets, stored, what)
    for name, target in targets.items():
        target.copy_(stored[name])


def check_named(
    targets: Mapping[str, Tensor], stored: Mapping[str, Tensor], what: str, *, any_dtype: bool = False
) -> None:
    """ValueError, with what differs, where tensors are not those of a checkpoint."""
    if others := sorted(targets.keys() ^ stored.keys()):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ValueError(
            f"{what} has {len(stored)} tensors in the checkpoint and {len(targets)} in this run; only one of them has "
            f"{', '.join(others[:3])}{more}"
        )
    for name, target in targets.items():
        known = stored[name]
        if known.shape != target.shape or (known.dtype != target.dtype and not any_dtype):
            raise ValueError(
                f"{what}, {name}: {tuple(known.shape)} {known.dtype} in the checkpoint, "
                f"{tuple(target.shape)} {target.dtype} in this run"
            )
