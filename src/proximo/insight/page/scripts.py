"""The page's modules as one classic script: browsers refuse modules that are opened from disk."""

import posixpath
import re
from collections.abc import Mapping

IMPORT = re.compile(r'^import (?:(?P<default>\w+)|\{(?P<names>[^}]*)\}) from "(?P<path>[^"]+)";$', re.MULTILINE)
DECLARED = re.compile(r"^export (?=(?:async )?(?:function\*?|class|const|let) (\w+))", re.MULTILINE)
COMMENT = re.compile(r"^/\*.*?\*/", re.MULTILINE | re.DOTALL)
LISTED = re.compile(r"^export \{([^}]*)\};$", re.MULTILINE)


def one_script(modules: Mapping[str, str], entry: str) -> str:
    """A script that does what the module `entry` does. `modules` are texts by path; each runs once, after those that it
    imports. Exported names may not be assigned anew afterwards, which ours never are."""
    order: list[str] = []
    _visit(entry, modules, order, ())
    parts = [f"modules[{path!r}] = (() => {{\n{_converted(path, modules[path])}}})();\n" for path in order]
    return '(() => {\n"use strict";\nconst modules = {};\n' + "".join(parts) + "})();\n"


def _visit(path: str, modules: Mapping[str, str], order: list[str], above: tuple[str, ...]) -> None:
    assert path not in above, f"modules import each other: {' -> '.join((*above, path))}"
    if path not in order:
        for match in IMPORT.finditer(modules[path]):
            _visit(_resolved(path, match["path"]), modules, order, (*above, path))
        order.append(path)


def _resolved(path: str, relative: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), relative))


def _converted(path: str, text: str) -> str:
    exported = DECLARED.findall(COMMENT.sub("", text))
    for names in LISTED.findall(text):
        for each in names.split(","):
            name, _, other = each.strip().partition(" as ")
            exported.append(f"{other}: {name}" if other else name)
    text = LISTED.sub("", DECLARED.sub("", text))
    text = IMPORT.sub(lambda match: _import(path, match), text)
    assert not re.search(r"^(import|export) ", text, re.MULTILINE), f"{path} imports or exports in another way"
    return f"{text}\nreturn {{ {', '.join(exported)} }};\n"


def _import(path: str, match: re.Match[str]) -> str:
    source = f"modules[{_resolved(path, match['path'])!r}]"
    if match["default"]:
        return f"const {match['default']} = {source}.default;"
    return f"const {{ {match['names'].strip().replace(' as ', ': ')} }} = {source};"
