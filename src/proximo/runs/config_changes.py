"""Check that a resumed run is still the same run: compares its config field by field, and the files it names."""

import glob
import hashlib
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from proximo.config.aliases import added_later, completed
from proximo.config.plugins import named_file
from proximo.data.locating import hub_data
from proximo.models.shipped import resolve
from proximo.rewards.judges.judge import is_rubric_file
from proximo.system.folders import MANIFEST, file_hash
from proximo.system.opening import blob_of, names, read_text, without_links

FREE = ("checkpoints", "ranks", "workers", "metrics")
FREE_NAMES = ("save_every", "at_once")
"""Tables, and fields of any table, that may change at any time: neither when a run is saved, nor what else is measured
of it, nor where or how many calls of a reward run at once affects its numbers, and another number of processes affects
them as rounding does."""
NAMES_FILES = ("model", "teacher", "path", "held_out", "reference", "reference_logprobs")
"""Fields whose value may be a data file or a model's folder. Code is known by its form, in any field."""
NAMES_FUNCTIONS = ("path",)
"""Fields whose value may be a reward function, file.py:function or package.module:function, which may be corrected."""
DATA_TABLES = ("task", "data")
"""Tables whose files are data; those of other tables are models."""
CHANGED = "has changed since the run began"
MISSING = object()


def differences(old_toml: str, new_toml: str) -> dict[str, str]:
    """Fields that differ and may not change without permission, with the old and the new value."""
    old, new = dict(flat(completed(old_toml))), dict(flat(tomllib.loads(new_toml)))
    changes = {}
    for field in sorted(old.keys() | new.keys()):
        before = old.get(field, added_later(field, MISSING))
        after = new.get(field, MISSING)
        if (before != after or type(before) is not type(after)) and not _is_free(field):
            changes[field] = f"was {_shown(before)}, now {_shown(after)}"
    return changes


def fingerprints(config_toml: str) -> dict[str, str]:
    """SHA-256 of the files that a config names, by field: data, models, and code (not what that imports), which is any
    value like file.py:Name, package.module:Name or file.py. A model that is not in a folder has none."""
    hashes = {}
    for field, value in _texts(config_toml):
        if not value:  # names nothing; as a path it would be the current folder
            continue
        if not _is_function(field, value) and (file := _code_file(value)) is not None:
            hashes[field] = file_hash(without_links(file))
        elif field.endswith(".rubric") and is_rubric_file(value):
            hashes[field] = file_hash(without_links(Path(value).expanduser()))
        elif field.rpartition(".")[2] in NAMES_FILES:
            path = Path(value) if Path(value).is_file() else Path(resolve(value))
            if glob.has_magic(value) and hub_data(value) is None:
                files = sorted(glob.glob(value))
                hashes[field] = hashlib.sha256(
                    "".join(file_hash(without_links(file)) for file in files).encode()
                ).hexdigest()
            elif path.is_file():
                hashes[field] = file_hash(without_links(path))
            elif path.is_dir():
                hashes[field] = folder_hash(without_links(path))
    return hashes


def function_fingerprints(config_toml: str) -> dict[str, str]:
    """SHA-256 of the files that define a config's functions, by field; not of what those import."""
    hashes = {}
    for field, value in _texts(config_toml):
        if _is_function(field, value) and (file := named_file(value)) is not None:
            hashes[field] = file_hash(without_links(file))
    return hashes


def _texts(config_toml: str) -> Iterator[tuple[str, str]]:
    """All strings by their fields."""
    for field, value in flat(tomllib.loads(config_toml)):
        items = {f"{field}[{i}]": item for i, item in enumerate(value)} if isinstance(value, list) else {field: value}
        yield from ((name, item) for name, item in items.items() if isinstance(item, str))


def _is_function(field: str, value: str) -> bool:
    return field.rpartition(".")[2] in NAMES_FUNCTIONS and ":" in value


def _code_file(value: str) -> Path | None:
    return named_file(f"{value}:whole") if value.endswith(".py") else named_file(value)


def folder_hash(folder: Path) -> str:
    """SHA-256 of the files directly in a folder; subfolders do not count, since a checkpoint's state is not its
    model."""
    digest = hashlib.sha256()
    for name in names(folder):
        if name != MANIFEST and (folder / name).is_file():
            digest.update(f"{name} {file_hash(blob_of(folder / name))}\n".encode())
    return digest.hexdigest()


def changed_files(old: Mapping[str, str], new: Mapping[str, str], config_toml: str) -> dict[str, str]:
    """Fields whose files have changed, which are named, or are missing."""
    named = dict(_texts(config_toml))
    changes = {}
    for field in [field for field in old if old[field] != new.get(field)]:
        if named.get(field) == "":  # earlier versions noted a hash of the current folder
            continue
        value = named.get(field, "")
        is_code = not value.endswith(".py") and _code_file(value) is not None
        changes[field] = (
            f"({value.rpartition(':')[0] if is_code else value}) {CHANGED}" if field in new else "its files are missing"
        )
    return changes


