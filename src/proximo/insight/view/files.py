"""The page's own files."""

from pathlib import Path

from proximo.insight.charts.pages import style

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def page_files() -> dict[str, tuple[bytes, str]]:
    """The files of the page by address: those in the package, and no others."""
    found = {
        f"/static/{path.relative_to(STATIC).as_posix()}": path for path in STATIC.rglob("*") if path.suffix in KINDS
    }
    files = {address: (path.read_bytes(), KINDS[path.suffix]) for address, path in found.items()}
    files["/static/style.css"] = (style().encode(), KINDS[".css"])  # which the reports use, too
    files["/"] = files.pop("/static/index.html")
    return files
