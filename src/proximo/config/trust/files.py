"""The files that loading code by its name executes: the file itself, and what it imports from beside it."""

import ast
import hashlib
import os
import site
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.machinery import all_suffixes
from pathlib import Path

from proximo.config.plugins import MAX_BYTES, source_files
from proximo.system.opening import read_file, without_links

MAX_FILES = 2000
MAX_NAME = 200
OURS = __name__.partition(".")[0]
Names = Callable[[Path], frozenset[str]]


def executed_files(name: str) -> dict[str, str]:
    """SHA-256 of each file that loading "file.py:Name" or "package.module:Name" may execute, by its path with links
    followed; empty if there is none. OSError or ValueError if one cannot be read, or there are too many.

    What is imported from the same folder is found without executing anything: names in import statements, and any
    string that is the name of a module there. Other folders of sys.path, and installed packages, are the user's own.
    """
    source = name.rpartition(":")[0]
    start = [Path(os.path.abspath(path)) for path in source_files(source)]
    if not start:
        return {}
    is_package = not source.endswith(".py") and start[0].stem == "__init__"
    root = start[0].parents[1 if is_package else 0]
    listed = cache(_names)
    digests: dict[str, str] = {}
    seen, waiting = set(start), start
    while waiting:
        path = waiting.pop()
        if len(digests) == MAX_FILES:
            raise ValueError(f"{name} imports more than {MAX_FILES} files")
        content = read_file(without_links(path), MAX_BYTES)
        digests[os.path.realpath(path)] = hashlib.sha256(content).hexdigest()
        if path.suffix == ".py" and not _is_installed(root):
            modules = partial(_modules, path=path, root=root, listed=listed)
            new = {file for mentioned in _mentioned(content) for file in modules(*mentioned)} - seen
            seen |= new
            waiting += sorted(new)
    return digests


def _mentioned(content: bytes) -> set[tuple[int, str]]:
    """Names of modules that a file may import, each with the number of dots before it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    mentions: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                mentions |= {(0, alias.name) for alias in names}
            case ast.ImportFrom(module, names, level):
                mentions |= {(level or 0, ".".join(filter(None, (module, alias.name.strip("*"))))) for alias in names}
            case ast.Constant(str() as text) if len(text) <= MAX_NAME:
                mentions.add((len(text) - len(text.lstrip(".")), text.lstrip(".")))
    return {(level, name) for level, name in mentions if all(part.isidentifier() for part in name.split("."))}


def _modules(level: int, name: str, *, path: Path, root: Path, listed: Names) -> Iterator[Path]:
    """The files of a module that is imported from a file, those of the packages around it included."""
    parts = name.split(".")
    if level > len(path.parents) or (not level and (parts[0] in sys.stdlib_module_names or parts[0] == OURS)):
        return
    folder = path.parents[level - 1] if level else root
    for part in ("", *parts):
        if part:
            yield from (folder / file for file in listed(folder) if _is_module(file, part))
            folder = folder / part
        if (part or level) and "__init__.py" in listed(folder):
            yield folder / "__init__.py"


def _is_module(file: str, name: str) -> bool:
    return file.startswith(f"{name}.") and file.endswith(_SUFFIXES)


_SUFFIXES = tuple(all_suffixes())
"""Suffixes of Python's own code, and of compiled modules."""


def _names(folder: Path) -> frozenset[str]:
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries)
    except OSError:
        return frozenset()


def _is_installed(folder: Path) -> bool:
    path = os.path.realpath(folder)
    return any(path == installed or path.startswith(f"{installed}{os.sep}") for installed in _installed())


@cache
def _installed() -> tuple[str, ...]:
    """Folders of the standard library, of installed packages, and of this one."""
    paths = sysconfig.get_paths()
    folders = [*(paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages()]
    return tuple({os.path.realpath(path) for path in (*folders, site.getusersitepackages(), Path(__file__).parents[2])})
