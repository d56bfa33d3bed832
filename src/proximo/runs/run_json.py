"""run.json: what it says about earlier attempts at a run, and whether the run can be resumed."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proximo.runs.checkpoints import STATE
from proximo.runs.config_changes import flat
from proximo.runs.files import LOGS, METRICS, NUMBERS, stored_steps
from proximo.runs.log import is_altered
from proximo.runs.state import read_origin
from proximo.system.folders import MANIFEST, read_manifest
from proximo.system.lines import JsonLines
from proximo.system.machine import Machine
from proximo.system.opening import LinkedFile, UnsafeFile, read_json, read_text
from proximo.system.safe_text import quoted, visible
from proximo.system.sealing import HASH, SEALED, is_as_sealed
from proximo.system.version import __version__, source_fingerprint

FORMAT = 2
"""Format of run folders. Format 1, which run.json did not record, counted steps from 0 and evaluations from −1."""
COMPARED = ("python", "torch", "transformers", "processor")
"""Facts about a process that may change the last digits of its numbers."""
MAX_STEPS = 1_000_000
"""Limit of the steps in a row; no run has as many."""
CODE = ("version", "source")
"""Facts that identify Proximo's code."""


def read_record(folder: Path) -> dict[str, Any] | None:
    """The run.json of a run that can be resumed; None if the folder has no run."""
    record = _readable_record(folder)
    if record is not None and (damage := record_damage(record)) is not None:
        raise ValueError(f"`run={folder}`: {damage}")
    return record


def _readable_record(folder: Path) -> dict[str, Any] | None:
    try:
        record = read_json(folder / "run.json")
        tomllib.loads(read_text(folder / "config.toml"))
        known = isinstance(record, dict) and isinstance(record["identity"], str)
        hashes = known and (record["fingerprints"], record.get("functions", {}))
        if hashes and isinstance(record["attempts"], list) and _are_tables(*hashes, *record["attempts"]):
            Machine.from_dict(record["machine"])
            return record
    except FileNotFoundError:
        if not any((folder / name).exists() for name in ("run.json", METRICS)):
            return None
    except UnsafeFile:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        pass
    raise ValueError(
        f"`run={folder}`: there is a run in this folder already, and it cannot be resumed (its run.json or "
        "config.toml is missing, damaged or from an earlier version); choose another name or remove it"
    )


def refuse_format(folder: Path, record: Mapping[str, Any]) -> None:
    """Raise ValueError if the folder has a different format."""
    if (stored := record.get("format", 1)) != FORMAT:
        raise ValueError(
            f"`run={folder}`: the run in this folder has the format {quoted(stored)}, with other step numbers; this "
            f"version reads {FORMAT}: choose another name, remove it, or resume it with the version that wrote it"
        )


def _are_tables(*values: object) -> bool:
    return all(isinstance(each, dict) for each in values)


def record_damage(record: Mapping[str, Any]) -> str | None:
    """Message if run.json is not as the run wrote it, as after a flipped bit; otherwise None. Earlier versions did not
    seal it."""
    if is_as_sealed(record):
        return None
    return (
        f"run.json is not as the run wrote it: restore it, or remove its {SEALED} and {HASH} to have it taken as it is"
    )


def config_damage(folder: Path, record: Mapping[str, Any]) -> str | None:
    """Message if config.toml is not the one that run.json has, as when it was cut or edited; otherwise None. Earlier
    versions kept no copy."""
    recorded = record.get("config")
    if not isinstance(recorded, str):
        return None
    try:
        ours = dict(flat(tomllib.loads(recorded)))
    except (ValueError, RecursionError):
        return "run.json has no readable copy of config.toml: restore run.json"
    try:
        theirs = dict(flat(tomllib.loads(read_text(folder / "config.toml"))))
    except FileNotFoundError:
        return "config.toml is missing: restore it (run.json has a copy, as config)"
    except LinkedFile:
        raise
    except (OSError, ValueError, RecursionError):
        return "config.toml cannot be read: restore it (run.json has a copy, as config)"
    others = [name for name in sorted(ours.keys() | theirs.keys()) if repr(ours.get(name)) != repr(theirs.get(name))]
    if not others:
        return None
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    named = ", ".join(visible(name, 60) for name in others[:3])
    return (
        f"config.toml is not the one that the run recorded ({named}{more}): restore it (run.json has a copy, as config)"
    )


def known_logs(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each log when a checkpoint was saved; earlier versions did not store them."""
    logs = read_manifest(checkpoint).get("logs", {})
    try:
        return {name: (int(logs[name]["size"]), str(logs[name]["sha256"])) for name in LOGS if name in logs}
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{checkpoint / MANIFEST} is not as it was written") from None


def lost_rows(folder: Path, resume_from: Path) -> list[str]:
    """Messages about metrics and ledger, if one of them is shorter than when a checkpoint was saved, or altered."""
    _, sizes = read_origin(resume_from / STATE)
    lost = [_shorter(folder / name, size, resume_from) for name, size in sizes.items()]
    return list(dict.fromkeys([*filter(None, lost), *altered_logs(folder, resume_from, NUMBERS)]))


def _shorter(log: Path, size: int, checkpoint: Path) -> str | None:
    """Message if a log has fewer bytes than it had."""
    if (length := JsonLines(log).size) >= size:
        return None
    return f"{log.name} has {length} bytes and had {size} when {checkpoint.name} was saved: rows are lost"


def altered_logs(folder: Path, checkpoint: Path, logs: Sequence[str] = LOGS) -> list[str]:
    """Messages about logs whose bytes are others than when a checkpoint was saved, or fewer."""
    altered = list[str]()
    for name, known in known_logs(checkpoint).items():
        if name in logs and (lost := _shorter(folder / name, known[0], checkpoint)):
            altered.append(lost)
        elif name in logs and is_altered(folder / name, known):
            altered.append(f"{name} has other bytes than when {checkpoint.name} was saved: rows are altered")
    return altered


def missing_rollouts(folder: Path, checkpoint: Path) -> str | None:
    """Message if steps that had a file among the rollouts when a checkpoint was saved have none any more."""
    known = read_manifest(checkpoint).get("rollouts")
    there, missing, end = set(stored_steps(folder)), list[int](), -1
    for each in known if isinstance(known, list) else ():
        match each:
            case [int() as first, int() as last] if end < first <= last < first + MAX_STEPS > len(missing):
                missing += [step for step in range(first, last + 1) if step not in there]
                end = last
            case _:
                raise ValueError(f"{checkpoint / MANIFEST} is not as it was written")
    if not missing:
        return None
    return (
        f"the rollouts of {len(missing)} step{'s' * (len(missing) > 1)} are missing, first those of step {missing[0]}"
    )


def other_code(attempts: Sequence[Mapping[str, Any]]) -> str | None:
    """Message if the last attempt ran with different code of Proximo; otherwise None."""
    before = attempts[-1] if attempts else {}
    now = source_fingerprint()
    if not before or before.get("source") == now:
        return None
    return (
        f"Proximo's code has changed since the last attempt: version {before.get('version')}, source "
        f"{before.get('source')} then; version {__version__}, source {now} now: numbers may differ from here on"
    )
