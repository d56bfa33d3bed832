"""Files that survive: saves killed at every call, bytes changed by hand, two processes and one lock."""

import errno
import fcntl
import json
import math
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from proximo.system import folders
from proximo.system.folders import (
    MANIFEST,
    complaints,
    file_hash,
    remove_folder,
    set_aside,
    tidy,
    write_file,
    write_folder,
)
from proximo.system.lines import JsonLines, plain
from proximo.system.locks import FolderLock, Locked


def fill_with(text: str):
    def fill(folder: Path) -> None:
        (folder / "weights").write_text(text)
        (folder / "state").mkdir()
        (folder / "state" / "facts.json").write_text(json.dumps(text))

    return fill


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def expected(text: str) -> dict[str, str]:
    return {"state/facts.json": json.dumps(text), "weights": text}


# Folders


def test_a_folder_by_hand(tmp_path):
    write_folder(tmp_path / "all" / "a", fill_with("x"))
    assert content(tmp_path / "all" / "a") == expected("x")
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["a"]
    known = json.loads((tmp_path / "all" / "a" / MANIFEST).read_text())["files"]
    # SHA-256 of the letter x.
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert known["weights"] == {"size": 1, "sha256": digest}
    assert known.keys() == {"weights", "state/facts.json"}
    assert complaints(tmp_path / "all" / "a") == []
    assert file_hash(tmp_path / "all" / "a" / "weights") == digest


