"""The report: one page about a run that opens from disk, made from the run folder alone."""

from collections.abc import Callable
from pathlib import Path

from proximo.insight.charts.pages import page, section
from proximo.insight.folder import RunFolder
from proximo.insight.report.completions import completions
from proximo.insight.report.curves import curves
from proximo.insight.report.episodes import episodes
from proximo.insight.report.head import head
from proximo.insight.report.remarks import events, health
from proximo.insight.report.run_details import RunDetails, gather
from proximo.insight.report.settings import configuration, files, repeating
from proximo.insight.report.summary import summary
from proximo.runs.files import REPORT
from proximo.system.folders import write_file
from proximo.system.opening import without_links

__all__ = ["REPORT", "RunDetails", "gather", "render", "summary", "write_report"]

SECTIONS: dict[str, Callable[[RunDetails], str]] = {
    "Findings": health,
    "Curves": curves,
    "Episodes": episodes,
    "Completions": completions,
    "Configuration": configuration,
    "How to repeat it": repeating,
    "Events": events,
    "Files": files,
}
"""Sections of the page; empty ones are left out."""


def write_report(run: RunFolder, out: Path | None = None) -> tuple[Path, RunDetails]:
    """Write the report, by default into the run folder; returns its path and the details it was made from."""
    path, details = run.path / REPORT if out is None else without_links(out), gather(run)
    write_file(path, render(details).encode())
    return path, details


def render(details: RunDetails) -> str:
    sections = {title: made for title, make in SECTIONS.items() if (made := make(details))}
    shown = [section(title, content) for title, content in sections.items()]
    return page(f"{details.run.name}: report", [head(details, list(sections)), *shown])
