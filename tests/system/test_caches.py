"""What is kept in the user's cache is read only as it was written, by this user."""

import os
from pathlib import Path

import pytest

from proximo.system.caches import Cache

KEY, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "proximo" / "things"


def test_what_is_kept_is_read_under_its_key_alone(folder):
    cache = Cache("things", max_bytes=1000)
    assert cache.read(KEY) is None
    cache.write(KEY, b"tokens")
    assert (cache.read(KEY), cache.read(OTHER)) == (b"tokens", None)
    assert folder.stat().st_mode & 0o077 == 0
    (folder / KEY).rename(folder / OTHER)
    assert cache.read(OTHER) is None
    cache.write(KEY, b"")
    assert cache.read(KEY) == b""
    cache.remove(KEY)
    cache.remove(KEY)
    assert cache.read(KEY) is None


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 100])
def test_a_damaged_file_is_removed(folder, damage):
    cache = Cache("things", max_bytes=1000)
    cache.write(KEY, b"tokens")
    (folder / KEY).write_bytes(damage)
    assert cache.read(KEY) is None
    assert not (folder / KEY).exists()


def test_what_another_user_could_have_written_is_not_read(folder):
    cache = Cache("things", max_bytes=1000)
    cache.write(KEY, b"tokens")
    (folder / KEY).chmod(0o666)
    assert cache.read(KEY) is None
    (folder / KEY).chmod(0o600)
    folder.chmod(0o777)
    assert cache.read(KEY) is None
    cache.write(OTHER, b"tokens")
    assert not (folder / OTHER).exists()


def test_no_link_and_no_pipe_is_followed(folder, tmp_path):
    cache = Cache("things", max_bytes=1000)
    cache.write(KEY, b"tokens")
    (folder / KEY).rename(tmp_path / "elsewhere")
    (folder / KEY).symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / OTHER)
    assert (cache.read(KEY), cache.read(OTHER)) == (None, None)


def test_the_oldest_make_room(folder):
    cache = Cache("things", max_bytes=300)
    for number in range(4):
        cache.write(str(number), bytes(70))  # and 32 of a digest
        os.utime(folder / str(number), (number, number))
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]
    cache.write("large", bytes(151))
    assert cache.read("large") is None


def test_nothing_is_kept_where_there_is_no_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    cache = Cache("things", max_bytes=300)
    cache.write(KEY, b"tokens")
    assert cache.read(KEY) is None
