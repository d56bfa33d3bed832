"""Names in a config that execute code or reach out of the run: known by their form and key, in any table, so that a
piece that is added later is covered too."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SHIPPED = ("NumberGuessing", "WordGuessing", "calculate", "run_python")
WORLDS = "proximo.environments.examples"
"""Module of the environments and tools that ship with the package, by name: they execute nothing of a stranger's."""
LOADS = ("path", "tools", "app", "modules", "taskset")
"""Keys whose value is loaded, whatever its form, if there is a colon in it."""
REACHES = ("python", "address", "url", "urls", "key_variable")
"""Keys of programs that are started, of clusters and servers that are connected to, and of variables that are sent."""
TEXTS = ("system", "instruction", "template", "rubric", "model")
"""Keys of texts and of models, which may have any form and are never loaded as code."""


@dataclass(frozen=True)
class Named:
    """A value that names code."""

    field: str
    """Dotted name, as in task.type."""
    value: str
    digest: str
    """SHA-256 of the innermost table that the name stands in: the same code with other arguments is another use."""

    @property
    def use(self) -> str:
        """Key under which it is remembered."""
        return f"{self.value} {self.digest}"


def named_code(tables: Mapping[str, Any]) -> list[Named]:
    """Values in a config's tables that name code, in order.

    Example: [each.value for each in named_code({"task": {"type": "mine.py:Task"}})] == ["mine.py:Task"]
    """
    return list(_named(tables, ""))


def _named(table: Mapping[str, Any], path: str) -> Iterator[Named]:
    for key, value in table.items():
        yield from _named_in(key, value, table, f"{path}.{key}" if path else key)


def _named_in(key: str, value: Any, table: Mapping[str, Any], path: str) -> Iterator[Named]:
    match value:
        case dict():
            yield from _named(value, path)
        case list():
            for number, item in enumerate(value):
                yield from _named_in(key, item, table, f"{path}[{number}]")
        case str() if _names_code(key, value, path):
            yield Named(
                path, value, hashlib.sha256(json.dumps(table, sort_keys=True, default=str).encode()).hexdigest()
            )


def _names_code(key: str, value: str, path: str) -> bool:
    source, _, name = value.rpartition(":")
    if key == "type":
        return ":" in value
    if key in TEXTS or value in ("", "auto", "none") or (source == WORLDS and name in SHIPPED):
        return False
    if key in REACHES or (key == "arguments" and path.endswith("]")):  # a list: those of a server that is started
        return True
    if key == "cache":  # of verdicts, in a folder outside of the run
        return True
    return (key in LOADS and _is_path_of_code(source, name)) or _has_form(source, name)


def _is_path_of_code(source: str, name: str) -> bool:
    """Tell code from the hub's owner/name:part, and from a file of data."""
    return name.isidentifier() and bool(source) and "/" not in source


def _has_form(source: str, name: str) -> bool:
    is_source = source.endswith(".py") or all(part.isidentifier() for part in source.split("."))
    return is_source and name.isidentifier()
