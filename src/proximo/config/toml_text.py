"""TOML as text: how tables are written, and where each key of a text stands, for messages: the parser does not say."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

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


def nested_beyond(data: Any, depth: int) -> bool:
    """Whether tables lie deeper than this. Counted, because Python's own limit differs between versions."""
    level = [data]
    for _ in range(depth):
        level = [each for value in level for each in _inside(value)]
    return bool(level)


def _inside(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def table_lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """Scalars before tables: TOML has no way back to the outer table."""
    later = {key: item for key, item in table.items() if isinstance(item, dict) or _is_tables(item)}
    for key, item in table.items():
        if key not in later:
            yield f"{_key(key)} = {inline(item)}"
    for key, item in later.items():
        inner = join(path, _key(key))
        for part in [item] if isinstance(item, dict) else item:
            yield from ("", f"[{inner}]" if isinstance(item, dict) else f"[[{inner}]]")
            yield from table_lines(part, inner)


def _is_tables(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(isinstance(part, dict) for part in item)


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's escapes are JSON's, but for one control character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def _key(name: str) -> str:
    return name if re.fullmatch(BARE_KEY, name) else inline(name)


def shortened(data: Any) -> str:
    text = inline(data)
    return text if len(text) <= 60 else text[:57] + "..."
