"""New rankings from a run's own rollouts: training data for the next reward model or DPO."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from proximo.data.rankings import Ranking, ranking_row, read_rankings
from proximo.data.rows import Mistakes
from proximo.losses.arithmetic import count_of
from proximo.supervised.stored_groups import group_files, groups_in, prompt_of, step_range
from proximo.system.folders import write_file
from proximo.system.opening import make_folder, without_links


@dataclass(frozen=True)
class PairsConfig:
    run: str
    """A run folder of `proximo train`."""
    out: str
    """The .jsonl file to write."""
    steps: str = ":"
    """Range of steps A:B, from A up to but not including B; either may be left out."""
    by: Literal["outcome", "reward"] = "outcome"
    """Value to rank by: the task's score, or the reward that was trained on."""
    old: str | None = None
    """File of earlier rankings to mix in, .jsonl or .parquet."""
    old_share: float = 0.1
    """Share of the written rows that are drawn from the old ones; iterative GRPO uses 0.1."""
    seed: int = 0
    """Random seed of the draw from the old rows."""

    def __post_init__(self) -> None:
        if not self.out.endswith(".jsonl"):
            raise ValueError(f"out is {self.out!r}: give a name that ends with .jsonl")
        if not 0 <= self.old_share < 1:
            raise ValueError(f"old_share is {self.old_share}: give a share from 0 to below 1")
        step_range(self.steps)


@dataclass
class Counts:
    """Numbers of groups and completions that were used and left out."""

    groups: int = 0
    fresh: int = 0
    """New rankings, one for each group with at least two different values."""
    one_level: int = 0
    """Groups whose completions all have the same value."""
    truncated: int = 0
    unscored: int = 0
    empty: int = 0
    """Empty completions, left out."""
    old: int = 0
    """Rankings drawn from the old file."""
    old_missing: int = 0
    """Rankings missing because the old file has too few."""


def write_pairs(config: PairsConfig) -> Counts:
    """Read a run's rollouts and write their rankings."""
    out = without_links(config.out)
    if out.exists():
        raise ValueError(f"out is {config.out!r}: the file exists; choose another name or remove it")
    earlier = _earlier(config.old) if config.old is not None else []
    counts = Counts()
    rankings = list(_fresh(config, counts))
    if not rankings:
        measure = "task score" if config.by == "outcome" else config.by
        raise ValueError(
            f"run is {config.run!r}: none of its {counts.groups} groups has completions of different {measure}s, "
            f"so there is nothing to rank (left out: {counts.truncated} truncated, {counts.unscored} unscored and "
            f"{counts.empty} empty completions)"
        )
    if config.old is not None:
        rankings += _drawn(earlier, config, counts)
    make_folder(out.parent)
    lines = (json.dumps(ranking_row(ranking), ensure_ascii=False) + "\n" for ranking in rankings)
    write_file(out, "".join(lines).encode())
    return counts


# Fresh rankings


def _fresh(config: PairsConfig, counts: Counts) -> Iterator[Ranking]:
    for path in group_files(config.run, config.steps):
        for group in groups_in(path, [config.by]):
            counts.groups += 1
            completions = _ranked(group, config.by, counts)
            if len(completions) < 2:
                counts.one_level += 1
                continue
            counts.fresh += 1
            yield Ranking(f"{path}, group {group[0]['group']}", prompt_of(group[0]), completions)


def _ranked(group: Sequence[Mapping[str, Any]], by: str, counts: Counts) -> tuple[str, ...]:
    """One completion for each value, best first: the first whose text is not already used by a better one."""
    levels: dict[float, list[str]] = {}
    for row in group:
        if row["truncated"]:
            counts.truncated += 1
        elif math.isnan(row[by]):
            counts.unscored += 1
        elif not row["text"].strip():
            counts.empty += 1
        else:
            levels.setdefault(row[by], []).append(row["text"])
    chosen: list[str] = []
    for level in sorted(levels, reverse=True):
        chosen += [text for text in levels[level] if text not in chosen][:1]
    return tuple(chosen)


# Old rankings


def _earlier(path: str) -> list[Ranking]:
    mistakes = Mistakes()
    rankings = read_rankings(path, mistakes, field="old")
    mistakes.refuse(f"old is {path!r}, with bad rows:")
    return rankings


def _drawn(earlier: Sequence[Ranking], config: PairsConfig, counts: Counts) -> list[Ranking]:
    """Draw enough old rankings to make up their share of all rows."""
    wanted = count_of(config.old_share / (1 - config.old_share), counts.fresh)
    counts.old = min(wanted, len(earlier))
    counts.old_missing = wanted - counts.old
    return Random(config.seed).sample(earlier, counts.old)
