"""Whole runs as the page shows them: the list, rows, settings and findings.

Runs are looked up among those that were found; a name from a request never becomes a path.
"""

import hashlib
import json
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from proximo.algorithms.explain import changes, choice, nearest, stages
from proximo.insight.doctor.checkup import Checkup, check_up
from proximo.insight.doctor.damage import damage
from proximo.insight.folder import RunFolder, decoded, find_runs
from proximo.insight.lens.fork_divergence import parting, parting_in_words
from proximo.losses.pieces.protocols import GateTraits
from proximo.runs.checkpoints import CHECKPOINTS, saved, step_of
from proximo.runs.config_changes import flat
from proximo.runs.files import EVENTS, METRICS, PROFILE, TIMINGS
from proximo.runs.forking import parent_of
from proximo.runs.health import Finding
from proximo.runs.health.history import is_step, number
from proximo.runs.metric_docs import meaning, stage_meaning
from proximo.runs.step_profile import profile_lines
from proximo.supervised.schedule import LOWER, FitOptions
from proximo.system.opening import LinkedFile, open_file, without_links
from proximo.system.safe_text import quoted

FILES = {"metrics": METRICS, "timings": TIMINGS, "events": EVENTS}
PAGE = 4 << 20
"""Maximum bytes of rows per response."""
TAIL = 1 << 16
"""Bytes at a file's end that are searched for its last rows."""
MAX_RUNS, MAX_TEXT = 1000, 200_000


class Runs:
    """The runs below a folder, searched again on request, but not too often."""

    def __init__(self, root: Path, *, load_code: bool = False) -> None:
        self.root, self._load_code = without_links(root), load_code
        self._by_name: dict[str, RunFolder] = {}
        self._again = 0.0
        self._summaries: dict[str, tuple[object, dict[str, Any]]] = {}

    def by_name(self) -> dict[str, RunFolder]:
        """Runs by name, newest first. A folder with thousands of others is searched less often."""
        start = time.monotonic()
        if start >= self._again:
            try:
                runs = find_runs(self.root, load_code=self._load_code)[:MAX_RUNS]
                self._by_name = {self._name(run): run for run in runs}
            except (OSError, ValueError):  # a run was removed meanwhile
                return self._by_name
            end = time.monotonic()
            self._again = end + max(1.0, 20 * (end - start))
        return self._by_name

    def named(self, name: str) -> RunFolder:
        if (run := self._by_name.get(name) or self.by_name().get(name)) is None:
            raise LookupError(f"no run is called {quoted(name)}")
        return run

    def listed(self) -> dict[str, Any]:
        summaries = (self._summary(name, run) for name, run in self.by_name().items())
        return {"root": _text_of(self.root), "runs": [each for each in summaries if each is not None]}

    def _name(self, run: RunFolder) -> str:
        inside = run.path.relative_to(self.root)
        return _text_of(inside) if inside.parts else _text_of(run.name)

    def _fork(self, run: RunFolder) -> dict[str, Any] | None:
        """The run that a fork comes from, by its name here if it is among these, and the step."""
        if (origin := parent_of(run.path, run.record)) is None:
            return None
        parent, step = origin
        inside = parent.is_relative_to(self.root)
        return {"run": _text_of(parent.relative_to(self.root) if inside else parent), "step": step}

    def parting(self, name: str) -> dict[str, Any]:
        """The point where a fork parts from its parent, in numbers and in sentences; `parting` is None where the run is
        no fork, or its parent is not among these runs."""
        run = self.named(name)
        origin = self._fork(run)
        parent = None if origin is None else self.by_name().get(origin["run"])
        if origin is None or parent is None:
            return {"parting": None}
        difference = parting(run, parent)
        return {
            "parting": asdict(difference)
            | {"parent": origin["run"], "words": parting_in_words(difference, run.name, parent.name)}
        }

    def _summary(self, name: str, run: RunFolder) -> dict[str, Any] | None:
        """The run's summary; unchanged files are not read again. None if the run is removed meanwhile; for a file that
        is refused, a link or too large, the reason."""
        state = run.state
        stamp = (state, *map(_stamp, (run.path / METRICS, run.path / "config.toml", run.path / "run.json")))
        known = self._summaries.get(name)
        if known is None or known[0] != stamp:
            try:
                content = {"name": name, "state": state, **summary(run), "fork": self._fork(run)}
                known = self._summaries[name] = (stamp, content)
            except (LinkedFile, ValueError) as error:
                return {"name": name, "state": state, "error": _text_of(str(error))}
            except OSError:
                return None
        return known[1]


