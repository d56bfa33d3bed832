"""Where each key of a TOML text stands, for messages: the parser does not say."""

import re

BARE_KEY = r"[A-Za-z0-9_-]+"
_KEY = rf"(?:{BARE_KEY}|\"[^\"]*\"|'[^']*')"
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"


def line_numbers(text: str) -> dict[str, int]:
    """Where each key and table stands. Keys inside inline tables have none; the nearest table around them does."""
    lines: dict[str, int] = {}
    tables: dict[str, int] = {}
    header = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if found := re.match(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]", line):
            *outer, last = _names(found[2])
            header = ""
            for name in outer:
                header = join(header, name)
                header += f"[{tables[header]}]" if header in tables else ""
            header = join(header, last)
            if found[1] == "[[":
                tables[header] = tables.get(header, -1) + 1
                header += f"[{tables[header]}]"
            lines.setdefault(header, number)
        elif found := re.match(rf"\s*({_DOTTED})\s*=", line):
            lines.setdefault(join(header, ".".join(_names(found[1]))), number)
    return lines


def _names(dotted: str) -> list[str]:
    return [name.strip("\"'") for name in re.findall(_KEY, dotted)]


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
