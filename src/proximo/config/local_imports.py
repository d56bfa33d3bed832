"""Lets a user's file import the modules next to it, as with `python file.py`, without changing sys.path.

The `import` statement of such a file looks in the file's own folder before it looks where Python does. What it finds
there is loaded under a private name, so that two folders may each have a `helpers.py`.
"""

import builtins
import hashlib
import sys
import types
from collections.abc import Sequence
from importlib.machinery import FileFinder, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from proximo.config.aliases import current_module

PREFIX = "proximo_siblings_"
OURS = __name__.partition(".")[0]


def builtins_for(folder: Path) -> dict[str, Any]:
    """Python's builtins, for a module of this folder: its `import` finds the modules next to it first.

    A module of the standard library, and one that Python itself would take from this folder, is imported as usual.
    """
    root = PREFIX + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:24]

    def imported(
        name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
    ) -> types.ModuleType:
        name = name if level else current_module(name)
        first = name.partition(".")[0]
        if level or not _is_sibling(folder, first):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        if root not in sys.modules:
            package = types.ModuleType(root)
            package.__path__ = [str(folder)]
            sys.modules[root] = package
        found = builtins.__import__(f"{root}.{name}", globals, locals, fromlist or ())
        return found if fromlist else sys.modules[f"{root}.{first}"]

    return vars(builtins) | {"__import__": imported}


def _is_sibling(folder: Path, name: str) -> bool:
    files = [file for file in (folder / name / "__init__.py", folder / f"{name}.py") if file.is_file()]
    if not files or name in sys.stdlib_module_names or name == OURS:
        return False
    usual = PathFinder.find_spec(name)
    return usual is None or usual.origin is None or Path(usual.origin).resolve() != files[0].resolve()


class _Loader(SourceFileLoader):
    """Siblings find each other, too; no cached bytecode is read or written."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: types.ModuleType) -> None:
        root = sys.modules[module.__name__.partition(".")[0]]
        vars(module)["__builtins__"] = builtins_for(Path(root.__path__[0]))
        super().exec_module(module)


class _Siblings:
    """Finds modules under their private names, and no others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        found = (FileFinder(folder, (_Loader, [".py"])).find_spec(fullname) for folder in path or ())
        return next((spec for spec in found if spec is not None), None)


sys.meta_path.insert(0, _Siblings())
