"""Checkpoints that are damaged, missing, or of another run: skipped, or refused."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from proximo.algorithms import GRPO
from proximo.models import tiny_model, tiny_tokenizer
from proximo.runs.checkpoints import CHECKPOINTS, saved
from proximo.runs.options import CheckpointOptions
from proximo.system.folders import MANIFEST, complaints, file_hash
from proximo.system.locks import FolderLock
from proximo.tasks import File
from proximo_lab.faults.cases import Findings
from proximo_lab.faults.processes import Ended
from proximo_lab.faults.runs import RunSet, rows_file, small

FILES = (
    "model.safetensors",
    "config.json",
    "state/optimizer.safetensors",
    "state/run_state.json",
    "state/random.safetensors",
)
LAST = 4
"""The steps of the run; checkpoints of all of them stay."""


def run(folder: Path) -> Findings:
    findings = Findings()
    config = small(GRPO, steps=LAST, checkpoints=CheckpointOptions(every=1, keep=10))
    runs = RunSet(folder / "run", config).golden()
    _control(runs, findings)
    for what, (damage, names) in DAMAGES.items():
        for name in names:

            def passed(damage: Callable[[Path], object] = damage, file: str = name, what: str = what) -> str | None:
                copy = runs.interrupted(f"{what}-{file}".replace("/", "-").replace(" ", "-"), LAST - 1)
                newest = saved(copy / CHECKPOINTS)[0]
                damage(newest / file)
                return _passed_over(runs, copy.name, newest.name)

            findings.attempt(f"checkpoint: {what}", name, "R", passed)
    for what, prepare in ODD.items():
        findings.attempt(f"run folder: {what}", what, "R", lambda prepare=prepare, what=what: _odd(runs, what, prepare))
    for what, (refused, expected, code) in REFUSALS.items():
        findings.attempt(f"refused: {what}", what, "S", lambda r=refused, s=expected, c=code: _refused(runs, r, s, c))
    _other_files(folder / "other", findings)
    _foreign(folder, runs, findings)
    return findings


def _control(runs: RunSet, findings: Findings) -> None:
    """Show that whole checkpoints are used, so that being passed over says something."""
    copy = runs.interrupted("control", LAST - 1)
    ended = runs.finish(copy.name)
    attempts = json.loads((copy / "run.json").read_text())["attempts"]
    used = attempts[-1]["from"]
    assert ended.code == 0, ended.printed
    assert used == f"step-{LAST - 1:06d}", used
    findings.controls.append("an undamaged checkpoint is resumed from, and each damage is seen by its hash")


def _passed_over(runs: RunSet, name: str, damaged: str) -> str | None:
    folder = runs.folder / name
    if not complaints(folder / CHECKPOINTS / damaged):
        return "the damage left no trace"
    ended = runs.finish(name)
    if ended.complaint or ended.code:
        return ended.complaint or f"exit {ended.code}: {ended.printed[-300:]}"
    if f"{damaged} is damaged" not in ended.printed:
        return f"no word of it: {ended.printed[-300:]}"
    return runs.difference(name)


def _flip(file: Path, after: bytes = b"") -> None:
    data = bytearray(file.read_bytes())
    data[data.index(after) + len(after) if after else len(data) // 2] ^= 1
    file.write_bytes(data)


def _link(file: Path) -> None:
    away = file.parent.parent / f"away-{file.name}"
    file.rename(away)
    file.symlink_to(away)


DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "cut short": (lambda file: os.truncate(file, file.stat().st_size // 2), FILES),
    "one bit flipped": (_flip, FILES),
    "zero length": (lambda file: os.truncate(file, 0), FILES),
    "missing": (Path.unlink, (*FILES, MANIFEST)),
    "a file too many": (lambda file: file.write_text("x"), ("extra.txt", "state/extra.safetensors")),
    "a broken manifest": (lambda file: file.write_text('{"files": ['), (MANIFEST,)),
    "an odd manifest": (lambda file: file.write_text('{"files": 3}'), (MANIFEST,)),
}


# A run folder that is not as it was left


def _odd(runs: RunSet, what: str, prepare: Callable[[Path], object]) -> str | None:
    copy = runs.interrupted(what.replace(" ", "-").replace(",", ""), LAST - 1)
    prepare(copy)
    ended = runs.finish(copy.name)
    return ended.complaint or (
        f"exit {ended.code}: {ended.printed[-300:]}" if ended.code else runs.difference(copy.name)
    )


def _all_damaged(folder: Path) -> None:
    for path in saved(folder / CHECKPOINTS):
        _flip(path / "model.safetensors")


def _older_times(folder: Path) -> None:
    """Set times as a clock that jumped back leaves them: the newest by step is the oldest by time."""
    for age, path in enumerate(saved(folder / CHECKPOINTS)):
        os.utime(path, (1e9 + age, 1e9 + age))


def _stale_lock(folder: Path) -> None:
    script = "import sys, os\nfrom pathlib import Path\nfrom proximo.system.locks import FolderLock\n"
    script += "lock = FolderLock(Path(sys.argv[1]))\nos.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", script, str(folder)], check=False)
    assert (folder / "lock").exists()


def _torn(folder: Path) -> None:
    for file in folder.glob("*.jsonl"):
        with file.open("a") as rows:
            rows.write('{"step": 99, "torn')


def _partial(folder: Path) -> None:
    for name in (f"step-{LAST:06d}.partial", f"step-{LAST:06d}.removed"):
        shutil.copytree(saved(folder / CHECKPOINTS)[0], folder / CHECKPOINTS / name)
    (folder / "run.json.partial").write_text("{")


def _short_ledger(folder: Path) -> None:
    os.truncate(folder / "ledger.jsonl", 10)


ODD: dict[str, Callable[[Path], object]] = {
    "every checkpoint damaged": _all_damaged,
    "no checkpoint": lambda folder: shutil.rmtree(folder / CHECKPOINTS),
    "clock set back": _older_times,
    "a lock left by kill -9": _stale_lock,
    "torn last rows": _torn,
    "half a save and half a removal left": _partial,
    "a result that cannot be read": lambda folder: (folder / "result.json").write_text("{"),
    "rollouts lost and strange": lambda folder: (folder / "rollouts" / "step-000099.parquet").write_bytes(b"PAR"),
}


# Refused


def _refused(runs: RunSet, act: Callable[[RunSet], Ended], expected: str, code: int) -> str | None:
    ended = act(runs)
    if ended.complaint or ended.code != code:
        return ended.complaint or f"exit {ended.code} instead of {code}: {ended.printed[-300:]}"
    return None if expected in ended.printed else f"no word of {expected!r}: {ended.printed[-300:]}"


def _changed(name: str, *more: str) -> Callable[[RunSet], Ended]:
    def act(runs: RunSet) -> Ended:
        return runs.finish(runs.interrupted(name, LAST - 1).name, *more)

    return act


def _edited(name: str, edit: Callable[[Path], object]) -> Callable[[RunSet], Ended]:
    def act(runs: RunSet) -> Ended:
        copy = runs.interrupted(name, LAST - 1)
        edit(copy)
        return runs.finish(copy.name)

    return act


def _locked(runs: RunSet) -> Ended:
    copy = runs.interrupted("locked", LAST - 1)
    with FolderLock(copy):
        return runs.finish(copy.name)


def _other_format(folder: Path) -> None:
    for path in saved(folder / CHECKPOINTS):
        file = path / "state" / "run_state.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
        _sealed(path)


def _sealed(path: Path) -> None:
    """Write a manifest that is right for what is there."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != MANIFEST]
    known = {str(file.relative_to(path)): {"size": file.stat().st_size, "sha256": file_hash(file)} for file in files}
    (path / MANIFEST).write_text(json.dumps({"files": known}))


