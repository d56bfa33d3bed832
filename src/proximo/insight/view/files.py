"""The page's own files."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
STYLE = Path(__file__).parents[1] / "charts" / "style.css"
"""Style sheet that the reports use, too."""
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def page_files() -> dict[str, tuple[bytes, str]]:
    """The files of the page by address: those in the package, and no others."""
    found = {
        f"/static/{path.relative_to(STATIC).as_posix()}": path for path in STATIC.rglob("*") if path.suffix in KINDS
    }
    found[f"/static/{STYLE.name}"] = STYLE
    files = {address: (path.read_bytes(), KINDS[path.suffix]) for address, path in found.items()}
    files["/"] = files.pop("/static/index.html")
    return files
