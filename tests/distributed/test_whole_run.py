"""`proximo train --ranks 2`: a whole run, ended and resumed by another number of processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

pytestmark = pytest.mark.scale
ROOT = Path(__file__).parents[2]
SMALL = "--algorithm ppo --training.groups 4 --training.group-size 4 --training.minibatches 2 --evaluation.problems 8"


def train(folder: Path, *arguments: str) -> list[dict[str, float]]:
    """The rows of metrics.jsonl after a run."""
    places = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "proximo.cli", "train", *SMALL.split(), "--run", str(folder), *arguments]
    done = subprocess.run(
        command, env={**os.environ, **places}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_two_ranks_is_that_of_one_process_and_can_be_resumed_by_one(tmp_path):
    plain = train(tmp_path / "plain", "--steps", "3")
    begun = train(tmp_path / "ranks", "--steps", "2", "--ranks", "2")
    resumed = train(tmp_path / "ranks", "--steps", "3", "--allow-change", "steps")
    names = ("sampled_tokens", "reward", "gradient_norm", "value_loss", "policy_loss")
    for ours, theirs in [*zip(begun[:3], plain[:3], strict=True), (resumed[-2], plain[-2])]:
        for name in set(names) & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), (name, theirs["step"])
    assert (tmp_path / "ranks" / "checkpoints" / "step-000003" / "config.json").exists()


def test_episodes_of_several_turns_are_those_of_one_process(tmp_path):
    world = "--environment.type MultiTurn --environment.path tests.environments.worlds:Parity"
    options = [*world.split(), "--environment.max-turn-tokens", "3", "--sampling.max-tokens", "24", "--steps", "2"]
    plain, ranks = train(tmp_path / "plain", *options), train(tmp_path / "ranks", *options, "--ranks", "2")
    names = ("sampled_tokens", "reward", "gradient_norm", "policy_loss")
    for ours, theirs in zip(ranks, plain, strict=True):
        for name in set(names) & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), (name, theirs["step"])
    turns = parquet.read_table(tmp_path / "ranks" / "rollouts" / "step-000001.parquet")["turns"].to_pylist()
    assert max(len(json.loads(each)) for each in turns) > 2