def refuse_changes(folder: Path, changes: Mapping[str, str], allowed: Sequence[str] | None, known: str) -> None:
    """Raise ValueError for differences that are not allowed. `known` is a config with all fields. `allowed` is None if
    the command has no flag to allow changes."""
    if allowed is None:
        if changes:
            lines = [f"  {field} {what}" for field, what in changes.items()]
            raise ValueError(
                f"`run={folder}` holds a run with another config. Use its config, or choose another name:\n"
                + "\n".join(lines)
            )
        return
    fields = {*fields_of(known), *changes}
    refuse_no_field(allowed, fields)
    refused = not_allowed(changes, allowed)
    if not refused:
        return
    data = [field for field, what in refused.items() if _is_data(field) and what.endswith(CHANGED)]
    lines = [f"  {field} {what}  (`allow_change={[field]}`)" for field, what in refused.items() if field not in data]
    if not data:
        more = _more_steps(folder, refused)
        raise ValueError(
            f"`run={folder}` holds a run with another config. Go on with its own by proximo resume {folder}{more}, "
            "choose another name, or allow each change:\n" + "\n".join(lines)
        )
    # Defaults follow the number of rows, so that other fields may differ with the data.
    names = " and ".join(f"{refused[field].removesuffix(CHANGED).strip(' ()')} ({field})" for field in data)
    allow = " ".join(f"`allow_change={[field]}`" for field in data)
    raise ValueError(
        f"`run={folder}` began with other data: {names} {CHANGED}. Restore the data, choose another name, or resume "
        f"with the new rows: {allow}" + (", and allow what else differs:\n" + "\n".join(lines) if lines else "")
    )


def refuse_no_field(allowed: Sequence[str], fields: Collection[str]) -> None:
    """Raise ValueError for a name that stands for none of these fields."""
    for name in allowed:
        if not covered([name], fields):
            raise ValueError(f"`allow_change={[name]}`: the config has no such field")


def covered(names: Sequence[str], fields: Collection[str]) -> list[str]:
    """The names that stand for one of these fields, or for a table that contains one."""
    return [name for name in names if any(_covers([name], field) for field in fields)]


def fields_of(config_toml: str) -> list[str]:
    """Dotted names of a config's fields."""
    return [field for field, _ in flat(tomllib.loads(config_toml))]


def allowed_in(folder: Path, config_toml: str, allowed: Sequence[str]) -> list[str]:
    """The allowed names that are fields of this run, by its config or by the one that its folder has: those of a
    comparison may be one contender's alone."""
    fields = fields_of(config_toml)
    with suppress(OSError, ValueError):  # what is damaged there is told of when the run is opened
        fields += fields_of(read_text(folder / "config.toml"))
    return covered(allowed, fields)


def not_allowed(changes: Mapping[str, str], allowed: Sequence[str]) -> dict[str, str]:
    """The changes of fields that are not allowed to change."""
    return {field: what for field, what in changes.items() if not _covers(allowed, field)}


def _more_steps(folder: Path, refused: Mapping[str, str]) -> str:
    """Command that trains a run on, where its steps differ: fields that follow from them keep its own values."""
    steps = refused.get("steps", refused.get("fit.steps", "")).rpartition("now ")[2]
    return f", or for more steps by proximo resume {folder} --steps {steps}" * steps.isdecimal()


def refuse_other(folder: Path, taken_for: str, config_toml: str) -> None:
    """Raise ValueError if a folder was opened for a different config than that of the run to be trained in it."""
    ours, theirs = (dict(flat(tomllib.loads(each))) for each in (taken_for, config_toml))
    others = [field for field in sorted(ours.keys() | theirs.keys()) if ours.get(field) != theirs.get(field)]
    if others:
        raise ValueError(
            f"{folder} was opened for a run with another {', '.join(others[:4])}: open it with the config of the "
            "run to be trained"
        )


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All fields with their dotted names; items of an array are numbered."""
    match value:
        case dict():
            for key, item in value.items():
                yield from flat(item, f"{path}.{key}" if path else key)
        case [dict(), *_]:
            for number, item in enumerate(value):
                yield from flat(item, f"{path}[{number}]")
        case _:
            yield path, value


def _is_data(field: str) -> bool:
    return _covers(DATA_TABLES, field) and field.rpartition(".")[2] in NAMES_FILES


def _is_free(field: str) -> bool:
    return _covers(FREE, field) or field.rpartition(".")[2] in FREE_NAMES


def _covers(names: Sequence[str], field: str) -> bool:
    """True if one of the names is this field or a table that contains it."""
    return any(field == name or field.startswith((f"{name}.", f"{name}[")) for name in names)


def _shown(value: object) -> str:
    return "not given" if value is MISSING else repr(value)
