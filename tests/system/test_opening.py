"""Folders of strangers: links, pipes, devices, names that lead outside, sizes that lie."""

import os
import socket
from pathlib import Path

import pytest

from proximo.system.opening import (
    LinkedFile,
    UnsafeFile,
    blob_of,
    check_file,
    copy_file,
    copy_folder,
    inside,
    make_folder,
    names,
    open_file,
    open_to_write,
    read_file,
    refuse_foreign,
    remove,
    rename,
    replacing,
    without_links,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder next to something of the user's that must stay as it is."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "secret").write_text("secret")
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text("steps = 1")
    return tmp_path / "run"


def plant(path: Path, kind: str) -> None:
    match kind:
        case "link":
            path.symlink_to(path.parent.parent / "mine" / "secret")
        case "dangling link":
            path.symlink_to(path.parent.parent / "mine" / "new")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device link":
            path.symlink_to("/dev/zero")
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                here = os.getcwd()
                os.chdir(path.parent)  # names of sockets are short
                try:
                    made.bind(path.name)
                finally:
                    os.chdir(here)


KINDS = ("link", "dangling link", "pipe", "folder", "device link", "socket")


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(run, kind):
    plant(run / "file", kind)
    for use in (open_file, read_file, check_file, open_to_write):
        with pytest.raises(UnsafeFile, match="file"):
            use(run / "file")
    with pytest.raises(UnsafeFile):
        copy_file(run / "file", run / "copy")
    with pytest.raises((UnsafeFile, FileExistsError)):
        copy_file(run / "config.toml", run / "file")
    assert (run.parent / "mine" / "secret").read_text() == "secret"
    assert os.listdir(run.parent / "mine") == ["secret"]


def test_no_part_of_a_path_may_be_a_link(run):
    (run / "checkpoints").symlink_to(run.parent / "mine")
    secret = run / "checkpoints" / "secret"
    for use in (
        lambda: open_file(secret),
        lambda: open_to_write(secret),
        lambda: open_to_write(run / "checkpoints" / "new"),
        lambda: make_folder(run / "checkpoints" / "new"),
        lambda: make_folder(run / "checkpoints"),
        lambda: remove(secret),
        lambda: rename(run / "config.toml", secret),
        lambda: rename(secret, run / "stolen"),
        lambda: names(run / "checkpoints"),
        lambda: copy_folder(run / "checkpoints", run / "copy"),
        lambda: copy_folder(run / "rollouts", run / "checkpoints" / "copy"),
    ):
        with pytest.raises(LinkedFile, match="checkpoints is a symbolic link and is not followed"):
            use()
    assert os.listdir(run.parent / "mine") == ["secret"]
    remove(run / "checkpoints")  # the link itself
    assert (run.parent / "mine" / "secret").read_text() == "secret"
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "socket"])
def test_what_is_neither_file_nor_folder_is_named(run, kind):
    refuse_foreign(run)
    plant(run / "rollouts" / "step-000001.parquet", kind)
    with pytest.raises(UnsafeFile, match="rollouts/step-000001.parquet is a"):
        refuse_foreign(run)


def test_links_that_another_program_made_stay_in_its_folder(run):
    (run / "offline-run").mkdir()
    (run / "latest-run").symlink_to("offline-run")
    refuse_foreign(run, own_links=True)
    with pytest.raises(LinkedFile):
        refuse_foreign(run)
    (run / "offline-run" / "logs").symlink_to("../../mine")
    with pytest.raises(LinkedFile, match="offline-run/logs"):
        refuse_foreign(run, own_links=True)


def test_names_from_a_file_stay_inside(run):
    assert inside(run, "metrics.jsonl") == run / "metrics.jsonl"
    assert inside(run, "state/a.json", nested=True) == run / "state" / "a.json"
    outside = ("", ".", "..", "../x", "/etc/passwd", "a/b", "a\0b", "\ud800", None, 1, ["a"], {})
    for name in outside:
        with pytest.raises(ValueError, match="no name of a file"):
            inside(run, name)
    for name in ("/etc/passwd", "a/../../b", "a//b", "a/", "./a", "..", None):
        with pytest.raises(ValueError, match="no name of a file"):
            inside(run, name, nested=True)


def test_sizes_are_bounded_before_memory_is_taken(run):
    with (run / "huge").open("wb") as file:
        file.truncate(1 << 40)  # takes no space
    with pytest.raises(UnsafeFile, match="more than 100 bytes"):
        read_file(run / "huge", 100)
    assert read_file(run / "config.toml", 9) == b"steps = 1"
    with pytest.raises(UnsafeFile, match="more than 16 bytes"):
        read_file(Path(f"/proc/{os.getpid()}/status"), 16)  # claims to be empty


def test_links_of_the_user_are_followed_once(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    assert without_links("run") == Path("run")
    assert without_links(run) == run
    Path("scratch").symlink_to("run")
    assert without_links("scratch/config.toml") == run.resolve() / "config.toml"
    assert read_file(without_links("scratch/config.toml")) == b"steps = 1"
    with pytest.raises(ValueError, match="cannot be a path"):
        without_links("a\0b")


def test_a_snapshot_may_lead_to_its_own_blobs(tmp_path):
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "abc"
    for folder in (snapshot / "onnx", repository / "blobs", tmp_path / "models--c" / "blobs"):
        folder.mkdir(parents=True)
    (repository / "blobs" / "1").write_text("{}")
    (tmp_path / "models--c" / "blobs" / "2").write_text("secret")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "onnx" / "config.json").symlink_to("../../../blobs/1")
    assert (
        read_file(blob_of(snapshot / "config.json")) == read_file(blob_of(snapshot / "onnx" / "config.json")) == b"{}"
    )
    (repository / "blobs" / "3").symlink_to(tmp_path / "models--c" / "blobs" / "2")
    for target in (
        "../../../models--c/blobs/2",
        "/dev/zero",
        "../../blobs/x/../../../models--c/blobs/2",
        "../../blobs/3",
    ):
        (snapshot / "bad.json").unlink(missing_ok=True)
        (snapshot / "bad.json").symlink_to(target)
        with pytest.raises(LinkedFile):
            read_file(blob_of(snapshot / "bad.json"))
    (tmp_path / "plain.json").symlink_to(repository / "blobs" / "1")
    with pytest.raises(LinkedFile):
        blob_of(tmp_path / "plain.json")


def test_what_is_written_anew_has_no_end_of_what_was_longer(tmp_path: Path):
    """A step that a resume repeats may have fewer tokens: its rollouts ended with those of before."""
    path = tmp_path / "step.parquet"
    path.write_bytes(b"x" * 100)
    with replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
