"""Data of every format and place: files, patterns, folders, and the hub's local cache."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import ipc, parquet

from proximo.data import Mistakes, read_rows
from proximo.data.locating import data_files, data_name, hub_data, split_patterns
from proximo.runs.config_changes import fingerprints

ROWS = [{"question": "7+5?\nNow.", "answer": "12"}, {"question": 'say "é"', "answer": "a,b"}]
COMMIT = "740312add88f781978c0658806c59bc2815b9866"


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".csv":
            with path.open("w", newline="") as file:
                lines = csv.DictWriter(file, list(rows[0]))
                lines.writeheader()
                lines.writerows(rows)
        case ".parquet":
            parquet.write_table(table, path)
        case ".arrow":
            with ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table)
    return path


def rows_of(path: Path | str) -> list[dict[str, Any]]:
    mistakes = Mistakes()
    found = [dict(row.values) for row in read_rows(str(path), mistakes)]
    assert not mistakes
    return found


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_every_format_gives_the_same_rows(suffix: str, tmp_path: Path):
    assert rows_of(write(tmp_path / f"x.{suffix}")) == ROWS


def test_json_that_is_lines_and_arrow_that_is_a_file(tmp_path: Path):
    lines = tmp_path / "x.json"
    lines.write_text("\n".join(map(json.dumps, ROWS)))
    assert rows_of(lines) == ROWS
    table = pyarrow.Table.from_pylist(ROWS)
    with ipc.new_file(tmp_path / "x.arrow", table.schema) as file:
        file.write_table(table)
    assert rows_of(tmp_path / "x.arrow") == ROWS


def test_folders_and_patterns_are_read_in_order(tmp_path: Path):
    write(tmp_path / "d" / "b.jsonl", ROWS[1:])
    write(tmp_path / "d" / "a.jsonl", ROWS[:1])
    (tmp_path / "d" / "README.md").write_text("# data")
    (tmp_path / "d" / "dataset_info.json").write_text("{}")
    assert rows_of(tmp_path / "d") == ROWS
    assert rows_of(tmp_path / "d" / "*.jsonl") == ROWS
    write(tmp_path / "d" / "c.csv")
    with pytest.raises(ValueError, match="data is '.*.csv and .jsonl.*give a pattern of one kind"):
        data_files(str(tmp_path / "d"), "data")


def test_a_folder_of_splits_is_told_apart(tmp_path: Path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write(tmp_path / f"{name}.parquet")
    train, test = f"{tmp_path}/train*.parquet", f"{tmp_path}/test*.parquet"
    assert split_patterns(str(tmp_path), "data") == (train, [test])
    assert len(data_files(train, "data")) == 2
    with pytest.raises(ValueError, match="give one of them, '.*train-.*' or '"):
        data_files(str(tmp_path), "data")


def cached(folder: Path, *names: str) -> None:
    """A data set in a cache, as huggingface_hub lays it out."""
    home = folder / "datasets--openai--gsm8k"
    for name in names:
        write(home / "snapshots" / COMMIT / name)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(COMMIT)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_data_set_in_the_hubs_cache(offline: Path):
    cached(offline, "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet")
    train, tests = split_patterns("openai/gsm8k", "data")
    assert (train, tests) == (
        f"openai/gsm8k@{COMMIT}:main/train*.parquet",
        [f"openai/gsm8k@{COMMIT}:main/test*.parquet"],
    )
    assert rows_of(train) == ROWS
    assert data_name(train) == "gsm8k"
    cached(offline, "socratic/train-00000-of-00001.parquet")
    with pytest.raises(ValueError, match="give openai/gsm8k:main or openai/gsm8k:socratic$"):
        split_patterns("openai/gsm8k", "data")
    assert split_patterns("openai/gsm8k:main", "data") == (train, tests)


def test_what_the_cache_lacks_is_refused_in_one_line(offline: Path):
    with pytest.raises(ValueError, match="data is 'openai/gsm8k'.*HF_HUB_OFFLINE is set") as told:
        split_patterns("openai/gsm8k", "data")
    assert "\n" not in str(told.value)


def test_paths_on_this_machine_are_no_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "openai" / "gsm8k" / "x.jsonl")
    for path in ("openai/gsm8k", "none/x.jsonl", "/a/b", "data/train-*.parquet", "a/b/c", "~/x"):
        assert hub_data(path) is None, path
    assert hub_data("allenai/RLVR-GSM") is not None
    assert [data_name(each) for each in ("data/sums.jsonl", "d/train-*.parquet", "d/*.csv")] == ["sums", "train", "d"]


def test_a_changed_file_of_a_pattern_is_noticed(tmp_path: Path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl")
    config = f'[task]\ntype = "File"\npath = "{tmp_path}/*.jsonl"\n'
    before = fingerprints(config)
    assert list(before) == ["task.path"]
    write(tmp_path / "b.jsonl", ROWS[:1])
    assert fingerprints(config) != before


def test_with_a_connection_only_what_is_wanted_is_downloaded(offline: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    names = ["README.md", "main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"]
    cached(offline, *names[1:])
    wanted: list[Any] = []

    def download(repo_id: str, *, allow_patterns: Any = None, local_files_only: bool = False, **more: Any) -> str:
        wanted.append("the cache" if local_files_only else allow_patterns)
        return str(offline / "datasets--openai--gsm8k" / "snapshots" / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=name) for name in names])
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, repo, **more: found)
    assert split_patterns("openai/gsm8k:main", "data")[0] == f"openai/gsm8k@{COMMIT}:main/train*.parquet"
    assert wanted == [[names[1]]]

    def unreachable(self: object, repo: str, **more: Any) -> Any:
        raise RuntimeError("the HTTP library's own error")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    assert rows_of("openai/gsm8k:main") == ROWS
    assert wanted[-1] == "the cache"
