"""Dry runs: what training or an evaluation would do, checked as it checks it and told in lines; nothing is started."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from proximo.api.banners import Opening, Planned, details, evaluation_lines, planned, run_lines
from proximo.api.evaluating import EvalConfig, rehearse_evaluation
from proximo.api.evaluation.models import Candidate
from proximo.api.messages import Say, keep_quiet, say
from proximo.config import toml
from proximo.rl.config import RunConfig
from proximo.rl.preflight.preflight import rehearse, skipped_line
from proximo.runs.banner import BannerLine, banner, terminal_width
from proximo.system.safe_text import visible
from proximo.tasks.sources.mixture import data_remarks

COMMENT = "# "
"""Beginning of the remarks below a config."""
Config = TypeVar("Config")


class Rehearsed(Protocol):
    """An overview of a stage that has been checked."""

    @property
    def lines(self) -> list[BannerLine]: ...


@dataclass(frozen=True)
class DryTrain:
    """A run that has been checked and is not started."""

    config: RunConfig
    plan: Planned
    labelled: list[BannerLine]
    """Labels and texts of its banner."""
    more: list[str]
    """Lines that only a dry run has."""

    @classmethod
    def of(cls, config: RunConfig, opening: Opening) -> "DryTrain":
        """Do what training does before it loads weights; ValueError for whatever it would refuse."""
        rehearsal = rehearse(config)
        plan = planned(config, rehearsal.checked.tokenizer)
        labelled = run_lines(config, rehearsal.checked, plan, rehearsal.calibration, opening)
        return cls(config, plan, labelled, [*details(config, plan), *rehearsal.remarks])

    @property
    def lines(self) -> list[str]:
        """The config as a file, and below it in comments what the run would do."""
        return _commented(self.config, self.labelled, self.more)


def dry_stage(config: Config, check: Callable[[Config], Rehearsed]) -> list[str]:
    """Config of a stage as a file, and below it in comments what it would do; `check` refuses what cannot be run."""
    return _commented(config, check(config).lines, [])


def evaluation_plan(models: Sequence[Candidate], config: EvalConfig) -> tuple[list[BannerLine], list[str]]:
    """Labelled lines on what models would be asked, and remarks; ValueError for whatever an evaluation would
    refuse before it loads weights."""
    rehearsals = [rehearse_evaluation(each.name, config) for each in models]
    notes = [*data_remarks(config.task), *skipped_line(rehearsals[0].left_out)]
    return evaluation_lines(models, rehearsals, config), notes


def evaluation_text(labelled: Sequence[BannerLine], notes: Sequence[str]) -> list[str]:
    """The plan of an evaluation in lines."""
    return [*banner(labelled, terminal_width()), *map(visible, notes)]


def tell_lines(lines: list[str], quiet: bool, log: Callable[[Any], object] | None = None) -> Any:
    """Return the lines, once `log` or, where none is given, a person has been told them."""
    tell: Say | Callable[[Any], object] = log or (keep_quiet if quiet else say)
    for line in lines:
        tell(line)
    return lines


def _commented(config: object, lines: Sequence[BannerLine], more: Sequence[str]) -> list[str]:
    shown = [*banner(lines, terminal_width() - len(COMMENT)), *more]
    remarks = [f"{COMMENT}{part}" for line in shown for part in visible(line).splitlines()]
    return [*toml.dumps(config).splitlines(), "", *remarks]
