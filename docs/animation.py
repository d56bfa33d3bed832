"""Draws README's animation from a run of the demo, into docs/images/demo.svg: `make animation`.

One frame for each of some steps: what the model wrote in that step's first groups, and the share that was right up to
then. It is one SVG with its own style: no script, light and dark, and the last frame alone where motion is unwanted.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import proximo
from proximo.api.run import OpenedRun

PICTURE = Path(__file__).resolve().parent / "images" / "demo.svg"
COMMAND = "train --steps 60"
STEPS = (1, 5, 10, 15, 20, 30, 40, 60)
"""Steps that are shown; the last stays twice as long."""
SECONDS = 1.1
GROUPS = 7
WIDTH, HEIGHT = 860, 320
LEFT, TOP, ROW, CHIP = 24, 66, 34, 46
"""Where the groups begin, and how far apart rows and completions are."""
AXIS = (560, 74, 270, 186)
"""The curve's left, top, width and height."""
STYLE = """
text { font: 14px ui-sans-serif, system-ui, sans-serif; fill: var(--ink) }
.code { font: 14px ui-monospace, Consolas, monospace } .small { font-size: 12px }
.muted { fill: var(--muted) } .middle { text-anchor: middle } .end { text-anchor: end }
.large { font-size: 30px; font-weight: 600 }
.right rect { fill: var(--right) } .right text { fill: var(--on-right) } .wrong rect { fill: var(--wrong) }
.wrong text { fill: var(--muted) }
.axis { stroke: var(--line) } .curve { fill: none; stroke: var(--curve); stroke-width: 2.5; stroke-linejoin: round }
.dot { fill: var(--curve) } .ground { fill: var(--ground); stroke: var(--line) }
svg { --ground: #ffffff; --ink: #1b2430; --muted: #5d6878; --line: #d5dbe3; --right: #1f7a4d; --on-right: #ffffff;
  --wrong: #eceff3; --curve: #2457c5 }
@media (prefers-color-scheme: dark) { svg { --ground: #11161d; --ink: #e6ebf2; --muted: #9aa7b8; --line: #313b48;
  --right: #3fae77; --on-right: #08130d; --wrong: #232c37; --curve: #7ea6ff } }
.frame { visibility: hidden } .frame:last-of-type { visibility: visible }
@media (prefers-reduced-motion: no-preference) { .frame:last-of-type { visibility: hidden } FRAMES }
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a finished run of `proximo train` with 60 steps (made anew without it)")
    given = parser.parse_args().run
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given) if given else Path(temporary) / "demo"
        if not given:
            subprocess.run([sys.executable, "-m", "proximo.cli", *COMMAND.split(), "--run", str(folder)], check=True)
        PICTURE.write_text(picture(proximo.open_run(folder)))
    print(PICTURE)


def picture(run: OpenedRun) -> str:
    metrics = run.metrics()
    shares = dict(zip(metrics["step"].to_pylist(), metrics["outcome"].to_pylist(), strict=True))
    frames = [_frame(step, run.rollouts(step).to_pylist(), shares) for step in STEPS]
    style = STYLE.replace("FRAMES", _timing(len(frames)))
    first, last = shares[STEPS[0]], shares[STEPS[-1]]
    label = f"The demo learns two-digit sums: {first:.0%} right at step {STEPS[0]}, {last:.0%} at step {STEPS[-1]}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return "\n".join([head, f"<title>{label}</title>", f"<style>{style}</style>", _still(), *frames, "</svg>\n"])


def _timing(count: int) -> str:
    """One cycle for all frames; each is seen in its part of it, the last in two."""
    parts, rules = count + 1, []
    for place in range(count):
        begin, end = 100 * place / parts, 100 * (place + 1 if place < count - 1 else parts) / parts
        before = "0% { visibility: hidden } " if place else ""
        after = f"{end:.3f}% {{ visibility: hidden }} " if end < 100 else ""
        rules.append(f"@keyframes f{place} {{ {before}{begin:.3f}% {{ visibility: visible }} {after}}}")
        rules.append(f"#f{place} {{ animation: f{place} {parts * SECONDS:.1f}s step-end infinite }}")
    return "\n".join(rules)


def _still() -> str:
    """What no frame changes."""
    left, top, width, height = AXIS
    lines = "".join(
        f'<line class="axis" x1="{left}" x2="{left + width}" y1="{y}" y2="{y}"/>'
        f'<text class="small muted end" x="{left - 8}" y="{y + 4}">{share}%</text>'
        for share in (0, 50, 100)
        for y in [top + height * (1 - share / 100)]
    )
    ground = f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>'
    titles = (
        f'<text class="code" x="{LEFT}" y="32">$ proximo train</text>'
        f'<text class="small muted end" x="{LEFT + 84 + 8 * CHIP}" y="32">'
        "eight samples of each problem; green is right</text>"
        f'<text class="small muted" x="{left}" y="{top + height + 42}">GRPO, 0.8 M parameters, one CPU core</text>'
    )
    return ground + titles + lines


def _frame(step: int, rollouts: list[dict], shares: dict[int, float]) -> str:
    rows = []
    for place in range(GROUPS):
        siblings = [each for each in rollouts if each["group"] == place]
        y = TOP + ROW * place
        rows.append(f'<text class="code end" x="{LEFT + 72}" y="{y + 16}">{escape(siblings[0]["prompt"])}</text>')
        rows += [_chip(each, LEFT + 86 + CHIP * number, y) for number, each in enumerate(siblings[:8])]
    number = STEPS.index(step)
    return f'<g class="frame" id="f{number}">{"".join(rows)}{_curve(step, shares)}</g>'


def _chip(rollout: dict, x: float, y: float) -> str:
    kind = "right" if rollout["outcome"] > 0 else "wrong"
    text = f'<text class="code middle" x="{x + (CHIP - 6) / 2}" y="{y + 16}">{escape(rollout["text"])}</text>'
    return f'<g class="{kind}"><rect x="{x}" y="{y}" width="{CHIP - 6}" height="23" rx="4"/>{text}</g>'


def _curve(step: int, shares: dict[int, float]) -> str:
    left, top, width, height = AXIS

    def point(at: int) -> tuple[float, float]:
        return left + width * (at - 1) / (STEPS[-1] - 1), top + height * (1 - shares[at])

    points: Sequence[tuple[float, float]] = [point(at) for at in range(1, step + 1)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    x, y = points[-1]
    return (
        f'<text class="large" x="{left}" y="48">{shares[step]:.0%}</text>'
        f'<text class="muted" x="{left + 76}" y="48">right at step {step}</text>'
        f'<polyline class="curve" points="{line}"/><circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        f'<text class="small muted middle" x="{min(x, left + width - 16):.1f}" y="{top + height + 20}">'
        f"step {step}</text>"
    )


if __name__ == "__main__":
    main()
