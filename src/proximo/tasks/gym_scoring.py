"""The scorers of reasoning-gym. Runs in a worker: some scorers evaluate model output, some may never finish."""

import ast
import contextlib
import json
import sys
import types
from functools import lru_cache
from pathlib import Path
from typing import Any

import reasoning_gym

MEMORY_MB = 4096


def scored(answers: list[str], entries: list[str], name: str, config: str) -> list[float | None]:
    """The task's score of each answer; None if the scorer raises. Entries are Python literals."""
    dataset = _dataset(name, config)
    return [_score(dataset, answer, entry) for answer, entry in zip(answers, entries, strict=True)]


def _score(dataset: Any, answer: str, entry: str) -> float | None:
    try:
        return float(dataset.score_answer(answer, ast.literal_eval(entry)))
    except Exception:  # a hundred scorers by many hands: one that breaks on strange input gives no verdict
        return None


@lru_cache(maxsize=1)
def _dataset(name: str, config: str) -> Any:
    dataset = reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(config))
    with contextlib.suppress(OSError, KeyError, ValueError):  # a machine that has no such walls
        _lock_in()
    return dataset


def _lock_in() -> None:
    """Restrict this process for good: it can read Python's library and write its answers, nothing else."""
    package = Path(__file__).parents[1]
    # Named but not run: the packages themselves would load torch.
    for name in ("proximo", "proximo.processes", "proximo.processes.sandbox"):
        folder = package.parent.joinpath(*name.split("."))
        sys.modules.setdefault(name, types.ModuleType(name)).__path__ = [str(folder)]
    from proximo.processes.sandbox import isolation
    from proximo.processes.sandbox.limits import LONGEST, Limits

    cage = isolation.Cage(isolation.readable_folders(), False, False, isolation.landlock_version(), None)
    isolation.lock_in(cage, Limits(cpu_seconds=int(LONGEST), memory_mb=MEMORY_MB))
