"""The page's own files."""

import re
from pathlib import Path

from proximo.insight.charts.pages import style
from proximo.insight.page.scripts import one_script

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
SCRIPT, STYLES = "page.js", "page.css"
LINKED = re.compile(r'^<(?:link rel="stylesheet"|script type="module")[^>]* (?:href|src)="(/[^"]+)">.*\n', re.MULTILINE)
"""A line of the page that names one of its style sheets or its first module."""


def page_files() -> dict[str, tuple[bytes, str]]:
    """The files of the page by address: those in the package, joined, and each by itself; and no others."""
    paths = {
        f"/static/{path.relative_to(STATIC).as_posix()}": path for path in STATIC.rglob("*") if path.suffix in KINDS
    }
    files = {address: (path.read_bytes(), KINDS[path.suffix]) for address, path in paths.items()}
    files["/static/style.css"] = (style().encode(), KINDS[".css"])  # which the reports use, too
    page, script, styles = _joined({address: content.decode() for address, (content, _) in files.items()})
    links = f'<link rel="stylesheet" href="/{STYLES}">\n<script defer src="/{SCRIPT}"></script>\n</head>'
    files["/"] = (page.replace("</head>", links).encode(), KINDS[".html"])
    files[f"/{SCRIPT}"], files[f"/{STYLES}"] = (script.encode(), KINDS[".js"]), (styles.encode(), KINDS[".css"])
    return {address: file for address, file in files.items() if address != "/static/index.html"}


def _joined(files: dict[str, str]) -> tuple[str, str, str]:
    """The page without the names of its style sheets and modules, these as one script and one style sheet: two requests
    in place of sixty, which took a third of a second."""
    page = files["/static/index.html"]
    named = LINKED.findall(page)
    [entry] = [address for address in named if address.endswith(".js")]
    modules = {address: text for address, text in files.items() if address.endswith(".js")}
    styles = "\n".join(files[address] for address in named if address.endswith(".css"))
    return LINKED.sub("", page), one_script(modules, entry), styles