REFUSALS: dict[str, tuple[Callable[[RunSet], Ended], str, int]] = {
    "another config": (_changed("config", "--training.learning-rate", "0.5"), "training.learning_rate was", 2),
    "another seed": (_changed("seed", "--seed", "5"), "--allow-change seed", 2),
    "another algorithm": (_changed("algorithm", "--algorithm", "sapo"), "algorithm", 2),
    "another model by name": (_changed("model", "--model", "smollm2-135m"), "model", 2),
    "rows of the ledger lost": (_edited("shortledger", _short_ledger), "--accept-lost-rows", 2),
    "a run in use": (_locked, "is in use by process", 2),
    "no run.json": (_edited("norun", lambda folder: (folder / "run.json").unlink()), "it cannot be resumed", 2),
    "a broken run.json": (
        _edited("badrun", lambda folder: (folder / "run.json").write_text("{")),
        "it cannot be resumed",
        2,
    ),
    "a bit of run.json flipped": (
        _edited("flipped", lambda folder: _flip(folder / "run.json", b'"identity": "')),
        "run.json is not as the run wrote it",
        2,
    ),
    "a link in a checkpoint": (
        _edited("link", lambda folder: _link(saved(folder / CHECKPOINTS)[0] / "model.safetensors")),
        "model.safetensors is a symbolic link and is not followed: put the file itself there",
        2,
    ),
    "a broken config.toml": (
        _edited("badconfig", lambda folder: (folder / "config.toml").write_text("= 3")),
        "config.toml",
        2,
    ),
    "no config.toml": (_edited("noconfig", lambda folder: (folder / "config.toml").unlink()), "config.toml", 2),
    "a checkpoint of another version": (_edited("format", _other_format), "format", 2),
}


