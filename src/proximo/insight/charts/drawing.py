"""Charts as SVG text without scripts; colours are CSS classes, so that a page's style handles light and dark.

Points that are not finite are gaps. The values at each x are in the drawing too, in strips that the style shows when
pointed at.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeVar

from proximo.insight.charts.pages import Html, number, text
from proximo.system.safe_text import visible

WIDTH, HEIGHT, TOP, BOTTOM = 400, 220, 30, 34
CHARACTER = 6.1
"""Width of a label's character, estimated generously so that labels stay inside the drawing."""
LINE = 13
"""Distance between labels."""
Number = int | float
Point = TypeVar("Point", bound=tuple[Number, ...])
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
COLOURS, STRIPS, NAME, TITLE, LONG, LARGEST = 8, 60, 16, 60, 1200, 1e100


@dataclass(frozen=True)
class Series:
    """One line of a chart; `band` is (x, low, high)."""

    name: str
    points: Sequence[tuple[Number, Number]]
    band: Sequence[tuple[Number, Number, Number]] = ()


@dataclass(frozen=True)
class Axis:
    """Maps values to positions between two ends of a drawing."""

    low: Number
    high: Number
    start: Number
    end: Number
    step: Number
    """Distance between ticks."""

    def position(self, value: Number) -> Number:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[Number]:
        first, last = math.ceil(self.low / self.step - 1e-6), math.floor(self.high / self.step + 1e-6)
        return [index * self.step for index in range(first, last + 1)]

    @property
    def _is_tiny(self) -> bool:
        return max(abs(self.low), abs(self.high)) < 1e-3

    def label(self, value: Number) -> str:
        """A tick's label, with as many digits as neighbouring ticks need to differ."""
        power = _power(self.step)
        return self._shown(value, max(-power + (abs(self.step / 10.0**power - 2.5) < 1e-6), 0))

    def reading(self, value: Number) -> str:
        """A value with two more digits than the ticks, and at least three significant ones."""
        if 0 < abs(value) < self.step and not self._is_tiny:
            return number(value)
        shown = self._shown(value, max(2 - _power(self.step), 0))
        is_plain = "." in shown and shown.replace(".", "").replace(",", "").lstrip("-").isdigit()
        return shown.rstrip("0").rstrip(".") if is_plain else shown

    def _shown(self, value: Number, decimals: int) -> str:
        if not value and (self._is_tiny or self.step >= 1000):
            return "0"
        if self._is_tiny:
            mantissa, _, power = f"{value:.2e}".partition("e")
            return f"{float(mantissa):g}e{int(power)}"
        unit, name = next((each for each in UNITS if self.step >= each[0]), (1, ""))
        return f"{value / unit:,.3g}{name}" if name else f"{value:z,.{decimals}f}"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x: str = "step",
    unit: str = "",
    faint: Sequence[Series] = (),
    width: int = WIDTH,
    height: int = HEIGHT,
) -> Html:
    """Lines with a label at each one's end. A faint line has the colour of the series of the same name."""
    places = [point for each in (*series, *faint) for point in _known(each)]
    places += [(px, edge) for each in series for px, *edges in each.band for edge in edges if is_known(px, edge)]
    height = max(height, TOP + BOTTOM + LINE * len(series))
    if not places:
        return drawing(title, unit, width, height, [nothing(width, height)])
    vertical = _vertical_axis([value for _, value in places], height)
    labels = _labels(series, vertical, NAME if width <= WIDTH else 2 * NAME)
    left = CHARACTER * max(len(x) + 2, *(len(vertical.label(tick)) for tick in vertical.ticks())) + 8
    right = width - (CHARACTER * max((len(label) for label in labels.values()), default=0) + 8)
    horizontal = _horizontal_axis([value for value, _ in places], left, max(right, left + 60))
    colours = {each.name: _colour(index) for index, each in reversed(list(enumerate(series)))}
    parts = [_frame(horizontal, vertical, x)]
    parts += [_line(each, colours.get(each.name, "other"), horizontal, vertical, "line seed") for each in faint]
    parts += [_line(each, _colour(index), horizontal, vertical, "line") for index, each in enumerate(series)]
    parts += [_end_labels(series, labels, horizontal, vertical)]
    parts += _strips([each for each in series if _known(each)], horizontal, vertical, x, height)
    return drawing(title, unit, width, height, parts)


