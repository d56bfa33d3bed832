"""Asks, of a config that lies in a run folder, whether the code that it names may be loaded.

A run folder may come from anyone, and anything in it may have been altered. Code that it names is loaded if the user
named it on this command line, by --load-code or by its own name, or if he has run the same code with the same run
before (remembered.py). Code that lies in a run folder is never loaded.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from proximo.config import plugins
from proximo.config.trust.files import executed_files
from proximo.config.trust.naming import Named, named_code
from proximo.config.trust.remembered import Uses, recall, remember
from proximo.system.opening import read_json, run_around

RECORD = "run.json"
SHOWN = 120


class CodePermission(Protocol):
    """Permission that a reader of a config asks for the code that it names."""

    def admit(self, tables: Mapping[str, Any]) -> None:
        """ValueError, in one line, if code that the tables name may not be loaded."""
        ...

    def load_class(self, name: str) -> type:
        """The class of a name like "file.py:Name"; ValueError where it may not be loaded."""
        ...


class Anything:
    """Permission for configs that the user wrote, or named on the command line: their code is his."""

    def admit(self, tables: Mapping[str, Any]) -> None:
        pass

    def load_class(self, name: str) -> type:
        return plugins.load_class(name)


ANYTHING = Anything()


# What the user says on this command line


@dataclass(frozen=True)
class _CommandLine:
    everything: bool = False
    names: frozenset[str] = frozenset()


_command_line = _CommandLine()


@contextmanager
def command_line(everything: bool, arguments: Sequence[str] = ()) -> Iterator[None]:
    """Keep, until the end of a command, whether it has --load-code, and its arguments, which may name code."""
    global _command_line
    before = _command_line
    values = {value for argument in arguments for value in (argument, argument.partition("=")[2])}
    _command_line = _CommandLine(everything, frozenset(name for name in values if ".py" in name or ":" in name))
    try:
        yield
    finally:
        _command_line = before


def is_everything_permitted() -> bool:
    """Tell whether this command line has --load-code."""
    return _command_line.everything


# What a run names


class OfRun:
    """The code of a run, for commands that go on with it, or compute as it did.

    Example: toml.load("runs/a/config.toml", RunConfig, OfRun(Path("runs/a")))
    """

    def __init__(self, run: Path, everything: bool = False, keep: bool = True) -> None:
        """Permit all that the run names, with `everything`, and with `keep` remember it."""
        self.run, self._everything = run, everything or is_everything_permitted()
        self._keep = keep and self._everything
        self._known: Uses | None = None
        """Files that were admitted, by name."""
        self._admitted: dict[str, Mapping[str, str]] = {}

    def admit(self, tables: Mapping[str, Any]) -> None:
        code = {named.use: self._admit(named) for named in named_code(tables)}
        if code and self._keep and (identity := _identity(self.run)):
            try:
                remember(self.run, identity, {**self.known, **code})
            except (OSError, ValueError):  # then it is asked again
                return

    def load_class(self, name: str) -> type:
        return plugins.load_class(name, self._check)

    @property
    def known(self) -> Uses:
        """Code that the user has run with this run."""
        if self._known is None:
            identity = _identity(self.run)
            self._known = recall(self.run, identity) if identity else {}
        return self._known

    def _admit(self, named: Named) -> Mapping[str, str]:
        try:
            files = executed_files(named.value)
        except (OSError, ValueError) as error:
            raise ValueError(f"{_shown(named)}, which is not loaded: {error}") from None
        _refuse_inside(named, files)
        source = named.value.rpartition(":")[0]
        if not files and source.endswith(".py"):
            raise ValueError(f"{_shown(named)}, but {source} is not there: a path counts from the current folder")
        before = self.known.get(named.use)
        if not self._everything and not _is_named(named.value) and files != before:
            raise ValueError(self._refusal(named, before))
        self._admitted[named.value] = files
        return files

    def _refusal(self, named: Named, before: Mapping[str, str] | None) -> str:
        remedy = "if you trust it, give `load_code=True`"
        if before is not None:
            return (
                f"{_shown(named)}, whose code is not what you ran with this run (it, or what it imports, has changed): "
                f"put it back as it was, or {remedy}"
            )
        return (
            f"{_shown(named)}, which is not loaded, because a run folder may come from anyone and you have not run "
            f"this with {self.run} before (a copied or moved run counts as another): {remedy}"
        )

    def _check(self, files: Sequence[Path], content: bytes) -> None:
        """Refuse what was not admitted, also if the file was exchanged since then."""
        for file in files:
            if (run := run_around(file)) is not None:
                raise ValueError(f"not loaded, because it lies in a run folder, {run}, whose code is never executed")
        if files and hashlib.sha256(content).hexdigest() not in {
            digest for admitted in self._admitted.values() for digest in admitted.values()
        }:
            raise ValueError("not loaded, because it is not the code that was asked for: run the command again")


def of_file(path: str | Path) -> CodePermission:
    """Permission for a config in a file that the user named: anything, unless it lies in a run folder."""
    run = run_around(Path(path))
    return ANYTHING if run is None else OfRun(run)


def remember_run(run: Path, identity: str, tables: Mapping[str, Any]) -> str | None:
    """Remember the code of a run that the user starts; a message if that cannot be done."""
    code = {}
    try:
        for named in named_code(tables):
            code[named.use] = executed_files(named.value)
        if code:
            remember(run, identity, code)
    except (OSError, ValueError) as error:
        return f"the code of this run is not remembered, so that a resume needs `load_code=True`: {error}"
    return None


def _refuse_inside(named: Named, files: Mapping[str, str]) -> None:
    source = named.value.rpartition(":")[0]
    first = [os.path.abspath(os.path.expanduser(source))] if source.endswith(".py") else []
    for file in (*first, *files):
        if (run := run_around(Path(file))) is not None:
            raise ValueError(
                f"{_shown(named)}, which is not loaded, because {file} lies in a run folder, {run}, whose code is "
                "never executed: copy it to a folder of your own and name it there"
            )


def _shown(named: Named) -> str:
    return f"{named.field} is {ascii(named.value)[:SHOWN]}"


def _is_named(name: str) -> bool:
    return name in _command_line.names or (
        (source := name.rpartition(":")[0]).endswith(".py") and source in _command_line.names
    )


def _identity(run: Path) -> str:
    """The identity in run.json; empty if there is none."""
    try:
        record = read_json(run / RECORD)
        return record["identity"] if isinstance(record["identity"], str) else ""
    except (OSError, ValueError, LookupError, TypeError):
        return ""
