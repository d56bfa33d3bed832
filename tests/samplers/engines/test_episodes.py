"""Episodes of several turns on engines: each turn asks an engine behind the tokens of the turns before it."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from proximo.algorithms import GRPO
from proximo.losses import TokenTruncated
from proximo.rl.config import AheadOptions, RunConfig
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.ledger import check_ledger
from proximo.samplers.embedded import Embedded
from proximo.samplers.engines.options import Fleet
from tests.rl.test_episodes import config
from tests.runs.test_resume import Quiet

IN_FLIGHT = AheadOptions(1, switch="in_flight")


def rows(settings: RunConfig, folder: Path) -> list[dict]:
    """All completions of a run, by step, group and sample."""
    train(Run(settings, folder, Quiet()))
    assert check_ledger(folder).wrong == ()
    found = [row for path in sorted(folder.glob("rollouts/*.parquet")) for row in parquet.read_table(path).to_pylist()]
    return [row | {"turns": json.loads(row["turns"])} for row in found]


def assert_episodes(found: list[dict]) -> None:
    """Of several turns, in which what the environment said is not trained on and has no log-prob."""
    assert any(len(row["turns"]) > 2 for row in found)
    for row in found:
        quiet = [value for value, mine in zip(row["rollout_logprobs"], row["sampled"], strict=True) if not mine]
        assert not any(quiet)
        assert len(row["sampled"]) == len(row["tokens"]) == row["turns"][-1]["end"]


@pytest.mark.slow("starts engines")
@pytest.mark.usefixtures("small_shipped_model", "ordinary_precision")
def test_embedded_engines_play_what_the_embedded_sampler_plays(tmp_path):
    plain, ours = (
        rows(config(GRPO, sampler=sampler), tmp_path / type(sampler).__name__)
        for sampler in (Embedded(), Fleet(engine="embedded", engines=2, probe=4))
    )
    assert_episodes(ours)
    for name in ("tokens", "sampled", "turns", "reward"):
        assert [row[name] for row in ours] == [row[name] for row in plain], name
    for name in ("rollout_logprobs", "advantages"):
        for mine, theirs in zip(ours, plain, strict=True):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-5), name


@pytest.mark.scale
@pytest.mark.usefixtures("small_shipped_model", "ordinary_precision")
def test_weights_may_change_within_an_episode(tmp_path):
    algorithm = replace(GRPO, correct=TokenTruncated())
    fleet = Fleet(engine="embedded", engines=2, probe=4)
    assert_episodes(rows(config(algorithm, sampler=fleet, ahead=IN_FLIGHT, steps=3), tmp_path))