def _other_files(folder: Path, findings: Findings) -> None:
    """Change contents under the same names: the model's folder, the file of problems."""
    folder.mkdir()
    model, rows = folder / "model", rows_file(folder)
    for seed in (1, 2):
        tiny_model(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, seed=seed).save_pretrained(
            model if seed == 1 else folder / "another"
        )
    tiny_tokenizer().save_pretrained(model)
    config = small(GRPO, steps=2, model=str(model), task=File(str(rows), held_out=0.3))
    runs = RunSet(folder / "run", config).golden()

    def other(change: Callable[[], object], expected: str) -> Callable[[], str | None]:
        def happens() -> str | None:
            change()
            ended = runs.finish("golden")
            if ended.complaint or ended.code != 2:
                return ended.complaint or f"exit {ended.code} instead of 2: {ended.printed[-300:]}"
            return None if expected in ended.printed else f"no word of {expected!r}: {ended.printed[-300:]}"

        return happens

    text = rows.read_text()
    more = text + json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n"
    changes = {
        "a row more in the data": (lambda: rows.write_text(more), "(task.path) has changed since the run began"),
        "rows in another order": (
            lambda: rows.write_text("".join(text.splitlines(keepends=True)[::-1])),
            "(task.path) has changed since the run began",
        ),
        "other weights": (
            lambda: (rows.write_text(text), shutil.copy(folder / "another" / "model.safetensors", model)),
            "model) has changed since the run began",
        ),
        "a model that is gone": (lambda: shutil.rmtree(model), "model its files are missing"),
    }
    for name, (change, expected) in changes.items():
        findings.attempt(f"refused: {name}", name, "S", other(change, expected))


def _foreign(folder: Path, runs: RunSet, findings: Findings) -> None:
    """A whole checkpoint of another run in the place of ours."""
    other = RunSet(
        folder / "foreign", small(GRPO, steps=LAST, seed=99, checkpoints=CheckpointOptions(every=1, keep=10))
    )
    other.golden()

    def happens() -> str | None:
        copy = runs.interrupted("foreign", LAST - 1)
        newest = saved(copy / CHECKPOINTS)[0]
        shutil.rmtree(newest)
        shutil.copytree(other.folder / "golden" / CHECKPOINTS / newest.name, newest)
        ended = runs.finish(copy.name)
        if ended.complaint:
            return ended.complaint
        if ended.code == 0 and (wrong := runs.difference(copy.name)) is not None:
            return f"it went on from the checkpoint of another run without a word: {wrong}"
        return None

    findings.attempt("checkpoint: of another run", "the same step of another seed", "R", happens)
