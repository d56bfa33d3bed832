"""run.json: what it says about earlier attempts at a run, and whether the run can be resumed."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proximo.machine import Machine
from proximo.storage.lines import Lines
from proximo.training.runfolder.checkpoints import STATE
from proximo.training.runfolder.files import METRICS
from proximo.training.runfolder.state import read_origin
from proximo.version import __version__, source_fingerprint

FORMAT = 2
"""Format of run folders. Format 1, which run.json did not record, counted steps from 0 and evaluations from −1."""
COMPARED = ("python", "torch", "transformers", "processor")
"""Facts about a process that may change the last digits of its numbers."""
CODE = ("version", "source")
"""Facts that identify Proximo's code."""


def read_record(folder: Path) -> dict[str, Any] | None:
    """The run.json of a run that can be resumed; None if the folder has no run."""
    try:
        record = json.loads((folder / "run.json").read_text())
        tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        known = isinstance(record, dict) and isinstance(record["identity"], str)
        hashes = known and (record["fingerprints"], record.get("functions", {}))
        if hashes and isinstance(record["attempts"], list) and all(isinstance(each, dict) for each in hashes):
            Machine.from_dict(record["machine"])
            return record
    except FileNotFoundError:
        if not any((folder / name).exists() for name in ("run.json", METRICS)):
            return None
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(
        f"`run={folder}`: there is a run in this folder already, and it cannot be resumed (its run.json or "
        "config.toml is missing, damaged or from an earlier version); choose another name or remove it"
    )


def refuse_format(folder: Path, record: Mapping[str, Any]) -> None:
    """Raise ValueError if the folder has a different format."""
    if (found := record.get("format", 1)) != FORMAT:
        raise ValueError(
            f"`run={folder}`: the run in this folder has the format {found}, with other step numbers; this version "
            f"reads {FORMAT}: choose another name, remove it, or resume it with the version that wrote it"
        )


def lost_rows(folder: Path, resume_from: Path) -> list[str]:
    """Messages about files of the log that are shorter than when a checkpoint was saved."""
    _, sizes = read_origin(resume_from / STATE)
    return [
        f"{name} has {found} bytes and had {size} when {resume_from.name} was saved: rows are lost"
        for name, size in sizes.items()
        if (found := Lines(folder / name).size) < size
    ]


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
