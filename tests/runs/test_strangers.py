"""A run folder from a stranger, or from a disk that forgets: nothing outside it changes, nothing waits, and what was
altered is told."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from proximo.cli import main
from proximo.config import toml
from proximo.insight.doctor.checkup import check_up
from proximo.insight.folder import RunFolder
from proximo.insight.page import overview
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.checkpoints import CHECKPOINTS
from proximo.runs.forking import checkpoint_at, fork
from proximo.runs.log import ranges
from proximo.runs.run_json import read_record
from proximo.runs.session import open_session
from proximo.runs.tracking.sending import track
from proximo.system.folders import MANIFEST, _seal, read_manifest
from proximo.system.opening import remove
from tests.runs.test_resume import Quiet, assert_same, config, numbers, trained
from tests.runs.tracking.folders import MINE

pytestmark = pytest.mark.usefixtures("small_shipped_model", "ordinary_precision")
SETTINGS = config(steps=2)
LAST = f"{CHECKPOINTS}/step-000002"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("strangers") / "run"
    trained(SETTINGS, folder)
    return folder


@pytest.fixture
def run(whole, tmp_path, monkeypatch) -> Path:
    """A copy, in whose place a user stands, with something next to it that must stay as it is."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "secret").write_text("secret\n" * 100)
    (tmp_path / "tracker.py").write_text(MINE)
    (tmp_path / "run.toml").write_text(toml.dumps(SETTINGS))
    monkeypatch.chdir(tmp_path)
    return Path("run")


def outside() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path("mine").rglob("*")) if path.is_file()}


def refused(capsys, *command: str) -> str:
    """The one line that a command refuses a folder with."""
    with pytest.raises(SystemExit) as ended:
        main([*command])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def unfinished(run: Path) -> None:
    """As a run that died after its last checkpoint."""
    (run / "result.json").unlink()


COMMANDS = {
    "train": ("train", "run.toml", "--run", "run"),
    "fork": ("fork", "run", "--run", "other", "--steps", "3"),
    "track": ("track", "run", "--to", "tracker.py:Mine"),
}
"""Those that write."""


def resumed(run: Path) -> None:
    with open_session(run, toml.dumps(SETTINGS)) as attempt:
        attempt.start()


CALLS: dict[str, Callable[[Path], object]] = {
    "train": resumed,
    "fork": lambda run: fork(run, Path("other"), checkpoint_at(run, None)),
    "track": lambda run: track(run, ["tracker.py:Mine"]),
}
"""The same, without their flags."""
FILES = (
    *("lock", "config.toml", "run.json", "metrics.jsonl", "ledger.jsonl", "events.jsonl", "timings.jsonl"),
    *("timeline.jsonl", "traceback.txt", "report.html", "rollouts/step-000002.parquet", "rollouts", "checkpoints"),
    *("tracking", "tracking/Mine", "tracking/Mine/lock", "tracking/Mine/sent.json", "evidence", "verdicts", "resume"),
    *(LAST, f"{LAST}/{MANIFEST}", f"{LAST}/state/run_state.json", f"{LAST}/model.safetensors", "verdicts/a.jsonl"),
)


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_written_through_a_link(run, name):
    unfinished(run)
    path, before = run / name, outside()
    path.parent.mkdir(parents=True, exist_ok=True)
    for target in ("mine", "mine/secret", "mine/new"):
        remove(path)
        path.symlink_to(os.path.relpath(target, path.parent))
        for call in CALLS.values():
            with pytest.raises(ValueError, match=rf"{path} is a symbolic link and is not followed[^\n]*\Z"):
                call(run)
        assert outside() == before
        assert not Path("other").exists()


@pytest.mark.parametrize("name", ["config.toml", "run.json", "metrics.jsonl", f"{LAST}/{MANIFEST}", "lock"])
def test_a_pipe_is_not_waited_for(run, name):
    unfinished(run)
    remove(run / name)
    os.mkfifo(run / name)
    for call in CALLS.values():
        with pytest.raises(ValueError, match=rf"{run / name} is a pipe[^\n]*\Z"):
            call(run)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_in_one_line(run, capsys, command):
    (run / "lock").symlink_to("../mine/secret")
    assert "run/lock is a symbolic link and is not followed" in refused(capsys, *COMMANDS[command])


@pytest.mark.filterwarnings("ignore:.*is damaged")  # an older checkpoint is used, and that is told
@pytest.mark.parametrize(
    "name", ["config.toml", "run.json", "metrics.jsonl", f"{LAST}/{MANIFEST}", f"{LAST}/config.json"]
)
def test_readers_answer_whatever_is_in_the_place_of_a_file(run, capsys, name):
    (run / name).unlink()
    os.mkfifo(run / name)
    for command in ("doctor", "report", "watch", "export", "replay"):
        more = {"replay": ("--step", "1"), "watch": ("--once",)}.get(command, ())
        try:
            main([command, "run", *more])
        except SystemExit:
            assert len(capsys.readouterr().err.splitlines()) <= 2
    for request in (overview.health, overview.about):
        try:
            request(RunFolder(run), {})
        except (OSError, ValueError):
            continue


