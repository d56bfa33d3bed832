"""Config fields that nothing reads: every field is changed in a small run, which must become another run."""

import hashlib
import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from proximo.config import toml
from proximo.config.unions import given_fields
from proximo.rl.config import RunConfig
from proximo.rl.progress import ProgressLines
from proximo_lab.faults.cases import Findings
from proximo_lab.faults.field_runs import trials
from proximo_lab.faults.field_table import LISTED, Trial
from proximo_lab.faults.processes import Child

TIMED = ("run.json", "config.toml", "timings.jsonl", "timeline.jsonl", "result.json", "lock", "manifest.json")
"""Files that hold times, or the config itself."""
KIND = "a config field that is changed"


def run(folder: Path, only: tuple[str, ...] | None = None) -> Findings:
    findings, bases = Findings(), dict[str, Left]()
    chosen = [trial for trial in trials(folder) if only is None or name_of(trial) in only]
    for number, trial in enumerate(chosen):

        def changed(trial: Trial = trial, number: int = number) -> str | None:
            key = toml.dumps(trial.base)
            if key not in bases:
                bases[key] = fingerprint(trial.base, folder / f"base-{len(bases)}")
            other = with_value(trial.base, trial.path.strip(".").split("."), trial.value)
            before, after = bases[key], fingerprint(other, folder / f"changed-{number}")
            if before.code and after.code:  # two refusals say nothing
                return f"neither run works: {before.refusal}; {after.refusal}"
            return f"{trial.path} = {trial.value!r} changes nothing" if after.digest == before.digest else None

        findings.attempt(KIND, name_of(trial), "C", changed)
    tried = {name_of(trial) for trial in chosen}
    known = set(all_fields(RunConfig))
    missing = sorted(known - tried - LISTED.keys()) if only is None else []
    for name in missing:
        findings.add(KIND, name, "failed", "it is neither tried nor listed with a reason")
    dead = {case.name for case in findings.cases if case.ended == "failed"}
    alive = {case.name for case in findings.cases if case.ended == "C"} - dead
    findings.figures = {"fields": len(tried), "alive": len(alive), "listed": len(LISTED), "dead": len(dead)}
    findings.gaps += [_unclaimed(reason) for reason in dict.fromkeys(LISTED.values())] if only is None else []
    findings.controls.append(
        "two runs of the same config have the same fingerprint" if _repeats(chosen, folder) else ""
    )
    return findings


def _unclaimed(reason: str) -> str:
    names = [name for name, known in LISTED.items() if known == reason]
    return f"nothing is claimed of {', '.join(names)}: {reason}"


def _repeats(chosen: list[Trial], folder: Path) -> bool:
    """Else every change would seem to matter."""
    first = chosen[0].base
    once, again = fingerprint(first, folder / "same-1"), fingerprint(first, folder / "same-2")
    assert once == again, "runs do not repeat"
    return True


def all_fields(kind: type) -> Iterator[str]:
    """Fields of a dataclass and of every one that its fields may hold."""
    waiting, seen = [kind], set[type]()
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            for field, inner in given_fields(each):
                yield f"{each.__name__}.{field.name}"
                waiting += _dataclasses(inner)


def _dataclasses(kind: Any) -> list[type]:
    itself = [kind] if isinstance(kind, type) and is_dataclass(kind) else []
    return itself + [each for argument in typing.get_args(kind) for each in _dataclasses(argument)]


def name_of(trial: Trial) -> str:
    *path, field = trial.path.strip(".").split(".")
    holder: Any = trial.base
    for name in path:
        holder = holder[int(name)] if name.isdecimal() else getattr(holder, name)
    return f"{type(holder).__name__}.{field}"


def with_value(holder: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(holder, tuple):
        number = int(name)
        return (*holder[:number], with_value(holder[number], rest, value), *holder[number + 1 :])
    inner = with_value(getattr(holder, name), rest, value) if rest else value
    return replace(holder, **{name: inner})


@dataclass(frozen=True)
class Left:
    """Traces that a run left."""

    code: int
    refusal: str
    """Reason why it was refused, if it was."""
    digest: str


def fingerprint(config: RunConfig, folder: Path) -> Left:
    """Fingerprint of all that a run leaves but times; a refusal or a failure is one, too."""
    from proximo.rl.run import Run
    from proximo.rl.train import train

    def work() -> int:
        try:
            train(Run(config, folder, ProgressLines()))
        except ValueError as error:
            print(f"refused: {error}".replace(str(folder), ""), flush=True)
            return 2
        return 0

    ended = Child(work, folder.with_suffix(".txt")).wait()
    if ended.complaint:
        raise AssertionError(ended.complaint)
    refusal = ended.printed.rpartition("refused: ")[2] if ended.code else ""
    digest = hashlib.sha256(f"{ended.code} {refusal}".encode())
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in TIMED):
        data = file.read_bytes()
        if file.name == "run_state.json":
            content = json.loads(data)
            del content["seconds"]
            data = json.dumps(content).encode()
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + hashlib.sha256(data).digest())
    return Left(ended.code, refusal[:100], digest.hexdigest())
