"""Line charts as small SVG files: no dependency, and they read well on any page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, LEGEND = 760, 320, 56, 36, 28, 190
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999", "#7b3f00")
"""Told apart with any colour vision (Okabe and Ito), and two more."""
DASHES = ("", ' stroke-dasharray="7 3"', ' stroke-dasharray="2 3"')
"""Solid as long as there are colours; then the same colours dashed, then dotted."""


def line_chart(path: Path, title: str, lines: Mapping[str, Sequence[float]], *, x: str = "step") -> None:
    """One line for each name, over the same steps."""
    known = [value for values in lines.values() for value in values if value == value]
    low, high = min([0.0, *known]), max([1e-9, *known])
    length = max(len(values) for values in lines.values())

    def point_at(step: int, value: float) -> str:
        across = LEFT + step / max(length - 1, 1) * (WIDTH - LEFT - LEGEND)
        up = HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP)
        return f"{across:.1f},{up:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="bold">{title}</text>',
        f'<text x="{(LEFT + WIDTH - LEGEND) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{x}</text>',
    ]
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        across, up = point_at(0, value).split(",")
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - LEGEND}" y1="{up}" y2="{up}" stroke="#dddddd"/>')
        parts.append(f'<text x="{float(across) - 6}" y="{float(up) + 4}" text-anchor="end">{value:.3g}</text>')
    for step in range(0, length, max(1, length // 6)):
        across, _ = point_at(step, low).split(",")
        parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle">{step}</text>')
    for number, (name, values) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        points = " ".join(point_at(step, value) for step, value in enumerate(values) if value == value)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
        height = TOP + 16 * number + 8
        parts.append(
            f'<line x1="{WIDTH - LEGEND + 8}" x2="{WIDTH - LEGEND + 26}" y1="{height}" y2="{height}" '
            f'stroke="{colour}" stroke-width="2.5"{dash}/>'
            f'<text x="{WIDTH - LEGEND + 31}" y="{height + 4}">{name}</text>'
        )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")
