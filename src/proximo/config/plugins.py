"""Classes from a user's own files, named "path/to/file.py:Name" or "package.module:Name".

A path counts from the current folder, or from the TOML file's folder where one names it (`counted_from`); `~` is the
home folder. A file is read once: what is checked is what is executed, and no cached bytecode is read or written. Its
module has a private name made of the path as it is written, the resolved path and the content, so that two files of one
name are two modules, and the same file is loaded once.

It may import the modules next to it, as with `python file.py`, without a change to sys.path: its `import` statement
looks in its own folder before it looks where Python does. What it finds there is loaded under a private name, so that
two folders may each have a `helpers.py`.
"""

import builtins
import difflib
import hashlib
import importlib
import os
import site
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import FileFinder, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from threading import RLock
from typing import Any, NoReturn

from proximo.config.aliases import current_module
from proximo.system.opening import open_file, without_links

FORM = "FILE.py:NAME"
"""Form of a name that a field with an open union takes besides those of our own classes, for help and errors."""
MAX_BYTES = 10_000_000
_WRITTEN_PATH = "__proximo_place__"
"""The attribute of a private module that holds its path as the user wrote it."""
SIBLINGS = "proximo_siblings_"
OURS = __name__.partition(".")[0]
_loading = RLock()

Check = Callable[[Sequence[Path], bytes], None]
"""Raises ValueError where code may not be executed; gets all files that would be, the named one last, and what is in
that."""


def is_outside(name: object) -> bool:
    """Tell whether a `type` names a class outside of the package."""
    return isinstance(name, str) and ":" in name


def counted_from(folder: str, name: str) -> str:
    """A name whose path counts from a folder, as one whose path counts from the current folder. What is no relative
    FILE.py:NAME stays as it is.

    Example: counted_from("configs", "mine.py:Gate") == "configs/mine.py:Gate"
    """
    path, _, attribute = name.rpartition(":")
    is_relative = path.endswith(".py") and attribute.isidentifier() and not os.path.isabs(os.path.expanduser(path))
    return (
        f"{os.path.normpath(os.path.join(folder, path))}:{attribute}"
        if folder not in ("", ".") and is_relative
        else name
    )


def all_counted_from(folder: str, value: Any) -> Any:
    """Plain values in which `counted_from` was applied to every string."""
    if isinstance(value, dict):
        return {key: all_counted_from(folder, item) for key, item in value.items()}
    if isinstance(value, list):
        return [all_counted_from(folder, item) for item in value]
    return counted_from(folder, value) if isinstance(value, str) else value


def load_class(name: str, check: Check | None = None) -> type:
    """The class that a name points at; ValueError says in one line what is wrong and what to do."""
    return _load(name, "class", lambda value: isinstance(value, type), check)


def load_function(name: str, check: Check | None = None) -> Callable[..., Any]:
    """The function that a name points at, likewise."""
    return _load(name, "function", lambda value: callable(value) and not isinstance(value, type), check)


def _load(name: str, what: str, fits: Callable[[Any], bool], check: Check | None) -> Any:
    source, wanted = _split(name)
    with _loading:
        module = _file_module(source, check) if source.endswith(".py") else _named_module(source, check)
    value = vars(module).get(wanted)
    if not fits(value):
        fitting = [key for key, value in vars(module).items() if fits(value) and _is_of(value, module)]
        close = difflib.get_close_matches(wanted, fitting, n=1)
        there = f", perhaps {close[0]}" if close else f"; it has {', '.join(fitting)}" if fitting else ""
        raise ValueError(f"{source} has no {what} {wanted}{there}")
    return value