@pytest.mark.parametrize("step", [-1, 0, 3, 10**400, 2.0, True, "2", []])
def test_a_checkpoint_is_of_the_step_that_its_folder_names(run, capsys, step):
    """With another one, training began in the middle of nowhere and ended with a traceback."""
    unfinished(run)
    state = run / LAST / "state" / "run_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"step": step}))
    known = {key: value for key, value in read_manifest(run / LAST).items() if key != "files"}
    (run / LAST / MANIFEST).unlink()
    _seal(run / LAST, known)
    assert "and its folder of another" in refused(capsys, *COMMANDS["fork"])
    with open_session(run, toml.dumps(SETTINGS)) as attempt:
        assert attempt.resume_from == run / CHECKPOINTS / "step-000001"


@pytest.mark.parametrize("name", ["{home}/mine/secret", "../mine/secret", "mine", "..", "", "config.toml", "a/b"])
@pytest.mark.parametrize("command", ["fork", "train"])
def test_a_checkpoint_names_no_other_files(run, tmp_path, capsys, name, command):
    """`sizes` were paths to copy from and to: a fork overwrote any file of the user's."""
    unfinished(run)
    name = name.format(home=tmp_path)
    for step in ("step-000001", "step-000002"):
        state = run / CHECKPOINTS / step / "state" / "run_state.json"
        facts = json.loads(state.read_text())
        state.write_text(json.dumps(facts | {"sizes": facts["sizes"] | {name: 1}}))
        known = {key: value for key, value in read_manifest(state.parents[1]).items() if key != "files"}
        (state.parents[1] / MANIFEST).unlink()
        _seal(state.parents[1], known)
    before = outside()
    if command == "fork":
        assert "which is no log of a run" in refused(capsys, *COMMANDS[command])
    else:
        with open_session(run, toml.dumps(SETTINGS)) as attempt:
            assert attempt.resume_from is None  # as with any checkpoint that cannot be used
    assert outside() == before
    assert not Path("other").exists()


# What was altered


def test_a_cut_config_is_noticed(run, capsys):
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text[: text.index("[evaluation]")])
    said = [spell.finding.message for spell in check_up(RunFolder(run)).standing]
    assert [each for each in said if each.startswith("config.toml is not the one that the run recorded (")]
    remedy = "restore it (run.json has a copy, as config)"
    assert remedy in refused(capsys, *COMMANDS["fork"])
    with pytest.raises(ValueError, match="config.toml is not the one that the run recorded"):
        _ = RunFolder(run).config
    with open_session(run, toml.dumps(SETTINGS)) as attempt:  # with the run's own config, it is only told
        assert attempt.result is not None
        [line] = attempt.altered
        assert "config.toml is not the one" in line
    (run / "config.toml").write_text(json.loads((run / "run.json").read_text())["config"])
    assert RunFolder(run).config == SETTINGS


def bits_of(data: bytes) -> list[int]:
    """One bit in each byte, the three that a capital letter, a digit and a sign differ in by turns."""
    return [8 * place + (0, 2, 5)[place % 3] for place in range(len(data))]


@pytest.mark.slow("trains and resumes a run")
def test_a_flipped_bit_in_the_record_is_told(run, capsys):
    """One in its identity made all checkpoints another run's, so that a resume began anew; others changed what reports
    say. Any bit counts, those of the hash and of its name, too."""
    unfinished(run)
    file = run / "run.json"
    data = file.read_bytes()
    for bit in bits_of(data):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        file.write_bytes(altered)
        with pytest.raises(ValueError, match=r"run.json"):
            read_record(run)
    place = data.index(b'"identity": "') + 20
    file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    told = "run.json is not as the run wrote it"
    assert told in [spell.finding.message for spell in check_up(RunFolder(run)).standing]
    for command in ("train", "fork"):
        assert f"{told}: restore it, or remove its sealed and sha256" in refused(capsys, *COMMANDS[command])
    assert told in refused(capsys, "resume", "run")


def test_a_record_without_a_hash_is_opened_as_before(run):
    """Earlier versions wrote none, and a user may remove it."""
    unfinished(run)
    record = json.loads((run / "run.json").read_text())
    del record["sealed"], record["sha256"]
    (run / "run.json").write_text(json.dumps(record))
    assert read_record(run) == record
    assert not [each for each in check_up(RunFolder(run)).standing if "run.json" in each.finding.message]
    resumed(run)
    assert (read_record(run) or {})["sealed"]