def summary(run: RunFolder) -> dict[str, Any]:
    """A run in a line: its progress and its last values."""
    ends = list(_last_rows(run))
    last, settings = _last_of(ends), _settings(run.config_text)
    attempts = [each for each in _list(run.record.get("attempts")) if isinstance(each, dict)]
    after = (run.result or {}).get("after")
    stage, accuracy = _stage(settings), last.get("held_out/accuracy")
    return {
        "algorithm": algorithm(run)["name"],
        "model": settings.get("model"),
        "step": last.get("step"),
        "steps": settings.get("steps"),
        "outcome": last.get("outcome"),
        "is_share": _is_share(ends),
        "held_out": None if stage else after.get("accuracy") if isinstance(after, dict) else accuracy,
        "stage": stage,
        "held_out_loss": last.get("held_out/loss") if stage else None,
        "held_out_pairs": accuracy if stage else None,
        "started": attempts[0].get("started") if attempts else None,
        "seed": settings.get("seed"),
        "arm": _arm(settings),
    }


def _stage(settings: Mapping[str, Any]) -> str | None:
    """The command of a run that trains on a file, told by the fields of its config; None for reinforcement learning,
    and where the config cannot be read."""
    if not any(name.startswith("fit.") for name in settings):
        return None
    if "loss.centring" in settings:
        return "reward-model"
    return "dpo" if any(name.startswith("loss.") for name in settings) else "sft"


def _arm(settings: Mapping[str, Any]) -> str | None:
    """A value that runs share that differ only in their seed; None if the config cannot be read."""
    others = sorted((name, repr(value)) for name, value in settings.items() if name != "seed")
    return hashlib.sha256(repr(others).encode()).hexdigest()[:16] if others else None


def last_values(run: RunFolder) -> dict[str, Any]:
    """The last known value of each metric; `step` is that of the last training row."""
    return _last_of(_last_rows(run))


def _last_rows(run: RunFolder) -> Iterator[dict[str, Any]]:
    path = run.path / METRICS
    lines, _ = read_lines(path, max(_stamp(path)[1] - TAIL, 0))
    # neither charts nor rules take a row without a step
    return (row for row in decoded(lines.splitlines()) if is_step(row.get("step", 0)))


