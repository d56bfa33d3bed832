"""What is wrong with a run's files: doctor, report and page name the same findings, and none where all is well."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from proximo.algorithms import GRPO
from proximo.cli import main
from proximo.insight.doctor.checkup import check_up
from proximo.insight.folder import MAX_BYTES, RunFolder
from proximo.insight.lens.steps import read_step
from proximo.insight.page import overview
from proximo.insight.report import gather, render
from proximo.runs.run_json import lost_rows
from proximo.system.folders import write_folder
from proximo.system.sealing import is_intact, sealed
from tests.stored import Asked, Said, store

GROUPS = [Asked([Said(["a", "b"], 1.0, old=(-1.0, -1.0)), Said(["c"], 0.0, old=(-1.0,))])]
ROLLOUTS = "rollouts/step-000000.parquet"


@pytest.fixture
def folder(tmp_path) -> Path:
    run = store(tmp_path / "run", GRPO, GROUPS).path
    (run / "events.jsonl").write_text('{"step": 0, "kind": "resumed", "message": "from step 0"}\n')
    (run / "timings.jsonl").write_text('{"step": 0, "sample": 1.0}\n')
    (run / "timeline.jsonl").write_text('{"step": 0, "seconds": 1.0}\n')
    for step in (1, 2):
        weights = {"model.safetensors": b"weights" * step}
        write_folder(run / "checkpoints" / f"step-{step:06d}", lambda path, weights=weights: _fill(path, weights))
    (run / "result.json").write_text(json.dumps({"checkpoint": "step-000002"}))
    return run


def _fill(path: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (path / name).write_bytes(data)


def doctor(folder: Path, capsys) -> list[str]:
    main(["doctor", str(folder), "--json"])
    return [each["message"] for each in json.loads(capsys.readouterr().out)["findings"]]


def page(folder: Path) -> list[str]:
    return [each["message"] for each in overview.health(RunFolder(folder), {})["findings"]]


def flip(file: Path, place: int) -> None:
    """One bit."""
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)


def spoil(name: str, place: int) -> Callable[[Path], None]:
    return lambda run: flip(run / name, place)


def append(name: str, data: bytes) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        with (run / name).open("ab") as file:
            file.write(data)

    return change


def lose_checkpoint(run: Path) -> None:
    (run / "checkpoints" / "step-000002").rename(run.parent / "elsewhere")


CHANGED = "the rollouts of 1 step cannot be read: step 0, its bytes differ from what was written"
DAMAGES = {
    "a checkpoint's weights": (
        spoil("checkpoints/step-000002/model.safetensors", 3),
        "checkpoints/step-000002 differs from what was written (model.safetensors: other bytes than were written)",
    ),
    "no checkpoint": (lose_checkpoint, "checkpoints/step-000002, the run's last checkpoint, is missing"),
    "a row of metrics": (
        append("metrics.jsonl", b"not json\n"),
        "1 of the 2 rows of metrics.jsonl cannot be read",
    ),
    "a row of events": (append("events.jsonl", b"[1]\n\n"), "2 of the 3 rows of events.jsonl cannot be read"),
    "a row of timings": (append("timings.jsonl", b"\xff\n"), "1 of the 2 rows of timings.jsonl cannot be read"),
    "a row of the ledger": (append("ledger.jsonl", b"{\n"), "1 of the 2 rows of ledger.jsonl cannot be read"),
    "a row that never ends": (
        append("metrics.jsonl", b"[" * (5 << 20) + b"\n"),
        "1 of the 2 rows of metrics.jsonl cannot be read",
    ),
    "the result": (spoil("result.json", 0), "result.json cannot be read"),
    "the settings": (append("config.toml", b"steps ="), "config.toml cannot be read"),
    "a bit of a page of the rollouts": (spoil(ROLLOUTS, 200), CHANGED),
    "a bit of the length of the rollouts' footer": (spoil(ROLLOUTS, -6), CHANGED),
    "rollouts cut in half": (lambda run: (run / ROLLOUTS).write_bytes((run / ROLLOUTS).read_bytes()[:500]), CHANGED),
    "empty rollouts": (lambda run: (run / ROLLOUTS).write_bytes(b""), CHANGED),
}


@pytest.mark.slow("trains and damages a run")
@pytest.mark.parametrize("name", DAMAGES)
def test_doctor_report_and_page_say_the_same(name, folder, capsys):
    change, expected = DAMAGES[name]
    change(folder)
    [said] = doctor(folder, capsys)
    assert said == expected
    report = gather(RunFolder(folder))
    assert [spell.finding.message for spell in report.findings] == [said]
    assert said.replace("'", "&#x27;") in render(report)
    assert page(folder) == [said]


def save_state(run: Path, step: int, identity: str = "this run") -> dict[str, int]:
    """A checkpoint as training saves it, which knows how long the log is; those lengths."""
    sizes = {name: (run / name).stat().st_size for name in ("metrics.jsonl", "ledger.jsonl")}

    def fill(path: Path) -> None:
        (path / "state").mkdir()
        (path / "state" / "run_state.json").write_text(json.dumps({"run": identity, "sizes": sizes}))

    write_folder(run / "checkpoints" / f"step-{step:06d}", fill)
    return sizes


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_rows_that_are_lost_are_found_as_resuming_finds_them(name, folder, capsys):
    """The rows that are left are whole, and in order: only the checkpoint knows that there were more."""
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(sealed(record | {"identity": "this run"})))
    append(name, b'{"step": 1}\n{"step": 2}\n')(folder)
    had = save_state(folder, 3)[name]
    append(name, b'{"step": 3}\n')(folder)
    whole = (folder / name).read_bytes()
    assert doctor(folder, capsys) == page(folder) == []
    kept = whole[: whole.index(b"\n") + 1]
    (folder / name).write_bytes(kept)
    said = f"{name} has {len(kept)} bytes and had {had} when step-000003 was saved: rows are lost"
    assert doctor(folder, capsys) == page(folder) == [said]
    assert lost_rows(folder, folder / "checkpoints" / "step-000003") == [said]
    (folder / name).unlink()
    gone = f"{name} has 0 bytes and had {had} when step-000003 was saved: rows are lost"
    assert doctor(folder, capsys) == page(folder) == [gone]
    (folder / name).write_bytes(whole[:had])
    assert doctor(folder, capsys) == page(folder) == []


def test_what_another_runs_checkpoint_knows_is_not_asked_for(folder, capsys):
    append("metrics.jsonl", b'{"step": 1}\n')(folder)
    save_state(folder, 3, identity="another run")
    (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes()[: -len('{"step": 1}\n')])
    assert doctor(folder, capsys) == page(folder) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "timings.jsonl", "timeline.jsonl", "ledger.jsonl"])
def test_what_is_no_file_is_found_and_what_is_not_there_yet_is_not(name, folder, capsys):
    (folder / name).unlink()
    assert doctor(folder, capsys) == page(folder) == []
    (folder / name).mkdir()
    assert doctor(folder, capsys) == page(folder) == [f"{name} cannot be read: it is not a file"]


def test_a_folder_of_an_earlier_version_is_not_damaged(folder, capsys):
    """Its evaluation before training has the step -1, and its first step 0."""
    record = json.loads((folder / "run.json").read_text())
    assert record.pop("format") == 2
    (folder / "run.json").write_text(json.dumps(sealed(record)))
    rows = [{"step": -1, "held_out/outcome": 0.5}, *({"step": step, "outcome": 0.5} for step in range(3))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    old = "written by an earlier version of Proximo (format 1), whose steps are numbered one lower"
    assert doctor(folder, capsys) == page(folder) == [old]
    assert check_up(RunFolder(folder)).steps == 3
    append("metrics.jsonl", b"not json\n")(folder)
    assert doctor(folder, capsys) == page(folder) == [old, "1 of the 5 rows of metrics.jsonl cannot be read"]
    (folder / "run.json").write_text(json.dumps(sealed(record | {"format": 3})))
    assert doctor(folder, capsys)[0] == "written by another version of Proximo: its format is 3, not 2"


def test_nothing_is_found_in_a_folder_that_is_whole(folder, capsys):
    assert doctor(folder, capsys) == []
    report = gather(RunFolder(folder))
    assert not report.findings
    assert "No rule of <code>proximo doctor</code> has anything to say" in render(report)
    assert page(folder) == []
    append("metrics.jsonl", b'{"step": 1, "outc')(folder)  # a row that is just being written
    assert doctor(folder, capsys) == page(folder) == []


@pytest.mark.slow("trains and damages a run")
def test_every_flipped_bit_of_the_rollouts_is_found(folder):
    """In pages, checksum, footer, its length and the magic: no byte of the file is left out."""
    file = folder / ROLLOUTS
    good = file.read_bytes()
    assert read_step(file, 0).number == 0
    assert is_intact(io.BytesIO(good))
    for place in range(len(good)):
        changed = good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :]
        assert not is_intact(io.BytesIO(changed))
    for place in range(10, len(good), len(good) // 40):  # a number within a page may still be a number
        file.write_bytes(good)
        flip(file, place)
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
            read_step(file, 0)


@pytest.mark.slow("trains and damages a run")
def test_a_file_that_is_too_large_is_said_in_one_line(folder, capsys):
    with (folder / "metrics.jsonl").open("ab") as file:
        file.truncate(MAX_BYTES + (1 << 20))  # a hole: it takes no room on the disk
    size = f"{folder}/metrics.jsonl has 257 MiB, more than the 256 MiB that are read at once"
    with pytest.raises(SystemExit):
        main(["doctor", str(folder)])
    [line] = capsys.readouterr().err.splitlines()
    assert size in line
    for read in (lambda: gather(RunFolder(folder)), lambda: page(folder)):
        with pytest.raises(ValueError, match="more than the 256 MiB"):
            read()


LINKED = ("run.json", "config.toml", "metrics.jsonl", "events.jsonl", "timings.jsonl", "result.json")


@pytest.mark.parametrize("name", LINKED)
def test_links_are_not_followed(name, folder, tmp_path, capsys):
    (tmp_path / "secret").write_text("model = 'hunter2'\n")
    kept = (folder / name).read_bytes()
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "secret")
    for command in ("doctor", "report"):
        with pytest.raises(SystemExit):
            main([command, str(folder)])
        [line] = capsys.readouterr().err.splitlines()
        assert f"{folder / name} is a symbolic link and is not followed" in line
    assert not (folder / "report.html").exists()
    if name != "run.json":
        with pytest.raises(OSError, match="is a symbolic link and is not followed"):
            overview.health(RunFolder(folder), {})
    (folder / name).unlink()
    (folder / name).write_bytes(kept)
    assert doctor(folder, capsys) == []


def test_linked_rollouts_are_not_followed(folder, tmp_path, capsys):
    (folder / ROLLOUTS).rename(tmp_path / "step.parquet")
    (folder / ROLLOUTS).symlink_to(tmp_path / "step.parquet")
    with pytest.raises(ValueError, match="is a symbolic link and is not followed"):
        RunFolder(folder).step(0)
    [said] = doctor(folder, capsys)
    assert "is a symbolic link and is not followed" in said
    assert page(folder) == [said]


def test_a_step_that_is_too_large_to_be_held_is_refused_in_one_line(folder, monkeypatch):
    """Two completions of three tokens, in one pass: what counts is the tokens there are, and the passes over them."""
    for limit in ("MAX_TOKENS", "MAX_PASSED"):
        with monkeypatch.context() as patched:
            patched.setattr(f"proximo.insight.lens.steps.{limit}", 3)
            assert read_step(folder / ROLLOUTS, 0).number == 0
            patched.setattr(f"proximo.insight.lens.steps.{limit}", 2)
            said = r"\A[^\n]+ 2 completions of 3 tokens( in 1 passes)?, more than the 2 that are held at once\Z"
            with pytest.raises(ValueError, match=said):
                read_step(folder / ROLLOUTS, 0)