def place_of(thing: Any) -> str | None:
    """Name by which another process finds a class or a function: the one it was loaded by, else its module where that
    can be imported, else its file. None where it stands in no file, or inside another function or class."""
    name, module = getattr(thing, "__name__", ""), sys.modules.get(getattr(thing, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or not file.endswith(".py") or vars(module).get(name) is not thing:
        return None
    if (path := vars(module).get(_WRITTEN_PATH)) is not None:
        return f"{path}:{name}"
    if module.__name__ != "__main__" and _is_importable(module.__name__.partition(".")[0], file):
        return f"{module.__name__}:{name}"
    return f"{Path(file).resolve()}:{name}"


def callable_elsewhere(function: Any) -> str | None:
    """Name by which another process calls a function; None where it has none, or stands in the script that runs, which
    would be executed again."""
    return None if getattr(function, "__module__", None) == "__main__" else place_of(function)


def _is_importable(root: str, file: str) -> bool:
    """Tell whether another process finds a module by its name: one in a package, or a single file where Python always
    looks. A file that stands next to a script is found by that script alone."""
    spec = PathFinder.find_spec(root)
    if spec is None:
        return False
    if spec.submodule_search_locations is not None:
        return True
    always = [*site.getsitepackages(), site.getusersitepackages(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return spec.origin == file and Path(file).resolve().parent in {Path(entry).resolve() for entry in always if entry}


def source_files(source: str) -> list[Path]:
    """The files that loading a file or module would execute, the named one last; none where it cannot be found.
    Nothing is imported: that would execute the packages around a module."""
    if source.endswith(".py"):
        path = Path(os.path.expanduser(source))
        return [path] if os.path.isfile(path) else []
    files, folders, origin = [], None, None
    parts = source.split(".")
    for number in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: number + 1]), folders)
        if spec is None:
            return []
        folders, origin = spec.submodule_search_locations, spec.origin
        files += [] if origin is None else [Path(origin)]
    return files if origin is not None and Path(origin).is_file() else []


def named_file(name: object) -> Path | None:
    """The file that a "module:name" points at, without loading it; None where there is none."""
    source, colon, attribute = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    files = source_files(current_module(source)) if colon and attribute.isidentifier() else []
    return files[-1] if files else None


def _split(name: str) -> tuple[str, str]:
    source, _, class_name = name.rpartition(":")
    source = current_module(source)
    dotted = source.endswith(".py") or all(part.isidentifier() for part in source.split("."))
    if not dotted or not class_name.isidentifier():
        raise ValueError("give path/to/file.py:NAME or package.module:NAME")
    return source, class_name


def _is_of(value: Any, module: types.ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def _file_module(source: str, check: Check | None) -> types.ModuleType:
    path = Path(os.path.expanduser(source)).absolute()
    try:
        with open_file(without_links(path)) as file:
            content = file.read(MAX_BYTES)
    except OSError as error:
        raise ValueError(
            f"{source} cannot be read, {error.strerror or error}; a path counts from the current folder, in a TOML "
            "file from the folder of that file"
        ) from None
    if check is not None:
        check([path], content)
    key = hashlib.sha256(b"\0".join([source.encode(), str(path.resolve()).encode(), content])).hexdigest()
    name = f"proximo_outside_{key[:24]}"
    if name not in sys.modules:
        module = types.ModuleType(name)
        vars(module).update({"__file__": str(path), _WRITTEN_PATH: source, "__builtins__": builtins_for(path.parent)})
        sys.modules[name] = module  # a dataclass looks its own module up while it is made
        try:
            exec(compile(content, str(path), "exec"), vars(module))
        except BaseException as error:
            del sys.modules[name]
            _explain(source, error)
    return sys.modules[name]


def _named_module(source: str, check: Check | None) -> types.ModuleType:
    files = source_files(source)
    if not files and source not in sys.modules:
        raise ValueError(f"there is no module {source}; check its name and PYTHONPATH, or give {FORM}")
    if check is not None:
        check(files, files[-1].read_bytes() if files else b"")
    try:
        return importlib.import_module(source)
    except BaseException as error:
        _explain(source, error)


def _explain(source: str, error: BaseException) -> NoReturn:
    """A user's module may raise anything while it is loaded, and call sys.exit; Ctrl-C stays what it is."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    reason = (str(error).splitlines() or [""])[0]
    raise ValueError(
        f"{source} cannot be loaded, {type(error).__name__}{f': {reason}' if reason else ''}; correct it"
    ) from error


# Modules next to a user's file


def builtins_for(folder: Path) -> dict[str, Any]:
    """Python's builtins, for a module of this folder: its `import` finds the modules next to it first.

    A module of the standard library, and one that Python itself would take from this folder, is imported as usual.
    """
    root = SIBLINGS + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:24]

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
        module = builtins.__import__(f"{root}.{name}", globals, locals, fromlist or ())
        return module if fromlist else sys.modules[f"{root}.{first}"]

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
        if not fullname.startswith(SIBLINGS):
            return None
        specs = (FileFinder(folder, (_Loader, [".py"])).find_spec(fullname) for folder in path or ())
        return next((spec for spec in specs if spec is not None), None)


sys.meta_path.insert(0, _Siblings())
