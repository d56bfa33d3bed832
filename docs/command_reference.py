"""Pages of the commands, made from what each prints as its help, for `make docs`: none is stored."""

import os
import re
from collections.abc import Iterator, Mapping

from proximo.cli import COMMANDS, USAGE
from proximo.cli.help_pages import help_of

FOLDER = "reference/commands"
WIDTH = "100"
"""Columns for which help is drawn: what a code block of the site has room for."""
RULE = re.compile(r"^ -{20,}$")
HEAD = re.compile(r"^(?! )(?!usage:)\S.*:$")
"""A line that names what follows, such as `examples:`."""


def pages() -> dict[str, str]:
    """The overview and a page for each command, by their places in the site."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDTH
    try:
        made = {f"{FOLDER}/{command}.md": page(command, help_of(command)) for command in COMMANDS}
    finally:
        os.environ.pop("COLUMNS")
        os.environ.update({} if before is None else {"COLUMNS": before})
    return {"reference/command-line.md": overview(), **made}


def overview() -> str:
    """The page of all commands: what each does, and what `proximo --help` prints."""
    rows = "".join(f"| [`proximo {name}`](commands/{name}.md) | {what} |\n" for name, what in summaries().items())
    table = f"| command | |\n|---|---|\n{rows}"
    return f"# Command line\n\n{table}\n## What `proximo --help` prints\n\n```text\n{USAGE}```\n"


def summaries() -> Mapping[str, str]:
    """What each command does, in the words of `proximo --help`: the text in the second column below its forms, or
    beside the last of them."""
    told: dict[str, str] = {}
    asked: list[str] = []
    for line in USAGE.splitlines():
        if named := re.match(r"  proximo ([a-z-]+)", line):
            asked.append(named[1])
        text = re.match(r"(?: {23}|  proximo [a-z ]+ {2,})(\w.*)", line)
        if text is not None:
            told = {**dict.fromkeys(asked, text[1].rstrip(",;")), **told}
            asked.clear()
    return {command: told[command] for command in COMMANDS}


def page(command: str, printed: str) -> str:
    """The page of one command: its help, with a heading for each of its parts."""
    usage, _, rest = printed.partition("\n\n")
    parts = [f"# proximo {command}\n", f"```text\n{usage.rstrip()}\n```\n"]
    for heading, body in sections(rest):
        text = "\n".join(body).strip("\n")
        parts += [f"## {heading}\n"] * bool(heading) + [_drawn(heading, text)] * bool(text.strip())
    return "\n".join(parts)


def sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """The parts of a help text, each with its heading; what stands before the first has none."""
    heading, body = "", list[str]()
    for line in (each.rstrip() for each in text.splitlines()):
        if RULE.match(line):  # below the heading of a table of flags
            *body, last = body
            yield heading, body
            heading, body = last.strip(), []
        elif HEAD.match(line):
            yield heading, body
            heading, body = line[:-1], []
        else:
            body.append(line)
    yield heading, body


def _drawn(heading: str, text: str) -> str:
    """Sentences as they are, and lists of flags as blocks; below a heading all is a list."""
    parts = [text] if heading else text.split("\n\n")
    return "\n".join(f"{part}\n" if not heading and _is_prose(part) else f"```text\n{part}\n```\n" for part in parts)


def _is_prose(text: str) -> bool:
    return text[:1].isalpha() and "   " not in text
