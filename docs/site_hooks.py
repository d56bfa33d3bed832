"""What mkdocs does not do by itself for `make docs`: pages from outside docs/, formulas, and links to source files."""

import html
import posixpath
import re
from pathlib import Path

from api_reference import page as api_page
from command_reference import FOLDER as COMMANDS_FOLDER
from command_reference import pages as command_pages
from latex2mathml.converter import convert
from mkdocs.structure.files import File

from proximo.cli import COMMANDS

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "AGENTS.md": "agents.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository's root that are pages of the site."""
FENCED = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?!https?:|#)(?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)")
FORMULA = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(?P<language>\w+)(?: (?:src|file)=(?P<file>\S+)| \w+)?$", re.MULTILINE)
WAITING = re.compile(r"<p>@@([0-9a-f]+)@@</p>")


def on_config(config):
    """The navigation's last part gets the page of each command."""
    reference = next(part["Reference"] for part in config.nav if "Reference" in part)
    reference.append({"Commands": [{f"proximo {each}": f"{COMMANDS_FOLDER}/{each}.md"} for each in COMMANDS]})
    return config


def on_files(files, config):
    """Adds the pages that are not in docs/, and the source files that pages link to."""
    texts = {f"docs/{each.src_uri}": each.content_string for each in files.documentation_pages()}
    for source, page in OUTSIDE.items():
        texts[source] = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=_in_site(texts[source], source)))
    files.append(File.generated(config, "reference/python.md", content=api_page()))
    for place, content in command_pages().items():
        files.append(File.generated(config, place, content=content))
    for linked in sorted({each for source, text in texts.items() for each in _links(source, text) if _shown(each)}):
        content = html.escape((ROOT / linked).read_text())
        text = f'<!doctype html><meta charset="utf-8"><title>{linked}</title><pre>{content}</pre>'
        files.append(File.generated(config, f"source/{linked}.html", content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links out of docs/ lead to the source's page; formulas wait for the page's HTML; nothing finds the diary."""
    if page.file.src_uri == "log.md":
        page.meta["search"] = {"exclude": True}
    if page.file.generated_by is None:
        markdown = _in_site(markdown, f"docs/{page.file.src_uri}")
    waiting = _outside_code(markdown, lambda text: FORMULA.sub(lambda found: f"@@{found[1].encode().hex()}@@", text))
    return FENCE.sub(_titled, waiting)


def on_page_content(html, page, config, files):
    """Formulas become MathML, which browsers draw without a script."""
    return WAITING.sub(lambda found: convert(" ".join(bytes.fromhex(found[1]).decode().split()), display="block"), html)


def on_post_page(output, page, config):
    """The theme loads one script from elsewhere, for search in pages on a disk: it gets ours."""
    return _own_worker(output, page.url)


def on_post_template(output, template_name, config):
    """The same for pages that the theme makes, such as that of a missing page."""
    return _own_worker(output, template_name)


def _own_worker(output: str, address: str) -> str:
    ours = posixpath.relpath("assets/file_worker.js", posixpath.dirname(address) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", ours)


def _titled(found) -> str:
    """The first line of a code block, with the file that it is (part of) as its title."""
    language = {"jsonl": "json"}.get(found["language"], found["language"])
    return f'```{language} title="{found["file"]}"' if found["file"] else f"```{language}"


def _outside_code(text, change):
    return "".join(part if part.startswith("```") else change(part) for part in FENCED.split(text))


def _links(source: str, text: str) -> list[str]:
    """Paths from the repository's root that a page links to."""
    parts = [part for part in FENCED.split(text) if not part.startswith("```")]
    folder = posixpath.dirname(source)
    return [
        posixpath.normpath(posixpath.join(folder, each["target"])) for part in parts for each in LINK.finditer(part)
    ]


def _shown(path: str) -> bool:
    """Whether a linked path is a file that the site has as a page of source text."""
    return not path.startswith("docs/") and path not in OUTSIDE and (ROOT / path).is_file()


def _in_site(text: str, source: str) -> str:
    """The text with its links as they are in the site; folders, which have no page there, keep their text alone."""
    here = posixpath.dirname(OUTSIDE.get(source, source.removeprefix("docs/")))

    def moved(found):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["target"]))
        if path.startswith("docs/") and source not in OUTSIDE:
            return found[0]
        if (ROOT / path).is_dir():
            return found["text"].strip("[]")
        target = OUTSIDE.get(path) or (
            path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.html"
        )
        return f"{found['text']}({posixpath.relpath(target, here or '.')}{found['anchor'] or ''})"

    return _outside_code(text, lambda part: LINK.sub(moved, part))