def drawing(title: str, unit: str, width: int, height: int, parts: Sequence[str]) -> Html:
    measured = f'<tspan dx="6" font-weight="400" class="unit">{text(visible(unit, TITLE))}</tspan>' if unit else ""
    shown = visible(title, TITLE)
    return Html(
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{text(shown)}">\n'
        f'<text class="name" x="0" y="13">{text(shown)}{measured}</text>\n{"".join(parts)}</svg>\n'
    )


def nothing(width: int, height: int) -> str:
    return words(width / 2, height / 2, "no values yet") + "\n"


def _frame(horizontal: Axis, vertical: Axis, x: str) -> str:
    """Grid, ticks and the name of x, left of its ticks."""
    left, right, bottom = horizontal.start, horizontal.end, vertical.start
    parts = []
    for tick in vertical.ticks():
        y = vertical.position(tick)
        parts += [rule("grid", left, right, y, y), words(left - 6, y + 4, vertical.label(tick), "end")]
    parts += [rule("axis", left, right, bottom, bottom), words(left - 14, bottom + 14, x, "end")]
    parts += [words(horizontal.position(tick), bottom + 14, horizontal.label(tick)) for tick in horizontal.ticks()]
    return "".join(parts) + "\n"


def rule(kind: str, x1: Number, x2: Number, y1: Number, y2: Number) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def words(x: Number, y: Number, content: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(content)}</text>'


def _line(series: Series, colour: str, horizontal: Axis, vertical: Axis, kind: str) -> str:
    parts = []
    for piece in _pieces(series.band):
        there = [f"{horizontal.position(px):.1f},{vertical.position(high):.1f}" for px, _, high in piece]
        back = [f"{horizontal.position(px):.1f},{vertical.position(low):.1f}" for px, low, _ in reversed(piece)]
        parts.append(f'<polygon class="band" points="{" ".join(there + back)}"/>')
    few = len(series.points) <= 12 and kind == "line"
    for piece in _pieces(series.points):
        placed = [(horizontal.position(px), vertical.position(py)) for px, py in piece]
        if len(placed) > 1:
            points = " ".join(f"{px:.1f},{py:.1f}" for px, py in _thinned(placed))
            parts.append(f'<polyline class="{kind}" points="{points}"/>')
        if few or len(placed) == 1:
            parts += [f'<circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="2.4"/>' for px, py in placed]
    return f'<g class="{colour}">{"".join(parts)}</g>\n'


def _thinned(placed: Sequence[tuple[Number, Number]]) -> Sequence[tuple[Number, Number]]:
    """Points of a line; of a long one the first, last, highest and lowest in each column of the drawing, which looks
    the same."""
    if len(placed) <= LONG:
        return placed
    kept = []
    for _, points in groupby(placed, key=lambda point: round(point[0])):
        column = list(points)
        heights = [height for _, height in column]
        ends = {0, len(column) - 1, heights.index(min(heights)), heights.index(max(heights))}
        kept += [column[index] for index in sorted(ends)]
    return kept


def _labels(series: Sequence[Series], axis: Axis, max_length: int) -> dict[int, str]:
    """Labels by series index: name, with at most so many characters, and last value; the value alone if the title names
    the line."""
    last = {index: known[-1][1] for index, each in enumerate(series) if (known := _known(each))}
    readings = {index: axis.reading(value) for index, value in last.items()}
    if len(readings) == 1:
        return readings
    return {index: f"{short(series[index].name, max_length)} {reading}" for index, reading in readings.items()}


