"""Boxes, arrows, texts and curves of the diagrams, as SVG with its own light and dark style."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

STYLE = """
text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: var(--ink) }
.code { font-family: ui-monospace, Consolas, monospace }
.head { font-weight: 600; font-size: 15px } .small { font-size: 11.5px } .muted { fill: var(--muted) }
.middle { text-anchor: middle } .end { text-anchor: end }
.ground { fill: var(--ground); stroke: var(--line) } .box { stroke: var(--line); fill: var(--frozen) }
.trained { fill: var(--trained); stroke: var(--one) } .record { fill: none; stroke: none }
.arrow { fill: none; stroke: var(--muted); stroke-width: 1.5 } .tip { fill: var(--muted) }
.axis { stroke: var(--line) } .curve { fill: none; stroke-width: 2.25; stroke-linejoin: round }
.c0 { stroke: var(--one) } .c1 { stroke: var(--two); stroke-dasharray: 7 4 } .c2 { stroke: var(--three) }
.c3 { stroke: var(--four); stroke-dasharray: 2 3 }
.t0 { fill: var(--one) } .t1 { fill: var(--two) } .t2 { fill: var(--three) } .t3 { fill: var(--four) }
svg { --ground: #ffffff; --ink: #1b2430; --muted: #5d6878; --line: #c9d1db; --frozen: #f1f4f8; --trained: #e3edff;
  --one: #2457c5; --two: #b4541a; --three: #1f7a4d; --four: #7a3fb0 }
@media (prefers-color-scheme: dark) { svg { --ground: #11161d; --ink: #e6ebf2; --muted: #9aa7b8; --line: #3a4553;
  --frozen: #1b222c; --trained: #1a2a4a; --one: #7ea6ff; --two: #f0955a; --three: #57c48d; --four: #c59bf2 } }
"""

Point = tuple[float, float]


def picture(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    """The whole SVG; `label` says in words what is to be seen."""
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0,0 L8,4 L0,8 Z"/></marker></defs>'
    )
    ground = f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label, {chr(34): "&quot;"})}">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", marker, ground, *parts, "</svg>\n"])


def words(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def box(x: float, y: float, width: float, lines: Sequence[str], kind: str = "", height: float = 44) -> str:
    """A box with one or two lines; the second is small."""
    first = y + height / 2 + (5 if len(lines) == 1 else -3)
    texts = [words(x + width / 2, first, lines[0], "middle")]
    texts += [words(x + width / 2, first + 16, each, "middle small muted") for each in lines[1:]]
    return f'<rect class="box {kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>{"".join(texts)}'


def arrow(*points: Point) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="arrow" points="{path}" marker-end="url(#tip)"/>'


class Panel:
    """A pair of axes and what is drawn in them."""

    def __init__(self, left: float, top: float, width: float, height: float, across: Point, up: Point) -> None:
        self.left, self.top, self.width, self.height = left, top, width, height
        self.across, self.up = across, up

    def place(self, x: float, y: float) -> Point:
        return (
            self.left + self.width * (x - self.across[0]) / (self.across[1] - self.across[0]),
            self.top + self.height * (1 - (y - self.up[0]) / (self.up[1] - self.up[0])),
        )

    def frame(self, title: str, across: Sequence[tuple[float, str]], up: Sequence[tuple[float, str]]) -> list[str]:
        parts = [words(self.left, self.top - 14, title, "head")]
        for value, label in up:
            _, y = self.place(self.across[0], value)
            parts.append(
                f'<line class="axis" x1="{self.left}" x2="{self.left + self.width}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(words(self.left - 7, y + 4, label, "end small muted"))
        for value, label in across:
            x, _ = self.place(value, self.up[0])
            parts.append(words(x, self.top + self.height + 17, label, "middle small muted"))
        return parts

    def curve(self, points: Sequence[Point], number: int) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.place(*point) for point in points))
        return f'<polyline class="curve c{number}" points="{path}"/>'