def test_writing_again_replaces(tmp_path):
    for text in ("old", "new"):
        write_folder(tmp_path / "a", fill_with(text))
    assert content(tmp_path / "a") == expected("new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_error_leaves_everything_as_it_was(tmp_path):
    write_folder(tmp_path / "a", fill_with("old"))

    def fails(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_folder(tmp_path / "a", fails)
    assert content(tmp_path / "a") == expected("old")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def damage(folder: Path, how: str) -> None:
    weights = folder / "weights"
    match how:
        case "flipped":
            weights.write_text("o1d")
        case "truncated":
            weights.write_text("ol")
        case "empty":
            weights.write_text("")
        case "missing":
            weights.unlink()
        case "extra":
            (folder / "more").write_text("x")
        case "linked":
            weights.rename(folder.parent / "elsewhere")
            weights.symlink_to(folder.parent / "elsewhere")
        case "manifest missing":
            (folder / MANIFEST).unlink()
        case "manifest broken":
            (folder / MANIFEST).write_text('{"files": ')
        case "manifest odd":
            (folder / MANIFEST).write_text('{"files": [1]}')


DAMAGES = {
    "flipped": ["weights: other bytes than were written"],
    "truncated": ["weights: 2 bytes, written were 3"],
    "empty": ["weights: 0 bytes, written were 3"],
    "missing": ["weights: missing"],
    "extra": ["more: not in manifest.json"],
    "linked": ["weights: not a file"],
    "manifest missing": ["manifest.json: No such file or directory"],
    "manifest broken": ["manifest.json: not as it was written"],
    "manifest odd": ["manifest.json: not as it was written"],
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_named(how, tmp_path):
    write_folder(tmp_path / "a", fill_with("old"))
    assert complaints(tmp_path / "a") == []
    damage(tmp_path / "a", how)
    assert complaints(tmp_path / "a") == DAMAGES[how]


def test_what_a_dead_writer_left_is_removed(tmp_path):
    write_folder(tmp_path / "a", fill_with("old"))
    for name in ("b.partial", "c.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    (tmp_path / "d.partial").write_text("x")
    tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    remove_folder(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    tidy(tmp_path / "none")


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    write_file(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_file(tmp_path / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


SAVES = """
import os, signal, sys
from pathlib import Path
from proximo.system.folders import remove_folder, write_folder

root, left = Path(sys.argv[1]), 0

def fill(folder, text):
    (folder / "weights").write_text(text)
    (folder / "state").mkdir()
    (folder / "state" / "facts.json").write_text('"' + text + '"')

def counted(function):
    def call(*arguments, **more):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **more)
    return call

# The k-th process dies at its k-th call that changes the disk or waits for it; the last comes to its end.
calls = ("open", "write", "fsync", "close", "mkdir", "rename", "replace", "unlink", "rmdir", "scandir")
for k in range(1, 1000):
    folder = root / f"{k:03}"
    write_folder(folder / "step-1", lambda path: fill(path, "old"))
    if (child := os.fork()) == 0:
        left = k
        for name in calls:
            setattr(os, name, counted(getattr(os, name)))
        write_folder(folder / "step-2", lambda path: fill(path, "new"))
        remove_folder(folder / "step-1")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(k, os.waitstatus_to_exitcode(status), flush=True)
    if status == 0:
        break
"""


@pytest.mark.slow("kills a save at every call")
def test_a_save_killed_at_any_call_leaves_old_or_new(tmp_path):
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    *killed, (last, code) = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert code == 0
    assert last > 30
    assert all(code == -signal.SIGKILL for _, code in killed)  # the fault happened
    states = set()
    for number, _ in killed:
        folder = tmp_path / f"{number:03}"
        found = {path.name: content(path) for path in folder.glob("step-?") if complaints(path) == []}
        assert {path.name for path in folder.glob("step-?")} == found.keys()  # nothing is half there under its name
        wanted = {"step-1": expected("old"), "step-2": expected("new")}
        assert found
        assert all(found[name] == wanted[name] for name in found)
        states.add(frozenset(found))
        tidy(folder)
        write_folder(folder / "step-3", fill_with("next"))
        assert {path.name for path in folder.iterdir()} == found.keys() | {"step-3"}
    assert states == {frozenset({"step-1"}), frozenset({"step-1", "step-2"}), frozenset({"step-2"})}


# Rows


def test_rows_are_there_at_once_and_can_be_cut(tmp_path):
    rows = JsonLines(tmp_path / "a.jsonl")
    assert (rows.size, list(rows), rows.repair()) == (0, [], 0)
    rows.append({"step": 0})
    size = rows.size
    assert (tmp_path / "a.jsonl").read_bytes() == b'{"step": 0}\n'
    assert size == 12
    rows.append({"step": 1})
    assert list(rows) == [{"step": 0}, {"step": 1}]
    rows.cut(size)
    rows.cut(size)
    assert list(rows) == [{"step": 0}]
    with pytest.raises(ValueError, match="has 12 bytes, not the 13"):
        rows.cut(13)


@pytest.mark.parametrize(
    ("text", "whole"), [("", 0), ("{}\n", 3), ("{}\n{", 3), ("{", 0), ("{}\n" * 40_000 + "{", 120_000)]
)
def test_a_torn_last_row_is_removed(text, whole, tmp_path):
    (tmp_path / "a.jsonl").write_text(text)
    rows = JsonLines(tmp_path / "a.jsonl")
    assert len(list(rows)) == whole / 3
    assert rows.repair() == len(text) - whole
    assert (tmp_path / "a.jsonl").read_text() == text[:whole]
    rows.append({})
    assert (tmp_path / "a.jsonl").read_text() == text[:whole] + "{}\n"


FULL = """
import resource, signal, sys
from pathlib import Path
from proximo.system.lines import JsonLines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
rows = JsonLines(Path(sys.argv[1]))
rows.append({"step": 0})
try:
    rows.append({"step": 1})
except OSError as error:
    print("refused:", error)
"""


def test_a_row_without_room_leaves_no_trace(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path / "a.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "refused: " in done.stdout  # 12 bytes fitted, of the next 12 only 8
    assert (tmp_path / "a.jsonl").read_bytes() == b'{"step": 0}\n'


# Locks

HOLDER = """
import sys, time
from pathlib import Path
from proximo.system.locks import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_folder_has_one_owner_until_it_dies(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Locked, match=rf"is in use by process {holder.pid} on .* since 20"):
            FolderLock(tmp_path)
    finally:
        holder.kill()
        holder.wait(timeout=60)
        assert holder.stdout is not None
        holder.stdout.close()
    assert (tmp_path / "lock").exists()  # stale: its owner could not remove it
    with FolderLock(tmp_path), pytest.raises(Locked, match=f"process {os.getpid()}"):
        FolderLock(tmp_path)
    assert not (tmp_path / "lock").exists()
    FolderLock(tmp_path).release()


def test_a_lock_that_is_just_being_written_says_so(tmp_path):
    with FolderLock(tmp_path):
        (tmp_path / "lock").write_text("")
        with pytest.raises(Locked, match="in use by another process"):
            FolderLock(tmp_path)


def test_a_lock_whose_file_was_removed_still_holds(tmp_path):
    first = FolderLock(tmp_path)
    (tmp_path / "lock").unlink()
    with pytest.raises(Locked, match="in use by another process"):
        FolderLock(tmp_path)
    (tmp_path / "lock").write_text("somebody else's")
    first.release()
    assert (tmp_path / "lock").read_text() == "somebody else's"  # not the file it had made
    with FolderLock(tmp_path):  # a stale one is taken over
        pass
    assert list(tmp_path.iterdir()) == []
    FolderLock(tmp_path / "new").release(remove_empty=True)
    assert list(tmp_path.iterdir()) == []


def test_where_folders_cannot_be_locked_the_file_is(tmp_path, monkeypatch):
    real = fcntl.flock

    def flock(file: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with FolderLock(tmp_path), pytest.raises(Locked, match=f"process {os.getpid()}"):
        FolderLock(tmp_path)


CROWD = """
import os, sys, time
from pathlib import Path
from proximo.system.locks import FolderLock, Locked

def work():
    try:
        with FolderLock(Path(sys.argv[1])):
            alone = Path(sys.argv[1], "alone")
            alone.mkdir()
            time.sleep(0.02)
            alone.rmdir()
        return 0
    except Locked:
        return 3
    except OSError:
        return 1

children = []
for _ in range(40):
    if (child := os.fork()) == 0:
        os._exit(work())
    children.append(child)
    time.sleep(0.005)
print(*sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_many_processes_want_one_lock(tmp_path):
    command = [sys.executable, "-c", CROWD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    codes = list(map(int, done.stdout.split()))
    assert set(codes) <= {0, 3}  # 1: two of them were in the folder at once
    assert codes.count(0) >= 2
    assert list(tmp_path.iterdir()) == []


# Names


def test_a_folder_set_aside_keeps_its_content_and_makes_room_for_the_next(tmp_path):
    for text in ("old", "new"):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "file").write_text(text)
        set_aside(tmp_path / "a")
    tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.passed-over"]
    assert (tmp_path / "a.passed-over" / "file").read_text() == "new"


def test_the_name_of_a_new_folder_around_is_on_the_disk(tmp_path, monkeypatch):
    synced, real = [], folders.sync
    monkeypatch.setattr(folders, "sync", lambda path: (synced.append(path), real(path)))
    write_folder(tmp_path / "around" / "a", lambda path: None)
    assert {tmp_path, tmp_path / "around"} <= set(synced)
    synced.clear()
    write_folder(tmp_path / "around" / "b", lambda path: None)
    assert tmp_path not in synced  # it was there


def test_what_json_cannot_hold_is_none():
    assert plain({1: (0.5, math.nan), "a": {"b": [math.inf, 2, "x", None]}}) == {
        "1": [0.5, None],
        "a": {"b": [None, 2, "x", None]},
    }