def _end_labels(series: Sequence[Series], labels: dict[int, str], horizontal: Axis, vertical: Axis) -> str:
    """Labels at the lines' ends, moved so that they do not overlap."""
    wanted = sorted((vertical.position(_known(series[index])[-1][1]), index) for index in labels)
    heights = []
    for y, _ in wanted:
        heights.append(max(y, heights[-1] + LINE) if heights else max(y, vertical.end))
    lowest = vertical.start
    for slot in reversed(range(len(heights))):
        heights[slot] = min(heights[slot], lowest)
        lowest = heights[slot] - LINE
    return "".join(
        f'<g class="{_colour(index)}"><text class="label" x="{horizontal.end + 6:.1f}" y="{y + 4:.1f}">'
        f"{text(labels[index])}</text></g>\n"
        for y, (_, index) in zip(heights, wanted, strict=True)
    )


def _strips(named: Sequence[Series], horizontal: Axis, vertical: Axis, x: str, height: int) -> list[str]:
    """The values of all lines at up to STRIPS values of x."""
    values = [dict(_known(each)) for each in named]
    places = sorted({px for each in values for px in each})
    every = math.ceil(len(places) / STRIPS)
    shown = places[::-1][:: max(every, 1)][::-1]  # always includes the last one
    middles = [horizontal.position((one + other) / 2) for one, other in pairwise(shown)]
    edges = [horizontal.start, *middles, horizontal.end]
    strips = []
    for px, (start, end) in zip(shown, pairwise(edges), strict=True):
        at, labels = horizontal.position(px), [f"{x} {number(px)}"]
        for each, known in zip(named, values, strict=True):
            labels += [f"{short(each.name)} {vertical.reading(known[px])}"] if px in known else []
        strips.append(
            f'<g class="strip"><rect x="{start:.1f}" y="{vertical.end:.1f}" width="{max(end - start, 0):.1f}"'
            f' height="{vertical.start - vertical.end:.1f}"/>'
            + rule("cursor", at, at, vertical.end, vertical.start)
            + words(horizontal.start, height - 3, " · ".join(labels), "start")
            + "</g>\n"
        )
    return strips


def _vertical_axis(values: Sequence[Number], height: int) -> Axis:
    """The vertical axis: from zero if the values are near it, and always ending at ticks."""
    low, high = min(values), max(values)
    if max(abs(low), abs(high)) < 1 / LARGEST:
        low, high = 0.0, 1.0
    elif high - low <= 1e-9 * max(abs(low), abs(high)):  # a constant, or its rounding
        low, high = min(low, 0.0), max(high, 0.0)
    if 0 <= low <= high / 2:
        low = 0.0
    elif low / 2 <= high <= 0:
        high = 0.0
    step = _round_step((high - low) / 4)
    low, high = math.floor(low / step + 1e-6) * step, math.ceil(high / step - 1e-6) * step
    return Axis(low, high, height - BOTTOM, TOP, step)


def _horizontal_axis(values: Sequence[Number], start: Number, end: Number) -> Axis:
    """The horizontal axis from the first to the last value; whole numbers get whole ticks."""
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high), 1.0)
    if high - low <= 1e-9 * largest:  # one value, or its rounding
        low, high = low - max(largest / 1000, 1), high + max(largest / 1000, 1)
    step = _round_step((high - low) / max((end - start) / 60, 1))
    if all(float(value).is_integer() for value in values):
        step = max(math.ceil(step), 1)
    return Axis(low, high, start, end, step)


def _round_step(min_step: Number) -> Number:
    power = 10.0 ** _power(min_step)
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= min_step * (1 - 1e-9))


def _power(value: Number) -> int:
    """The power of ten of the first digit."""
    return math.floor(math.log10(value) + 1e-9)


def is_known(*values: Number) -> bool:
    return all(math.isfinite(value) and abs(value) < LARGEST for value in values)


def _pieces(points: Sequence[Point]) -> Iterator[list[Point]]:
    for known, piece in groupby(points, key=lambda point: is_known(*point)):
        if known:
            yield list(piece)


def _known(series: Series) -> list[tuple[Number, Number]]:
    return [point for point in series.points if is_known(*point)]


def _colour(index: int) -> str:
    return f"s{index % COLOURS + 1}" + (" again" if index // COLOURS % 2 else "")


def short(name: str, max_length: int = NAME) -> str:
    """A name as one short, safe line."""
    shown = visible(name[: max_length + 1]).replace("\n", " ")
    return shown if len(shown) <= max_length else shown[: max_length - 1] + "…"
