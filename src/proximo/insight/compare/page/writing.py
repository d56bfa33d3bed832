"""The reports: compare.md, compare.html and compare.json, from one result."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from proximo.insight.charts.drawing import line_chart
from proximo.insight.charts.pages import Html, page, section, table, text
from proximo.insight.compare.page.details import cost, curves, repeat, settings, waste, way
from proximo.insight.compare.page.forest import forest
from proximo.insight.compare.page.report_parts import (
    Block,
    CodeBlock,
    Intervals,
    Lead,
    ReportChart,
    ReportTable,
    Section,
)
from proximo.insight.compare.page.verdicts import fair, parted, verdict
from proximo.insight.compare.result import ComparisonResult
from proximo.system.folders import write_file
from proximo.system.safe_text import visible

JSON, MARKDOWN, PAGE = "compare.json", "compare.md", "compare.html"
PAIRS = "grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr))"
"""Charts by step and by tokens, next to each other."""
APART = "margin: 4px 0 16px"
WIDTH = 560


def write_reports(folder: Path, result: ComparisonResult) -> None:
    contents = sections(result)
    write_file(folder / JSON, (json.dumps(result.to_dict(), indent=1) + "\n").encode())
    write_file(folder / MARKDOWN, markdown(result, contents).encode())
    write_file(folder / PAGE, html(result, contents).encode())


def sections(result: ComparisonResult) -> list[Section]:
    makers: Sequence[tuple[str, Callable[[ComparisonResult], list[Block]]]] = (
        ("Verdict", verdict),
        ("Is it fair?", fair),
        ("Where they part", parted),
        ("Curves", curves),
        ("On the way", way),
        ("Wasted compute", waste),
        ("Time and memory", cost),
        ("What differs", settings),
        ("How to repeat it", repeat),
    )
    return [Section(title, blocks) for title, make in makers if (blocks := make(result))]


def title(result: ComparisonResult) -> str:
    return " against ".join([", ".join(each.name for each in result.contenders[1:]), result.first])


# Markdown


def markdown(result: ComparisonResult, contents: list[Section]) -> str:
    """The Markdown report, without the charts of the page."""
    parts = [f"# {_line(title(result))}"]
    for each in contents:
        blocks = [_markdown(block) for block in each.blocks if not isinstance(block, ReportChart | Intervals)]
        if any(isinstance(block, ReportChart) for block in each.blocks):
            blocks.append(f"The curves are drawn in {PAGE}.")
        parts += [f"## {each.title}", *blocks]
    return "\n\n".join(parts) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case ReportTable(header, rows):
            lines = [header, ["---"] * len(header), *rows]
            return "\n".join(f"| {' | '.join(_line(cell) for cell in row)} |" for row in lines)
        case Lead(words):
            return _line(words)
        case CodeBlock(code):
            return f"```text\n{visible(code).replace('```', '')}\n```"
        case _:
            return _line(str(block))


def _line(words: str) -> str:
    """Escape names and values from files, so that they cannot break a table or add markup."""
    return visible(words).replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")


# The page


def html(result: ComparisonResult, contents: list[Section]) -> str:
    word, colour = ("fair", "good") if result.fair else ("not fair", "bad")
    spent = f"{result.budget} {'a run' if result.forked is None else 'from the fork on'}"
    details = [result.task, result.model, spent, f"seeds {', '.join(map(str, result.seeds))}"]
    head = Html(
        f'<header>\n<h1>{text(title(result))} <span class="badge {colour}">{word}</span></h1>\n'
        f'<p class="faint">{" · ".join(text(each) for each in details)}</p>\n</header>\n'
    )
    return page(title(result), [head, *(section(each.title, *_html(each.blocks)) for each in contents)])


def _html(blocks: Sequence[Block]) -> Iterator[str]:
    """The page: the main result next to its plot, charts in pairs, the rest below each other."""
    for kind, group in groupby(
        blocks, key=lambda block: (isinstance(block, ReportChart), isinstance(block, Lead | Intervals))
    ):
        members = list(group)
        drawn = "".join(map(_drawn, (block for block in members if isinstance(block, ReportChart | Intervals))))
        written = "".join(map(_written, (block for block in members if not isinstance(block, ReportChart | Intervals))))
        match kind:
            case True, _:
                yield f'<div class="charts" style="{PAIRS}">\n{drawn}</div>\n'
            case _, True:
                yield f'<div class="result" style="{APART}"><div>{written}</div><div>{drawn}</div></div>\n'
            case _:
                yield written


def _drawn(block: ReportChart | Intervals) -> str:
    if isinstance(block, Intervals):
        return forest(block)
    return line_chart(block.title, block.series, x=block.x, unit=block.unit, faint=block.faint, width=WIDTH)


def _written(block: Block) -> str:
    match block:
        case ReportTable(header, rows):
            return f'<div style="{APART}">{table(header, rows)}</div>\n'
        case CodeBlock(code):
            return f"<pre>{text(code)}</pre>\n"
        case Lead(words):
            return f'<p class="lead">{text(words)}</p>\n'
        case _:
            return f"<p>{text(block)}</p>\n"
