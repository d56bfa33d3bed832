"""Configs that earlier versions wrote, under the names that fields have today."""

import tomllib
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

from proximo import toml
from proximo.training.config import RunConfig
from proximo.trust.permission import ANYTHING, Code

RENAMED = {
    "replay": "routing_replay",
    "most_generated": "max_generated_tokens",
    "rewards.most_unscored": "max_unscored",
    "training.most_skipped": "max_skipped",
    "ppo.training.most_skipped": "max_skipped",
    "grpo.training.most_skipped": "max_skipped",
}
"""The dotted name that a field had, of a run or of a chain of runs, and its name today, in the same table."""
ADDED = ("sampler", "environment", "ahead", "ahead.switch", "ahead.window")
"""Dotted names of a run's fields that earlier versions did not have; their default is what those versions did."""


def load_run(path: str, code: Code | None = None) -> RunConfig:
    """A run's config from a file, of this version or an earlier one."""
    return toml.load(path, RunConfig, code, renewed)


def loads_run(text: str, source: str = "config", code: Code = ANYTHING) -> RunConfig:
    """A run's config from TOML, of this version or an earlier one; `source` names the text in errors."""
    return toml.loads(text, RunConfig, source, finite=True, code=code, renew=renewed)


def renewed(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a config with today's names; what has them already is left as it is."""
    tables = deepcopy(tables)
    for old, new in RENAMED.items():
        *path, name = old.split(".")
        table = _inner(tables, path)
        if table is not None and name in table and new not in table:
            table[new] = table.pop(name)
    if isinstance(mismatch := tables.get("mismatch"), dict) and "sampler" not in tables:
        del tables["mismatch"]
        tables["sampler"] = {"type": "Mismatched"} | mismatch
    return tables


def completed(config_toml: str) -> dict[str, Any]:
    """The tables of a config with today's names and, of a run, the fields that it was too early to have."""
    tables = renewed(tomllib.loads(config_toml))
    if "algorithm" in tables:  # a run's, and no other stage's
        for field in ADDED:
            *path, name = field.split(".")
            table, known = _inner(tables, path), _inner(_defaults(), path)
            if table is not None and known is not None and name in known:
                table.setdefault(name, deepcopy(known[name]))
    return tables


def _inner(tables: dict[str, Any], path: Sequence[str]) -> dict[str, Any] | None:
    """The table at a path; None where there is none."""
    found: Any = tables
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


@cache
def _defaults() -> dict[str, Any]:
    return toml.plain(RunConfig())
