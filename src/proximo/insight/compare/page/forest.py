"""A forest plot: differences with their intervals around zero."""

from proximo.insight.charts.drawing import CHARACTER, COLOURS, TOP, Axis, drawing, rule, short, words
from proximo.insight.charts.pages import Html
from proximo.insight.compare.page.report_parts import Intervals

WIDTH, ROW = 400, 22
STEPS = [factor * 10.0**power for power in range(-6, 7) for factor in (1, 2, 5)]


def forest(block: Intervals) -> Html:
    """The plot, in the colours of the curves, of which the first belongs to the baseline."""
    height, bottom = TOP + ROW * len(block.rows) + 22, TOP + ROW * len(block.rows)
    left = CHARACTER * max((len(short(name)) for name, *_ in block.rows), default=0) + 10
    low = min([0.0, *(low for _, _, low, _, _ in block.rows)])
    high = max([0.0, *(high for *_, high, _ in block.rows)])
    if high == low:
        low, high = -1.0, 1.0
    step = next(each for each in STEPS if (high - low) / each <= 6)
    axis = Axis(low, high, left, WIDTH - CHARACTER * 8, step)
    parts = [
        rule("axis" if abs(tick) < step / 2 else "grid", axis.position(tick), axis.position(tick), TOP - 4, bottom)
        + words(axis.position(tick), bottom + 14, axis.label(tick))
        for tick in axis.ticks()
    ]
    for index, (name, difference, lower, upper, label) in enumerate(block.rows):
        y = TOP + ROW * index + 9
        line = rule("line", axis.position(lower), axis.position(upper), y, y)
        dot = f'<circle class="dot" cx="{axis.position(difference):.1f}" cy="{y}" r="4"/>'
        parts.append(words(left - 10, y + 4, short(name), "end"))
        parts.append(f'<g class="s{(index + 1) % COLOURS + 1}">{line}{dot}</g>\n')
        parts.append(words(WIDTH, y + 4, label, "end"))
    return drawing(block.title, block.unit, WIDTH, height, parts)
