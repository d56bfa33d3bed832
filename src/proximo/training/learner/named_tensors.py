"""Tensors of a checkpoint, copied by name. Format 1 numbered them in the order of their parameters instead."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from proximo.training.learner.optimizer import MASTER

LEARNER = ("sampled_version", "trusts_sampler", "kl_coefficient", "token_budget", "is_planned", "checkpointed", "guard")
POLICY = ("version", "reference_was_reset")


def by_name(stored: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors under today's names, given in the parameters' order; tensors that have names keep them."""
    if not all(key.isdigit() for key in stored):
        return dict(stored)
    return {_name(names, int(key)): tensor for key, tensor in stored.items()}


def optimizer_by_name(
    stored: Mapping[str, Tensor], names: Sequence[str], half_names: Sequence[str]
) -> dict[str, Tensor]:
    """The same of moments, and of masters, which were numbered among the half-precision parameters alone."""
    found = {}
    for key, tensor in stored.items():
        kind, _, number = key.rpartition(".")
        if number.isdigit():
            key = f"{_name(half_names if kind == MASTER else names, int(number))}.{kind}"
        found[key] = tensor
    return found


def parts_by_name(parts: Mapping[str, Any]) -> dict[str, Any]:
    """What the parts of a run had stored in one flat table."""
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
    if others := sorted(targets.keys() ^ stored.keys()):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ValueError(
            f"{what} has {len(stored)} tensors in the checkpoint and {len(targets)} in this run; only one of them has "
            f"{', '.join(others[:3])}{more}"
        )
    for name, target in targets.items():
        known = stored[name]
        if known.shape != target.shape or known.dtype != target.dtype:
            raise ValueError(
                f"{what}, {name}: {tuple(known.shape)} {known.dtype} in the checkpoint, "
                f"{tuple(target.shape)} {target.dtype} in this run"
            )
        target.copy_(known)
