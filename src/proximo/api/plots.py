"""A chart for a notebook: SVG that brings its own style and leaves the page around it alone."""

import re
from dataclasses import dataclass
from pathlib import Path

from proximo.insight.charts.pages import style
from proximo.system.folders import write_file
from proximo.system.opening import without_links

LIGHT = re.compile(r"^:root \{(.*?)^\}", re.MULTILINE | re.DOTALL)
DARK = re.compile(r"^@media \(prefers-color-scheme: dark\) \{\s*:root \{(.*?)^  \}", re.MULTILINE | re.DOTALL)
OWN_RULES = re.compile(r"^(\.chart[^{]*)\{(.*?)^\}", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Plot:
    """A chart of a run. A notebook draws it; `save` writes it to a file.

    Example: proximo.open_run("runs/mine").plot("outcome").save("outcome.svg")
    """

    title: str
    svg: str
    """The drawing, with its style inside."""

    def save(self, path: str | Path) -> Path:
        """Write the drawing as an .svg file."""
        write_file(without_links(path), self.svg.encode())
        return Path(path)

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return f'<div style="max-width: 640px">{self.svg}</div>'

    def __repr__(self) -> str:
        return f"<plot of {self.title}; a notebook draws it, .save('plot.svg') writes it>"


def plot_of(title: str, chart: str) -> Plot:
    """A chart of the reports, which a page's style would colour, with that style inside."""
    opening, rest = chart.split(">", 1)
    named = opening.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    return Plot(title, f"{named}><style>{_own_style()}</style>{rest}")


def _own_style() -> str:
    """The rules of charts, with the colours that they name; nothing that would reach outside of a chart."""
    whole = style()
    light, dark = LIGHT.search(whole), DARK.search(whole)
    assert light is not None, "style.css has colours for light"
    assert dark is not None, "style.css has colours for dark"
    rules = "".join(f"{match[1].strip()}{{{match[2].strip()}}}" for match in OWN_RULES.finditer(whole))
    colours = f".chart{{{_variables(light[1])}}}"
    darker = f"@media (prefers-color-scheme: dark){{.chart{{{_variables(dark[1])}}}}}"
    return re.sub(r"\s+", " ", f"{colours}{darker}{rules}")


def _variables(body: str) -> str:
    return "".join(re.findall(r"--[\w-]+:[^;]*;", body))
