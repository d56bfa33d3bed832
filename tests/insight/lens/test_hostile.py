"""Rollouts of strangers, sealed again: small files that hold very much are refused in one line, by every reader."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from proximo.insight.lens.columns import RolloutColumns
from proximo.insight.lens.files import complaint, metadata_of
from proximo.insight.lens.steps import read_step
from proximo.insight.lens.turns import read_turns
from proximo.runs import rollout_files
from proximo.runs.rollout_files import opened, read_columns
from proximo.runs.tracking.source import completion_rows
from proximo.supervised.pairs import PairsConfig, write_pairs
from proximo.system.parquet import TableLimits
from proximo.system.sealing import seal

FACTS = {b"proximo": b'{"format": 3, "updates": []}'}


def sealed(path: Path, **columns) -> Path:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns).replace_schema_metadata(FACTS), path)
    seal(path)
    return path


def one_list(count: int) -> pa.Array:
    return pa.ListArray.from_arrays(np.array([0, count], dtype=np.int32), np.zeros(count, dtype=np.int8))


@pytest.fixture(params=["rows", "tokens", "text"])
def bomb(request, tmp_path, monkeypatch) -> Path:
    """A file of some thousand bytes: very many rows, a row of very many tokens, one long text in all rows."""
    monkeypatch.setattr(rollout_files, "FREE", TableLimits(rows=1 << 14, values=1 << 17, size=1 << 26))
    columns = {
        "rows": {"group": np.zeros(50_000, dtype=np.int8), "text": pa.nulls(50_000, pa.string())},
        "tokens": {"group": [0], "tokens": one_list(200_000)},
        "text": {
            "group": np.zeros(12_000, dtype=np.int8),
            "text": pa.DictionaryArray.from_arrays(np.zeros(12_000, dtype=np.int32), pa.array(["x" * 10_000])),
        },
    }[request.param]
    path = sealed(tmp_path / "rollouts" / "step-000000.parquet", **columns)
    assert path.stat().st_size < 100_000
    return path


def test_every_reader_refuses_a_file_that_holds_more_than_a_step_does(bomb, tmp_path):
    with bomb.open("rb") as file:
        readers = [
            lambda: read_step(bomb, 0),
            lambda: read_columns(bomb, ["text"]),
            lambda: completion_rows(bomb),
            lambda: RolloutColumns(file),
            lambda: metadata_of(file),
            lambda: opened(file),
            lambda: write_pairs(PairsConfig(str(tmp_path), str(tmp_path / "out.jsonl"))),
        ]
        for read in readers:
            with pytest.raises(ValueError, match=r"\A[^\n]* (rows|values|MiB), more than the [^\n]*\Z"):
                read()
    assert complaint(bomb) is None  # it is as it was written


def test_an_honest_step_is_far_from_the_limits(tmp_path):
    """512 completions of 4,096 tokens, of which each has some numbers."""
    count, random = 512 * 4096, np.random.default_rng(0)
    offsets = np.arange(0, count + 1, 4096, dtype=np.int32)
    numbers = {
        f"logprobs_{number}": pa.ListArray.from_arrays(offsets, random.random(count, dtype=np.float32))
        for number in range(3)
    }
    path = sealed(tmp_path / "step.parquet", group=np.zeros(512, dtype=np.int64), **numbers)
    assert path.stat().st_size * 16 > 4 * 3 * count  # as many values as it has, four times over
    with path.open("rb") as file:
        assert opened(file).metadata.num_rows == 512


@pytest.mark.parametrize("text", ["[" * 100_000, f'[{{"role": "a", "text": "b", "end": 1, "reward": 1{"0" * 400}}}]'])
def test_turns_that_no_run_writes_are_damage(text):
    with pytest.raises(ValueError, match="it is damaged"):
        read_turns([text], [5])
