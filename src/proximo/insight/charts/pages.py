"""Self-contained pages: one file with its style inside, which opens from disk, runs no scripts and fetches nothing.

Text from models and files enters a page only through `text`, which escapes it; `Html` marks what is safe.
"""

import html
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from proximo.system.safe_text import visible

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
MISSING = "–"
STYLES = ("style.css", "drawing.css", "reports.css")


class Html(str):
    """A piece of HTML; any other string is unescaped text."""

    __slots__ = ()


def text(value: object) -> Html:
    """The value as HTML, with control and direction characters escaped; `Html` is unchanged."""
    return value if isinstance(value, Html) else Html(html.escape(visible(str(value))))


def number(value: object) -> str:
    """A measured number in readable form; a dash if missing.

    Example: number(1234567) == "1,234,567"; number(0.012345) == "0.0123"
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return MISSING
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:.3g}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table with right-aligned numbers; everything that is not `Html` is escaped."""
    rows = [list(row) for row in rows]
    numeric = [all(_is_number(row[column]) for row in rows) and bool(rows) for column in range(len(header))]
    head = "".join(_cell("th", name, right) for name, right in zip(header, numeric, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell("td", value, right) for value, right in zip(row, numeric, strict=True)) + "</tr>\n"
        for row in rows
    )
    return Html(f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n')


def section(title: str, *content: str) -> Html:
    """A section of a page; `content` is HTML already."""
    return Html(f'<section id="{anchor(title)}">\n<h2>{text(title)}</h2>\n{"".join(content)}</section>\n')


def anchor(title: str) -> str:
    """The anchor of a section, for links within the page.

    Example: anchor("How to repeat it") == "how-to-repeat-it"
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def page(title: str, sections: Sequence[str]) -> str:
    """A whole document; `sections` are HTML already."""
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style()}</style>\n</head>\n"
        f'<body>\n<main class="page">\n{"".join(sections)}</main>\n</body>\n</html>\n'
    )


@cache
def style() -> str:
    """The style sheet of all pages: colours, text and tables; charts; reports."""
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in STYLES)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(tag: str, value: object, right: bool) -> str:
    shown = number(value) if _is_number(value) else value
    return f'<{tag} class="number">{text(shown)}</{tag}>' if right else f"<{tag}>{text(shown)}</{tag}>"
