"""Damage to the files of a run folder, as findings like those of the rules over metrics.

Results are cached until a file changes, so that the page may call this often.
"""

import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from proximo.insight.folder import RunFolder
from proximo.insight.lens.files import complaint
from proximo.runs.checkpoints import CHECKPOINTS, STATE, saved, step_of
from proximo.runs.files import (
    CONFIG,
    EVIDENCE,
    LOCK,
    LOGS,
    METRICS,
    NUMBERS,
    POINTS,
    PROFILE,
    REPORT,
    RESULT,
    TRACEBACK,
    VERDICTS,
)
from proximo.runs.health import Finding
from proximo.runs.health.history import in_order
from proximo.runs.run_json import FORMAT, altered_logs, config_damage, lost_rows, missing_rollouts, record_damage
from proximo.runs.state import read_origin
from proximo.runs.step_profile import read_profile
from proximo.supervised.kept_checkpoints import is_start
from proximo.system.folders import complaints, read_manifest
from proximo.system.lines import to_row, whole_lines
from proximo.system.opening import LinkedFile, UnsafeFile, open_file, read_text, refuse_foreign
from proximo.system.safe_text import quoted

Stamp = tuple[int, int]


def damage(run: RunFolder) -> list[Finding]:
    """Check all files; reads every checkpoint and all rollouts completely, which takes a while for large models."""
    return [
        *_format(run),
        *_checkpoints(run),
        *_settings(run),
        *_profile(run),
        *_foreign(run),
        *_rows(run),
        *_lost_rows(run),
        *_rollouts(run),
        *_ending(run),
        *_start(run),
    ]


def _format(run: RunFolder) -> Iterator[Finding]:
    """A folder of another version is not damaged, but its numbers mean something else."""
    if run.format == 1:
        message = "written by an earlier version of Proximo (format 1), whose steps are numbered one lower"
    elif run.format != FORMAT:
        message = f"written by another version of Proximo: its format is {quoted(run.format)}, not {FORMAT}"
    else:
        return
    remedy = "resume it with the version that wrote it; this one reads its files and refuses to write to them"
    yield Finding("other-version", "warning", 0, message, remedy, "")


def _checkpoints(run: RunFolder) -> Iterator[Finding]:
    checkpoints = saved(run.path / CHECKPOINTS)
    damaged = {path: wrong for path in checkpoints if (wrong := _complaints(path, _stamps(path))) and path.is_dir()}
    whole = next((path for path in checkpoints if path not in damaged), None)
    for path, wrong in damaged.items():
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        yield Finding(
            rule="damaged-checkpoint",
            severity="warning" if whole else "failing",
            step=step_of(path),
            message=f"{CHECKPOINTS}/{path.name} differs from what was written ({wrong[0]}{more})",
            remedy=f"use {CHECKPOINTS}/{whole.name}, the newest intact one"
            if whole
            else "train again: no checkpoint is intact",
            show="",
        )
    last = (run.result or {}).get("checkpoint")
    if isinstance(last, str) and last not in {path.name for path in checkpoints}:
        remedy = "restore it, or run the run's command again, which writes it again"
        message = f"{CHECKPOINTS}/{last}, the run's last checkpoint, is missing"
        yield Finding("missing-checkpoint", "warning", 0, message, remedy, "")


def _settings(run: RunFolder) -> Iterator[Finding]:
    for name in ("run.json", RESULT):
        if (run.path / name).exists() and run.decoded(name) is None:
            yield _damaged_file(
                f"{name} cannot be read", "restore it; until then its contents are missing from all reports"
            )
    if (altered := record_damage(run.record)) is not None:
        message, _, remedy = altered.partition(": ")
        yield _damaged_file(message, remedy)
    try:
        tomllib.loads(read_text(run.path / CONFIG))
    except FileNotFoundError:
        pass
    except LinkedFile:
        raise
    except (OSError, ValueError, RecursionError):
        yield _damaged_file("config.toml cannot be read", "restore the settings that the run was started with")
        return
    if (changed := config_damage(run.path, run.record)) is not None:
        message, _, remedy = changed.partition(": ")
        yield _damaged_file(message, remedy)


def _profile(run: RunFolder) -> Iterator[Finding]:
    try:
        read_profile(run.path)
    except LinkedFile:
        raise
    except (OSError, ValueError):
        yield _damaged_file(f"{PROFILE} cannot be read", "remove it: train with --profile writes a new one")


def _foreign(run: RunFolder) -> Iterator[Finding]:
    """Links, pipes and devices among what a run writes and this does not read."""
    for name in (LOCK, REPORT, TRACEBACK, EVIDENCE, POINTS, VERDICTS):
        try:
            refuse_foreign(run.path / name)
        except UnsafeFile as error:
            yield _damaged_file(str(error), "remove it: the run is not resumed before")


def unreadable(run: RunFolder) -> dict[str, tuple[int, int] | str]:
    """Number of unreadable rows and of all rows by file, or the reason why the file cannot be read."""
    unread: dict[str, tuple[int, int] | str] = {}
    for name in LOGS:
        is_ordered = name == METRICS and run.format == FORMAT
        try:
            unread[name] = _lost(run.path / name, _stamp(run.path / name), is_ordered)
        except LinkedFile:
            raise
        except FileNotFoundError:  # it does not exist yet
            continue
        except OSError as error:
            unread[name] = error.strerror or "it is not a file"
    return unread


