"""Names of earlier versions' configs, and fields that these lacked: the one table of fields and classes."""

import tomllib
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

RENAMED = {
    "replay": "routing_replay",
    "most_generated": "max_generated_tokens",
    "rewards.most_unscored": "max_unscored",
    "training.most_skipped": "max_skipped",
    "ppo.training.most_skipped": "max_skipped",
    "grpo.training.most_skipped": "max_skipped",
}
"""The dotted name that a field had, of a run or of a chain of runs, and its name today, in the same table."""
ADDED = {
    "sampler": {"type": "Embedded"},
    "environment": {"type": "SingleTurn"},
    "ahead": {"staleness": 0, "switch": "between", "window": 0.0},
    "ahead.switch": "between",
    "ahead.window": 0.0,
}
"""Dotted names of a run's fields that earlier versions did not have, and what those versions did."""
ADDED_LATER = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "adam_moments": "float32",
    "training.learning_rate_schedule": "constant",
    "fit.learning_rate_schedule": "linear",
    "evaluation.metric": "outcome",
    "fit.metric": "loss",
    "freeze": [],
    "template": "",
    "system": "",
    "chat": False,
    "data.too_long": "leave_out",  # rows that were too long were refused, or skipped: no run has any
}
"""Fields of any config that became options later, by name or with their table's, and what a config without them did."""
MOVED = {
    "proximo.acting": "proximo.environments",
    "proximo.evaluation": "proximo.api.evaluation",
    "proximo.fleet": "proximo.samplers.engines",
    "proximo.health": "proximo.runs.health",
    "proximo.maths": "proximo.losses",
    "proximo.losses.pieces.traits": "proximo.losses.pieces.protocols",
    "proximo.presets": "proximo.recipes.presets",
    "proximo.sandbox": "proximo.processes.sandbox",
    "proximo.studies": "proximo_lab.studies",
    "proximo.training.config": "proximo.rl.config",
    "proximo.training.rl": "proximo.rl",
    "proximo.training.runfolder": "proximo.runs",
    "proximo.worlds": "proximo.environments.examples",
}
"""Modules that configs and users' own files name, with all below them, and where these are today."""


def current_module(module: str) -> str:
    """Name that a module of an earlier version has today.

    Example: current_module("proximo.worlds.python") == "proximo.environments.examples.python"
    """
    for old, new in MOVED.items():
        if module == old or module.startswith(f"{old}."):
            module = new + module.removeprefix(old)
    return module


def _current_names(value: Any) -> Any:
    """Plain values, in which each "module:Name" says where the module is today."""
    if isinstance(value, dict):
        return {key: _current_names(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_current_names(item) for item in value]
    module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    return f"{current_module(module)}:{name}" if colon else value


def renewed(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a config with today's names; what has them already is left as it is."""
    tables = _current_names(deepcopy(tables))
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
        for field, value in ADDED.items():
            *path, name = field.split(".")
            if (table := _inner(tables, path)) is not None:
                table.setdefault(name, deepcopy(value))
    return tables


def added_later(field: str, otherwise: Any) -> Any:
    """The value of a field that a config was too early to have; `otherwise` where every version had it.

    Example: added_later("ppo.training.adam_beta1", None) == 0.9
    """
    table, _, name = field.rpartition(".")
    return ADDED_LATER.get(name, ADDED_LATER.get(f"{table.rpartition('.')[2]}.{name}", otherwise))


def _inner(tables: dict[str, Any], path: Sequence[str]) -> dict[str, Any] | None:
    """The table at a path; None where there is none."""
    table: Any = tables
    for name in path:
        table = table.get(name) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else None
