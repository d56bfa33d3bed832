"""Parts of a report, before they become Markdown or HTML."""

from collections.abc import Sequence
from dataclasses import dataclass

from proximo.insight.charts.drawing import Series


@dataclass(frozen=True)
class ReportTable:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class CodeBlock:
    text: str


@dataclass(frozen=True)
class ReportChart:
    title: str
    unit: str
    x: str
    series: Sequence[Series]
    faint: Sequence[Series]


@dataclass(frozen=True)
class Lead:
    """An emphasised sentence."""

    text: str


@dataclass(frozen=True)
class Intervals:
    """Differences from zero: (name, difference, low, high, formatted)."""

    title: str
    unit: str
    rows: Sequence[tuple[str, float, float, float, str]]


Block = str | Lead | ReportTable | CodeBlock | ReportChart | Intervals


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]