def _last_of(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for row in rows:
        if set(row) - {"step"} and all(key == "step" or key.startswith("held_out/") for key in row):
            row = {key: value for key, value in row.items() if key != "step"}
        values |= {key: value for key, value in row.items() if value is not None}
    return values


def _is_share(rows: Sequence[dict[str, Any]]) -> bool:
    """True if task scores are shares of what is correct: all from 0 to 1, of a task that says what is correct."""
    outcomes = [number(row, "outcome") for row in rows if row.get("outcome") is not None]
    is_scored = any("outcome" in row and row.get("solved_by_all", 0) is not None for row in rows)
    return is_scored and all(0 <= each <= 1 for each in outcomes)


def rows(run: RunFolder, query: Mapping[str, str]) -> bytes:
    """The file's own lines after an offset, preceded by a line that says where they begin and end.

    They are sent unparsed: parsing and writing them would take a second for ten thousand steps. The page skips lines
    that are not rows.
    """
    file = query.get("file", "")
    if file not in FILES:
        raise ValueError(f"file is {quoted(file)}: give one of {', '.join(FILES)}")
    start, path = whole_number(query, "from", 0), run.path / FILES[file]
    size = path.stat().st_size if path.is_file() else 0
    if start > size:  # the run was resumed from an earlier step
        start = 0
    lines, end = read_lines(path, start)
    return json.dumps({"from": start, "next": end, "size": size}).encode() + b"\n" + lines


def read_lines(path: Path, start: int) -> tuple[bytes, int]:
    """Complete lines after `start`, at most a page, and the offset of their end."""
    try:
        with open_file(path) as file:
            file.seek(start)
            data = file.read(PAGE)
    except LinkedFile:
        raise
    except OSError:  # it does not exist yet
        return b"", 0
    whole = data.rfind(b"\n") + 1
    if not whole and len(data) == PAGE:  # no row of ours is that long
        return b"", start + PAGE
    return data[:whole], start + whole


def about(run: RunFolder, query: Mapping[str, str]) -> dict[str, Any]:
    """A run's config, command and versions."""
    record, result = run.record, run.result or {}
    versions = ("version", "source", "python", "torch", "transformers", "processor", "machine")
    settings = _settings(run.config_text)
    stage = _stage(settings)
    says = meaning if stage is None else stage_meaning
    return {
        "state": run.state,
        "config": run.config_text[:MAX_TEXT],
        "settings": {name: choice(value) for name, value in settings.items()},
        "cap": settings.get("sampling.max_tokens"),
        "algorithm": algorithm(run),
        "stage": stage,
        "command": record.get("argv"),
        "versions": {name: record[name] for name in versions if record.get(name)},
        "attempts": record.get("attempts"),
        "before": result.get("before"),
        "after": result.get("after"),
        "seconds": result.get("seconds"),
        "best": None if stage is None else _best(settings, result),
        "rollouts": bool(run.steps()),
        "path": _text_of(run.path),
        "checkpoints": sorted(map(step_of, saved(run.path / CHECKPOINTS))),
        "meanings": {name: words for name in last_values(run) if (words := says(name)) is not None},
    }


def _best(settings: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Held-out metric by which a stage keeps its weights, and the step that it kept, once it is finished."""
    metric, step = settings.get("fit.metric", FitOptions.metric), result.get("best_step")
    return {"metric": metric, "lower": metric in LOWER, "step": step if is_step(step) else None}


def algorithm(run: RunFolder) -> dict[str, Any]:
    """The nearest named algorithm and the differences. No name if it is not a reinforcement-learning run, or if a class
    that it names is not loaded: `why` says so."""
    try:
        chosen = run.config.algorithm
    except (ValueError, OSError):
        why = "; ".join(f"type = {name}, {reason}" for name, reason in run.unavailable.items())
        return {"name": None, "changes": [], "stages": [], "soft": False, "why": _text_of(why)}
    card = nearest(chosen)
    return {
        "name": card.name,
        "changes": changes(card, chosen),
        "stages": [[stage, content] for stage, content, _ in stages(chosen)],
        "soft": GateTraits.read(chosen.gate).fades,
    }


def health(run: RunFolder, query: Mapping[str, str]) -> dict[str, Any]:
    """The verdict, rules and current findings of `proximo doctor`, and the findings that were reported during the run
    and no longer would be; `over` is the last step of a finding that is over."""
    checkup = _checked(
        run.path, tuple(_stamp(run.path / name) for name in (METRICS, EVENTS, PROFILE)), tuple(damage(run))
    )
    findings = [asdict(active.finding) | {"over": None} for active in checkup.standing]
    findings += [asdict(active.finding) | {"over": active.last} for active in checkup.passed]
    rules = [each["rule"] for each in findings]  # an event's rule may be anything
    reported = [row for row in run.rows(EVENTS) if row.get("kind") == "finding" and row.get("rule") not in rules]
    names = ("rule", "severity", "step", "message", "remedy", "show", "over")
    return {
        "findings": findings + [{name: row.get(name) for name in names} for row in reported],
        "verdict": asdict(checkup.verdict),
        "rules": [asdict(each) for each in checkup.rules],
        "unreadable": dict(checkup.unreadable),
        "profile": None if checkup.profile is None else profile_lines(checkup.profile),
    }


@lru_cache(maxsize=64)
def _checked(folder: Path, stamps: tuple[tuple[int, int], ...], damaged: tuple[Finding, ...]) -> Checkup:
    """The check-up, cached while nothing has changed, since thousands of rows take seconds."""
    return check_up(RunFolder(folder))


def whole_number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ValueError(f"{name} is {quoted(text)}: give a whole number")
    return int(text)


def _settings(config: str) -> dict[str, Any]:
    """A config's fields by path; empty if it cannot be read."""
    try:
        return dict(flat(tomllib.loads(config)))
    except (ValueError, RecursionError):
        return {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def _text_of(path: Path | str) -> str:
    """A path as text; file names need not be valid text."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
