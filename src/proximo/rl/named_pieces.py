"""Pieces that a run's TOML file gives by their names alone: an algorithm, an environment, tools and rewards."""

from collections.abc import Sequence
from typing import Any

from proximo.algorithms.explain import CARDS, card
from proximo.config import toml
from proximo.rl.schedules import spelled_out


def with_named_pieces(tables: dict[str, Any], *, with_kl: bool) -> dict[str, Any]:
    """The tables with an algorithm, an environment and rewards that are given by their names alone."""
    algorithm = tables.get("algorithm", "grpo" if with_kl else None)
    if isinstance(algorithm, str):
        if (named := card(algorithm)) is None:
            raise ValueError(f"algorithm is {algorithm!r}: give one of {', '.join(each.name for each in CARDS)}")
        tables["algorithm"] = toml.plain(named.value)
        if with_kl and isinstance(kl := tables["algorithm"].get("kl"), dict):
            del kl["coefficient"]
    if isinstance(path := tables.get("environment"), str):
        tables["environment"] = {"type": "MultiTurn", "path": path}
    if "tools" in tables:
        tables.setdefault("environment", {"type": "MultiTurn"})
    if isinstance(table := tables.get("schedules"), dict):
        tables["schedules"] = spelled_out(table)
    if isinstance(metrics := tables.get("metrics"), str | list):
        several = metrics if isinstance(metrics, list) else [metrics]
        named = [{"type": "PythonMetric", "path": each} if isinstance(each, str) else each for each in several]
        tables["metrics"] = named
    if (reward := tables.pop("reward", None)) is not None:
        _set_rewards(tables, reward if isinstance(reward, list) else [reward])
    return tables


def _set_rewards(tables: dict[str, Any], given: Sequence[object]) -> None:
    """Put rewards that are given by name where a config has them: one takes the place of the task's own."""
    pairs = [str(each).partition("=")[::2] for each in given]
    rewards = [{"type": "PythonFunction", "path": name} if ":" in name else {"type": name} for name, _ in pairs]
    task = tables.get("task")
    if len(rewards) == 1 and not pairs[0][1] and isinstance(task, dict) and task.get("type") == "File":
        task["reward"] = rewards[0]
        return
    rules = [{"reward": each} for each in rewards]
    for rule, (name, weight) in zip(rules, pairs, strict=True):
        if weight:
            rule["weight"] = _weight(name, weight)  # pyright: ignore[reportArgumentType]
    if isinstance(task, dict) and task.get("type") == "File":
        task["reward"] = "none"
    tables["rewards"] = {"task": 0.0, "rules": rules} | tables.get("rewards", {})


def _weight(name: str, weight: str) -> float:
    try:
        return float(weight)
    except ValueError:
        raise ValueError(f"reward {name} has the weight {weight!r}: give a number") from None