def test_a_config_that_the_user_edits_in_the_folder_is_a_change_like_any_other(run):
    edited = config(steps=3)
    (run / "config.toml").write_text(toml.dumps(edited))
    with pytest.raises(ValueError, match="steps was 2, now 3"), open_session(run, toml.dumps(edited)):
        pass
    with open_session(run, toml.dumps(edited), allowed=["steps"]) as attempt:
        train(Run(edited, run, Quiet()), attempt)
    assert RunFolder(run).config == edited


def zeroed(data: bytes) -> bytes:
    return data[:20] + b"\0" * 20 + data[40:]


def flipped(data: bytes) -> bytes:
    place = data.index(b"1")
    return data[:place] + b"3" + data[place + 1 :]


@pytest.mark.parametrize("change", [zeroed, flipped])
@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "timings.jsonl", "timeline.jsonl"])
def test_altered_rows_are_told(run, capsys, name, change: Callable[[bytes], bytes]):
    data = (run / name).read_bytes()
    (run / name).write_bytes(change(data))
    told = f"{name} has other bytes than when step-000002 was saved: rows are altered"
    assert told in [spell.finding.message for spell in check_up(RunFolder(run)).standing]
    unfinished(run)
    if name in ("metrics.jsonl", "ledger.jsonl"):
        line = refused(capsys, *COMMANDS["train"])
        assert told in line
        assert "accept" in line
        assert told in refused(capsys, *COMMANDS["fork"])
    else:
        with open_session(run, toml.dumps(SETTINGS)) as attempt:
            assert attempt.altered == [told]


@pytest.mark.parametrize("kept", [0, 100])
@pytest.mark.parametrize("name", ["timings.jsonl", "timeline.jsonl"])
def test_a_log_that_was_cut_is_told(run, name, kept):
    """Those on which no number depends, too: only metrics and ledger were compared with their size."""
    data = (run / name).read_bytes()
    (run / name).write_bytes(data[:kept])
    told = f"{name} has {kept} bytes and had {len(data)} when step-000002 was saved: rows are lost"
    assert told in [spell.finding.message for spell in check_up(RunFolder(run)).standing]
    unfinished(run)
    with open_session(run, toml.dumps(SETTINGS)) as attempt:
        assert attempt.altered == [told]


def test_altered_rows_may_be_accepted(run):
    """What can be read stays, so that the file is one of rows again; it is asked once."""
    unfinished(run)
    data = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(zeroed(data))
    with open_session(run, toml.dumps(SETTINGS), accept_lost=True) as attempt:
        train(Run(SETTINGS, run, Quiet()), attempt)
    assert [row["step"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())] == [1, 2, 2]
    unfinished(run)
    with open_session(run, toml.dumps(SETTINGS)) as attempt:
        assert attempt.resume_from is not None


def test_missing_rollouts_are_told(run):
    (run / "rollouts" / "step-000001.parquet").unlink()
    told = "the rollouts of 1 step are missing, first those of step 1"
    assert told in [spell.finding.message for spell in check_up(RunFolder(run)).standing]
    with open_session(run, toml.dumps(SETTINGS)) as attempt:
        assert attempt.altered == [f"{told}; training does not need them"]
    assert ranges([1, 2, 3, 7]) == [(1, 3), (7, 7)]
    assert ranges([]) == []


def test_checkpoints_without_hashes_are_still_resumed(run, whole):
    """Those of earlier versions."""
    unfinished(run)
    shutil.rmtree(run / LAST)
    point = run / CHECKPOINTS / "step-000001"
    (point / MANIFEST).unlink()
    _seal(point)
    trained(SETTINGS, run)
    assert_same(numbers(run), numbers(whole))


def test_a_fork_has_hashes_of_its_own_logs(run):
    fork(run, Path("other"), checkpoint_at(run, 1))
    (known, ours) = (read_manifest(each / CHECKPOINTS / "step-000001")["logs"] for each in (run, Path("other")))
    assert known["metrics.jsonl"] == ours["metrics.jsonl"]
    with open_session(Path("other"), toml.dumps(SETTINGS)) as attempt:
        assert attempt.altered == attempt.lost == []


def test_a_name_that_is_no_utf8_is_refused_before_anything_starts(run, capsys):
    name = os.fsdecode(b"caf\xe9")
    line = refused(capsys, "train", "run.toml", "--run", name)
    assert "'caf\\udce9' is not UTF-8, and no model can be saved there" in line
    assert not Path(name).exists()


@pytest.mark.slow("trains a run")
def test_a_link_that_the_user_typed_is_his_own(run, whole, capsys):
    """runs/ on a scratch disk, and a run by another name."""
    unfinished(run)
    Path("runs").symlink_to(".")
    Path("again").symlink_to("run")
    assert main(["doctor", "again"]) == 0
    assert main(["train", "run.toml", "--run", "runs/again"]) == 0
    assert main(["fork", "again", "--at", "1", "--run", "runs/other"]) == 0
    assert main(["track", "runs/again", "--to", "tracker.py:Mine"]) == 0
    assert_same(numbers(run), numbers(whole))
