"""The top of the page: what was trained, its progress, and its result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proximo.insight.charts.bars import interval_chart
from proximo.insight.charts.pages import Html, anchor, number, text
from proximo.insight.reading import Row, is_number, real
from proximo.insight.report.run_details import RunDetails
from proximo.insight.report.summary import changes, first_and_last, sign_test
from proximo.runs.forking import parent_of
from proximo.system.safe_text import visible

LIKELY = 0.05
"""p-value below which the change in answers is unlikely to be chance."""
MAX_TEXT = 200
"""Maximum characters of a name."""
COLOURS = {"finished": "good", "running": "warn", "stopped": "bad"}


def head(details: RunDetails, titles: Sequence[str]) -> Html:
    """The head of the page; `titles` are those of the sections that follow."""
    links = " ".join(f'<a href="#{anchor(title)}">{text(title)}</a>' for title in titles)
    config, parent = details.config, parent_of(details.run.path, details.record)
    line = [
        details.algorithm_name or " ".join(details.command),
        None if config is None else type(config.task).__name__,
        details.model,
        None if config is None else f"seed {config.seed}",
        details.attempts[0].get("started") if details.attempts else None,
        None if parent is None else f"fork of {parent[0].name} after step {parent[1]}",
    ]
    what = " · ".join(f"<bdi>{text(visible(str(each), MAX_TEXT))}</bdi>" for each in line if each)
    return Html(
        f"<header>\n<h1><bdi>{text(details.run.name)}</bdi> "
        f'<span class="badge {COLOURS[details.state]}">{details.state}</span></h1>\n'
        f'<p class="faint">{what}</p>\n<nav>{links}</nav>\n</header>\n'
        f"<section>\n{_verdict(details)}{_standing(details)}{_result(details)}{_tiles(details)}</section>\n"
    )


def _verdict(details: RunDetails) -> str:
    """The sentence that doctor and page show, too."""
    verdict = details.checkup.verdict
    tone = "" if verdict.tone == "plain" else f" {verdict.tone}"
    word, rest = text(verdict.word), text(verdict.sentence.removeprefix(verdict.word))
    return f'<p class="lead"><b class="word{tone}">{word}</b>{rest}</p>\n'


def _standing(details: RunDetails) -> str:
    """State and progress of an unfinished run."""
    if details.state == "finished":
        return ""
    of = "" if details.config is None else f" of {details.config.steps}"
    done = f"{details.steps_done}{of} steps are done" if details.steps_done else "no step is finished yet"
    if details.state == "running":
        sentence = (
            f"Still running on {details.moment:%Y-%m-%d %H:%M:%S}: {done}. Create this page again for later steps."
        )
    else:
        how = f" ({visible(details.ended, 2 * MAX_TEXT)})" if details.ended else ""
        sentence = f"It ended early{how}: {done}. The command that started it resumes it."
    return f'<p class="warn">{text(sentence)}</p>\n'


def _result(details: RunDetails) -> str:
    """Held-out results before and after, with the sign test; of pairs the share alone, which has no interval."""
    before, after = (_Shares.of(row) for row in first_and_last(details))
    if before is None or after is None:
        return ""
    if details.is_stage:
        sentence = f"Held-out pairs ordered rightly: {before.accuracy:.1%} before, {after.accuracy:.1%} after."
        return f'<div class="result"><p>{text(sentence)}</p></div>\n'
    better, worse = changes(details.pairs)
    verdict = ""
    if better or worse:
        chance = sign_test(better, worse)
        judged = "chance alone hardly does that" if chance < LIKELY else "chance alone does as much"
        verdict = (
            f" Of the answers to the same problems {better} became better and {worse} worse: {judged} "
            f"(sign test, p {'< 0.001' if chance < 0.001 else f'= {chance:.2g}'})."
        )
    where = "" if details.state == "finished" else f" after step {after.step}"
    sentence = f"Held-out {_measured(before, after)}{where}, on {after.problems} problems.{verdict}"
    rows = [(name, each.accuracy, each.low, each.high) for name, each in (("before", before), ("after", after))]
    rows += _of_sources(*first_and_last(details))
    chart = interval_chart("Held-out accuracy", rows, unit="greedy, 95 % intervals")
    note = f'<p class="faint">{text(details.checkup.verdict.note)}</p>'
    return f'<div class="result"><div><p>{text(sentence)}</p>\n{note}</div>\n<div>{chart}</div></div>\n'


def _of_sources(before: Row | None, after: Row | None) -> list[tuple[str, float, float, float]]:
    """The same of each source, where held-out problems come from several."""
    names = [name.removesuffix("/accuracy") for name in after or () if name.endswith("/accuracy")]
    sides = (("before", before), ("after", after))
    shares = [(f"{name} {when}", _Shares.of(row, f"{name}/")) for name in names for when, row in sides]
    return [(visible(name, MAX_TEXT), each.accuracy, each.low, each.high) for name, each in shares if each is not None]


@dataclass(frozen=True)
class _Shares:
    """The shares of an evaluation that are shown."""

    step: int
    accuracy: float
    low: float
    high: float
    outcome: float
    problems: str

    @classmethod
    def of(cls, row: Row | None, prefix: str = "") -> "_Shares | None":
        """Shares of a row; None if it has no accuracy, as for other stages. `prefix`: of one source."""
        if row is None or not is_number(row.get(f"{prefix}accuracy")):
            return None
        values = [real(row.get(f"{prefix}{name}")) for name in ("accuracy", "low", "high", "outcome")]
        return cls(int(row["step"]), *values, problems=number(row.get(f"{prefix}problems")))


def _measured(before: _Shares, after: _Shares) -> str:
    """The mean task score, if task scores are not just right or wrong."""
    points = 100 * (after.accuracy - before.accuracy)
    sentence = f"accuracy {_way(points)} {before.accuracy:.1%} to {after.accuracy:.1%} ({points:+.1f} points)"
    sentence = sentence if points else f"accuracy stayed at {after.accuracy:.1%}"
    if math.isfinite(after.outcome - before.outcome) and before.outcome != before.accuracy:
        way = _way(after.outcome - before.outcome)
        sentence += f", the mean task score {way} {number(before.outcome)} to {number(after.outcome)}"
    return sentence


def _way(difference: float) -> str:
    return "rose from" if difference > 0 else "fell from" if difference < 0 else "went from"


def _tiles(details: RunDetails) -> str:
    of = "" if details.config is None else f"of {details.config.steps:,}"
    seconds, tokens = details.seconds, details.generated
    speed = f"{number(round(tokens / seconds))} a second" if tokens and seconds else ""
    tiles = [
        ("steps", f"{details.steps_done:,}", of),
        ("tokens generated", "" if tokens is None else f"{tokens:,}", speed),
        (
            "time",
            "" if seconds is None else duration(seconds),
            f"in {len(details.attempts)} attempts" if len(details.attempts) > 1 else "",
        ),
        (
            "findings",
            str(len(details.findings)),
            ", ".join(dict.fromkeys(each.finding.severity for each in details.findings)),
        ),
    ]
    cells = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)} <small>{text(more)}</small></dd></div>"
        for name, value, more in tiles
        if value
    )
    return f'<dl class="tiles">{cells}</dl>\n'


def duration(seconds: float) -> str:
    """Example: duration(3725) == "1 h 2 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
