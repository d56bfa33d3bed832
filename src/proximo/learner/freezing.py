"""Parts of a model that full fine-tuning leaves as they are, chosen by name."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn


def frozen_names(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Parameters whose names contain one of the patterns, which may have wildcards; ValueError for a pattern without
    such a parameter, or where none is left to train. Tied weights have all their names."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    frozen = set[str]()
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, f"*{pattern}*")}
        if not found:
            there = f"such as {names[0]} or {names[-1]}"
            raise ValueError(f"training.freeze has {pattern!r}, which no parameter's name contains: names are {there}")
        frozen |= found
    if frozen.issuperset(names):
        raise ValueError(f"training.freeze is {list(patterns)}, which freezes every parameter: leave some to train")
    return frozen


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    frozen = frozen_names(model, patterns)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in frozen:
            parameter.requires_grad_(False)
