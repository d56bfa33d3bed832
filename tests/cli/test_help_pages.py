"""Pages of help in the user's cache: made once for each version, and not read where another could have written them."""

import json
import os
import stat
from pathlib import Path

import pytest

from proximo.cli import help_pages
from proximo.cli.help_pages import MAX_VERSIONS, PAGED, page, unknown_flag

PAGES = {command: f"usage: proximo {command} [-h]\n  --steps N  steps\n" for command in PAGED}
FOREIGN = dict.fromkeys(PAGED, "usage: proximo\n  --evil  run this\n")


@pytest.fixture
def made(tmp_path: Path, monkeypatch) -> list[int]:
    """A new cache, and pages that are quickly rendered; how often they were."""
    times: list[int] = []

    def rendered() -> dict[str, str]:
        times.append(1)
        return PAGES

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(help_pages, "_rendered", rendered)
    return times


def kept(folder: Path) -> Path:
    (file,) = (folder / "cache" / "proximo" / "help").iterdir()
    return file


def test_pages_are_made_once_and_all_at_once(made, tmp_path: Path):
    assert [page(command) for command in PAGED] == list(PAGES.values())
    assert made == [1]
    assert stat.S_IMODE(kept(tmp_path).parent.stat().st_mode) == 0o700
    assert page("view") is None


def test_a_wrong_flag_is_found_on_a_page(made):
    assert unknown_flag("train", ["--steps", "3"]) is None
    assert (unknown_flag("train", ["--stps", "3"]) or "").startswith("--stps: there is no such flag, the nearest is")
    assert made == [1]


def test_pages_of_other_code_are_not_read(made, monkeypatch, tmp_path: Path):
    page("train")
    kept(tmp_path).write_text(json.dumps(FOREIGN))
    monkeypatch.setattr(help_pages, "source_fingerprint", lambda: "of today")
    assert page("train") == PAGES["train"]
    assert made == [1, 1]


def test_pages_of_few_versions_are_kept(made, monkeypatch, tmp_path: Path):
    for number in range(MAX_VERSIONS + 3):
        monkeypatch.setattr(help_pages, "source_fingerprint", lambda number=number: str(number))
        page("train")
        for place, file in enumerate(sorted((tmp_path / "cache/proximo/help").iterdir(), key=os.path.getmtime)):
            os.utime(file, (place, place))
    assert len(list((tmp_path / "cache/proximo/help").iterdir())) == MAX_VERSIONS
    assert page("train") == PAGES["train"]
    assert len(made) == MAX_VERSIONS + 3  # the newest is among them


def _link(file: Path) -> None:
    other = file.parents[3] / "other.json"
    other.write_text(json.dumps(FOREIGN))
    file.unlink()
    file.symlink_to(other)


def _linked_folder(file: Path) -> None:
    other = file.parents[3] / "other"
    file.parent.rename(other)
    (other / file.name).write_text(json.dumps(FOREIGN))
    file.parent.symlink_to(other)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _written_by_others(file: Path) -> None:
    file.write_text(json.dumps(FOREIGN))
    file.chmod(0o666)


def _in_a_folder_of_others(file: Path) -> None:
    file.write_text(json.dumps(FOREIGN))
    file.parent.chmod(0o777)


def _of_another_user(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    file.write_text(json.dumps(FOREIGN))
    os.chown(file, 12345, 12345)


@pytest.mark.parametrize(
    "spoil", [_link, _linked_folder, _pipe, _folder, _written_by_others, _in_a_folder_of_others, _of_another_user]
)
def test_what_another_could_have_written_is_not_read(spoil, made, tmp_path: Path):
    page("train")
    spoil(kept(tmp_path))
    assert page("train") == PAGES["train"]
    assert len(made) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[]", b"{}", b'{"train": 3}', json.dumps(PAGES).encode()[:-9]]
)
def test_a_damaged_file_is_made_anew(content: bytes, made, tmp_path: Path):
    page("train")
    kept(tmp_path).write_bytes(content)
    assert page("train") == PAGES["train"]
    assert (len(made), json.loads(kept(tmp_path).read_text())) == (2, PAGES)


@pytest.mark.parametrize("cache", ["/dev/null", "/proc/self", "file"])
def test_without_a_cache_pages_are_made_each_time(cache: str, made, tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    assert page("train") == page("train") == PAGES["train"]
    assert made == [1, 1]


def test_without_a_home_nothing_is_written(made, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert page("train") == PAGES["train"]
    assert list(tmp_path.iterdir()) == []
