"""Memory of a user, in his own data folder: the code that each of his runs used, by the run's path and identity.

`$PROXIMO_DATA_HOME`, else `$XDG_DATA_HOME/proximo`, else `~/.local/share/proximo`. A run folder, which may come from
anyone, has no say in it. Where the folder cannot be used nothing is remembered, and nobody's code is run for that.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from proximo.system.folders import write_file
from proximo.system.opening import inside, make_folder, names, read_json, remove, run_around, without_links

VARIABLE = "PROXIMO_DATA_HOME"
FOLDER = "code"
MAX_RUNS = 5000
"""Runs that are remembered; beyond, those that were run longest ago are forgotten."""
MAX_BYTES = 1 << 20
"""Bytes of what is kept of a run; one that imports so many files is not remembered."""

Uses = Mapping[str, Mapping[str, str]]
"""SHA-256 of the files that a use of code (naming.py) executes, for each use."""


def recall(run: Path, identity: str) -> Uses:
    """Code that the user has run in this folder; empty if nothing is remembered, or cannot be read."""
    try:
        record = read_json(_file(run, identity), MAX_BYTES)
        if (record["run"], record["identity"]) == _key(run, identity) and isinstance(record["code"], dict):
            return {use: files for use, files in record["code"].items() if isinstance(files, dict)}
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return {}


def remember(run: Path, identity: str, code: Uses) -> None:
    """Keep what the user runs in this folder, instead of what was kept. OSError or ValueError if that cannot be."""
    path_of_run, identity = _key(run, identity)
    data = json.dumps({"run": path_of_run, "identity": identity, "code": code}).encode()
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES:,} bytes are to be remembered of one run")
    _make(home())
    path = _file(run, identity)
    _make(path.parent)
    write_file(path, data)
    _forget(path.parent)


def home() -> Path:
    """The user's data folder of Proximo; ValueError if there is none that only he can write."""
    given = os.environ.get(VARIABLE)
    if given is None:
        data = os.environ.get("XDG_DATA_HOME", "")
        given = os.path.join(data if os.path.isabs(data) else os.path.expanduser("~/.local/share"), "proximo")
    if not os.path.isabs(given):
        raise ValueError(f"{given or 'it'} is no absolute path: set {VARIABLE} to a folder of your own")
    folder = without_links(Path(given).parent) / Path(given).name
    if (run := run_around(folder / FOLDER)) is not None:
        raise ValueError(f"{folder} is in the run folder {run}: set {VARIABLE} to a folder of your own")
    return folder


def _file(run: Path, identity: str) -> Path:
    """The file of a run; ValueError if another user could have written it."""
    folder = home() / FOLDER
    for parent in (folder.parent, folder):
        with suppress(FileNotFoundError):
            status = parent.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise ValueError(f"{parent} is no folder that only you can write: remove it, or set {VARIABLE}")
    name = hashlib.sha256("\0".join(_key(run, identity)).encode(errors="surrogateescape")).hexdigest()
    return inside(folder, f"{name}.json")


def _key(run: Path, identity: str) -> tuple[str, str]:
    return os.path.realpath(run), identity


def _make(folder: Path) -> None:
    if not os.path.lexists(folder):
        make_folder(folder, mode=0o700)


def _forget(folder: Path) -> None:
    if len(files := [name for name in names(folder) if name.endswith(".json")]) <= MAX_RUNS:
        return
    oldest = sorted(files, key=lambda name: _age(folder / name))
    for name in oldest[: len(files) - MAX_RUNS]:
        remove(folder / name)


def _age(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:  # another process has removed it
        return 0.0
