"""Bar charts of parts of a whole, and interval charts of measured shares."""

from collections.abc import Sequence

from proximo.insight.charts.drawing import (
    CHARACTER,
    COLOURS,
    TOP,
    WIDTH,
    Number,
    drawing,
    is_known,
    nothing,
    rule,
    short,
    words,
)
from proximo.insight.charts.pages import Html, number

ROW = 22


def bar_chart(title: str, parts: Sequence[tuple[str, Number]], *, unit: str = "", width: int = WIDTH) -> Html:
    """One bar for each part of a whole, with its amount and share."""
    known = [(short(name), max(value, 0.0)) for name, value in parts if is_known(value)]
    total, longest = sum(value for _, value in known), max((value for _, value in known), default=0.0)
    height = TOP + ROW * max(len(known), 2)
    if not longest:
        return drawing(title, unit, width, height, [nothing(width, height)])
    left = CHARACTER * max(len(name) for name, _ in known) + 8
    room = width - left - CHARACTER * 14
    rows = []
    for index, (name, value) in enumerate(known):
        top, length = TOP + ROW * index, value / longest * room
        rows += [
            words(left - 8, top + 12, name, "end"),
            f'<g class="s1"><rect class="bar" x="{left:.1f}" y="{top}" width="{length:.1f}" height="15" rx="2"/></g>',
            words(left + length + 6, top + 12, f"{number(value)} · {_share(value / total)}", "start") + "\n",
        ]
    return drawing(title, unit, width, height, rows)


def interval_chart(
    title: str, rows: Sequence[tuple[str, Number, Number, Number]], *, unit: str = "", width: int = WIDTH
) -> Html:
    """Shares (name, share, low, high) from 0 to 1 on one axis: a dot, and its interval as a line."""
    height, left = TOP + ROW * len(rows) + 20, CHARACTER * max((len(short(name)) for name, *_ in rows), default=0) + 10
    right, bottom = width - CHARACTER * 7, TOP + ROW * len(rows)

    def position(share: Number) -> Number:
        return left + share * (right - left)

    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts += [
            rule("grid", position(tick), position(tick), TOP - 4, bottom),
            words(position(tick), bottom + 14, f"{tick:.0%}"),
        ]
    for index, (name, share, low, high) in enumerate(rows):
        y = TOP + ROW * index + 8
        parts.append(words(left - 10, y + 4, short(name), "end"))
        if is_known(share, low, high):
            line, dot = (
                rule("line", position(low), position(high), y, y),
                f'<circle class="dot" cx="{position(share):.1f}" cy="{y}" r="4"/>',
            )
            parts += [f'<g class="s{index % COLOURS + 1}">{line}{dot}</g>', words(width, y + 4, f"{share:.1%}", "end")]
    return drawing(title, unit, width, height, parts)


def _share(share: Number) -> str:
    return "< 1%" if 0 < share < 0.01 else f"{share:.0%}"
