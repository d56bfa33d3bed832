"""The top of the page: what was trained, its progress, and its result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proximo.insight.charts.bars import interval_chart
from proximo.insight.charts.pages import Html, anchor, number, text
from proximo.insight.reading import Row, is_number, real
from proximo.insight.report.facts import Facts
from proximo.insight.report.summary import changes, first_and_last, sign_test
from proximo.runs.forking import parent_of
from proximo.system.safe_text import visible

LIKELY = 0.05
"""p-value below which the change in answers is unlikely to be chance."""
MAX_TEXT = 200
"""Maximum characters of a name."""
COLOURS = {"finished": "good", "running": "warn", "stopped": "bad"}


def head(facts: Facts, titles: Sequence[str]) -> Html:
    """The head of the page; `titles` are those of the sections that follow."""
    links = " ".join(f'<a href="#{anchor(title)}">{text(title)}</a>' for title in titles)
    config, parent = facts.config, parent_of(facts.run.path, facts.record)
    line = [
        facts.algorithm_name or " ".join(facts.command),
        None if config is None else type(config.task).__name__,
        facts.model,
        None if config is None else f"seed {config.seed}",
        facts.attempts[0].get("started") if facts.attempts else None,
        None if parent is None else f"fork of {parent[0].name} after step {parent[1]}",
    ]
    what = " · ".join(f"<bdi>{text(visible(str(each), MAX_TEXT))}</bdi>" for each in line if each)
    return Html(
        f"<header>\n<h1><bdi>{text(facts.run.name)}</bdi> "
        f'<span class="badge {COLOURS[facts.state]}">{facts.state}</span></h1>\n'
        f'<p class="faint">{what}</p>\n<nav>{links}</nav>\n</header>\n'
        f"<section>\n{_verdict(facts)}{_standing(facts)}{_result(facts)}{_tiles(facts)}</section>\n"
    )


def _verdict(facts: Facts) -> str:
    """The sentence that doctor and page show, too."""
    found = facts.checkup.verdict
    tone = "" if found.tone == "plain" else f" {found.tone}"
    word, rest = text(found.word), text(found.sentence.removeprefix(found.word))
    return f'<p class="lead"><b class="word{tone}">{word}</b>{rest}</p>\n'


def _standing(facts: Facts) -> str:
    """For an unfinished run: its state and progress."""
    if facts.state == "finished":
        return ""
    of = "" if facts.config is None else f" of {facts.config.steps}"
    done = f"{facts.steps_done}{of} steps are done" if facts.steps_done else "no step is finished yet"
    if facts.state == "running":
        sentence = f"Still running on {facts.moment:%Y-%m-%d %H:%M:%S}: {done}. Create this page again for later steps."
    else:
        how = f" ({visible(facts.ended, 2 * MAX_TEXT)})" if facts.ended else ""
        sentence = f"It ended early{how}: {done}. The command that started it resumes it."
    return f'<p class="warn">{text(sentence)}</p>\n'


def _result(facts: Facts) -> str:
    """Held-out results before and after, with the sign test."""
    before, after = (_Shares.of(row) for row in first_and_last(facts))
    if before is None or after is None:
        return ""
    better, worse = changes(facts.pairs)
    verdict = ""
    if better or worse:
        chance = sign_test(better, worse)
        judged = "chance alone hardly does that" if chance < LIKELY else "chance alone does as much"
        verdict = (
            f" Of the answers to the same problems {better} became better and {worse} worse: {judged} "
            f"(sign test, p {'< 0.001' if chance < 0.001 else f'= {chance:.2g}'})."
        )
    where = "" if facts.state == "finished" else f" after step {after.step}"
    sentence = f"Held-out {_measured(before, after)}{where}, on {after.problems} problems.{verdict}"
    rows = [(name, each.accuracy, each.low, each.high) for name, each in (("before", before), ("after", after))]
    rows += _of_sources(*first_and_last(facts))
    chart = interval_chart("Held-out accuracy", rows, unit="greedy, 95 % intervals")
    note = f'<p class="faint">{text(facts.checkup.verdict.note)}</p>'
    return f'<div class="result"><div><p>{text(sentence)}</p>\n{note}</div>\n<div>{chart}</div></div>\n'


def _of_sources(before: Row | None, after: Row | None) -> list[tuple[str, float, float, float]]:
    """The same of each source, where held-out problems come from several."""
    names = [name.removesuffix("/accuracy") for name in after or () if name.endswith("/accuracy")]
    sides = (("before", before), ("after", after))
    found = [(f"{name} {when}", _Shares.of(row, f"{name}/")) for name in names for when, row in sides]
    return [(visible(name, MAX_TEXT), each.accuracy, each.low, each.high) for name, each in found if each is not None]


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
        """None if there is no accuracy, as for other stages. `prefix`: of one source."""
        if row is None or not is_number(row.get(f"{prefix}accuracy")):
            return None
        values = [real(row.get(f"{prefix}{name}")) for name in ("accuracy", "low", "high", "outcome")]
        return cls(int(row["step"]), *values, problems=number(row.get(f"{prefix}problems")))


def _measured(before: _Shares, after: _Shares) -> str:
    """The mean outcome, if outcomes are not just right or wrong."""
    points = 100 * (after.accuracy - before.accuracy)
    sentence = f"accuracy {_way(points)} {before.accuracy:.1%} to {after.accuracy:.1%} ({points:+.1f} points)"
    sentence = sentence if points else f"accuracy stayed at {after.accuracy:.1%}"
    if math.isfinite(after.outcome - before.outcome) and before.outcome != before.accuracy:
        way = _way(after.outcome - before.outcome)
        sentence += f", the mean outcome {way} {number(before.outcome)} to {number(after.outcome)}"
    return sentence


def _way(difference: float) -> str:
    return "rose from" if difference > 0 else "fell from" if difference < 0 else "went from"


def _tiles(facts: Facts) -> str:
    of = "" if facts.config is None else f"of {facts.config.steps:,}"
    seconds, tokens = facts.seconds, facts.generated
    speed = f"{number(round(tokens / seconds))} a second" if tokens and seconds else ""
    tiles = [
        ("steps", f"{facts.steps_done:,}", of),
        ("tokens generated", "" if tokens is None else f"{tokens:,}", speed),
        (
            "time",
            "" if seconds is None else duration(seconds),
            f"in {len(facts.attempts)} attempts" if len(facts.attempts) > 1 else "",
        ),
        (
            "findings",
            str(len(facts.findings)),
            ", ".join(dict.fromkeys(each.finding.severity for each in facts.findings)),
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