def _rows(run: RunFolder) -> Iterator[Finding]:
    for name, lost in unreadable(run).items():
        if isinstance(lost, str):
            yield _damaged_file(f"{name} cannot be read: {lost}", "restore the file that the run wrote")
        elif lost[0]:
            message = f"{lost[0]} of the {lost[1]} rows of {name} cannot be read"
            yield _damaged_file(message, "restore the file; until then those rows are missing from all reports")


def _lost_rows(run: RunFolder) -> Iterator[Finding]:
    """Files that are shorter than the newest intact checkpoint recorded, or altered; such a run is not resumed."""
    stamps = tuple(_stamp(run.path / name) for name in LOGS)
    for folder in (CHECKPOINTS, POINTS):
        for point in saved(run.path / folder):
            inside = _stamps(point)
            if _complaints(point, inside) or not _is_of(point, inside, run.record.get("identity")):
                continue
            for message in _shorter(run.path, stamps, point, inside):
                yield _damaged_file(
                    message, "restore the complete file, or resume without those rows (accept_lost_rows)"
                )
            for message in _altered(run.path, stamps, point, inside):
                yield _damaged_file(message, "restore the file; no numbers of a resumed run depend on it")
            with suppress(OSError, ValueError):  # an older checkpoint was removed meanwhile
                if (missing := missing_rollouts(run.path, point)) is not None:
                    yield _damaged_file(missing, "restore them; training does not need them")
            break


def _rollouts(run: RunFolder) -> Iterator[Finding]:
    files = {number: run.step_file(number) for number in run.steps()}
    wrong = {number: error for number, path in files.items() if (error := _complaint(path, _stamp(path))) is not None}
    if wrong:
        first, error = next(iter(wrong.items()))
        message = f"the rollouts of {len(wrong)} step{'s' * (len(wrong) > 1)} cannot be read: step {first}, {error}"
        yield _damaged_file(message, "restore them, or remove them: training does not need them", first)


def _ending(run: RunFolder) -> Iterator[Finding]:
    """A failed last attempt."""
    attempts = run.record.get("attempts")
    last = attempts[-1] if isinstance(attempts, list) and attempts else None
    how = last.get("ended") if isinstance(last, dict) else None
    if run.state == "stopped" and isinstance(how, str) and how.startswith("failed"):
        remedy = "fix the cause, then run the same command again"
        step = max(run.steps(), default=0)
        yield Finding("failed", "failing", step, f"the run ended early: {how.removeprefix('failed: ')}", remedy, "")


def _start(run: RunFolder) -> Iterator[Finding]:
    """A stage that kept the model that it began with."""
    if is_start(run.result or {}):
        message = "no held-out evaluation was better than that before training: the result is the model it began with"
        remedy = (
            "train again with another fit.learning_rate, three times lower if held-out loss rose and higher if it did "
            "not move, or with more data; a reward model's new score head is untrained, do not reward by it"
        )
        yield Finding("kept-start", "warning", 0, message, remedy, "")


def _damaged_file(message: str, remedy: str, step: int = 0) -> Finding:
    return Finding("damaged-file", "warning", step, message, remedy, "")


@lru_cache(maxsize=1024)
def _complaints(path: Path, stamps: tuple[tuple[str, Stamp], ...]) -> list[str]:
    return complaints(path)


@lru_cache(maxsize=256)
def _lost(path: Path, stamp: Stamp, is_ordered: bool) -> tuple[int, int]:
    """The number of bad lines (not rows, or with `is_ordered` rows with an impossible step), and of all lines."""
    with open_file(path) as file:
        rows = [to_row(line) for line in whole_lines(file)]
    whole = [row for row in rows if row is not None]
    kept = in_order(whole) if is_ordered else whole
    return len(rows) - len(kept), len(rows)


@lru_cache(maxsize=1024)
def _is_of(point: Path, inside: tuple[tuple[str, Stamp], ...], identity: object) -> bool:
    """True if a checkpoint has the state of this run; a resume skips any other."""
    try:
        return (read_manifest(point).get("run") or read_origin(point / STATE)[0]) == identity
    except (OSError, ValueError):  # the final checkpoint of sft, reward-model or dpo had none in earlier versions
        return False


@lru_cache(maxsize=1024)
def _shorter(
    folder: Path, stamps: tuple[Stamp, ...], point: Path, inside: tuple[tuple[str, Stamp], ...]
) -> tuple[str, ...]:
    try:
        return tuple(lost_rows(folder, point) if (point / STATE).exists() else altered_logs(folder, point, NUMBERS))
    except (OSError, ValueError):  # an older checkpoint was removed meanwhile
        return ()


@lru_cache(maxsize=1024)
def _altered(
    folder: Path, stamps: tuple[Stamp, ...], point: Path, inside: tuple[tuple[str, Stamp], ...]
) -> tuple[str, ...]:
    """The logs that no number depends on."""
    try:
        return tuple(altered_logs(folder, point, [name for name in LOGS if name not in NUMBERS]))
    except (OSError, ValueError):
        return ()


@lru_cache(maxsize=100_000)
def _complaint(path: Path, stamp: Stamp) -> str | None:
    return complaint(path)


def _stamps(folder: Path) -> tuple[tuple[str, Stamp], ...]:
    try:
        return tuple(sorted((str(path.relative_to(folder)), _stamp(path)) for path in folder.rglob("*")))
    except OSError:  # an older checkpoint was removed while it was listed
        return ()


def _stamp(path: Path) -> Stamp:
    """A value that changes when a file does."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)
