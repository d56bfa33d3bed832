"""Whole runs on engines."""

import json
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from proximo.algorithms import GRPO
from proximo.models.adapters.lora import Lora
from proximo.rl.config import AheadOptions, EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.ledger import check_ledger
from proximo.samplers.embedded import Embedded
from proximo.samplers.engines.fleet import FleetSampler
from proximo.samplers.engines.options import Fleet
from proximo.samplers.sampler import SamplingOptions
from tests.samplers.engines.vllm_servers import options


def trained(folder: Path, sampler, ahead: AheadOptions | None = None, adapter: Lora | None = None) -> Run:
    config = RunConfig(
        algorithm=GRPO,
        ahead=ahead or AheadOptions(),
        sampling=SamplingOptions(max_tokens=4),
        sampler=sampler,
        adapter=adapter,
        training=TrainingOptions(groups=3, group_size=4, minibatches=1, learning_rate=1e-3, warmup_steps=0),
        evaluation=EvaluationOptions(problems=4),
        steps=2,
    )
    run = Run(config, folder, ProgressLines())
    train(run)
    return run


def events(folder: Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def sampled(folder: Path) -> list:
    return [parquet.read_table(path)["tokens"].to_pylist() for path in sorted(folder.rglob("*.parquet"))]


def engines_of(run: Run) -> list:
    assert isinstance(run.samplers.training, FleetSampler)
    return run.samplers.training.roster.engines


@pytest.mark.slow("starts engines")
@pytest.mark.usefixtures("small_shipped_model")
def test_a_run_on_embedded_engines_is_the_run_without_them(tmp_path):
    trained(tmp_path / "plain", Embedded())
    run = trained(tmp_path / "fleet", Fleet(engine="embedded", engines=2, probe=4))
    pushes = events(tmp_path / "fleet", "push")
    assert [each["version"] for each in pushes] == [0, 1, 2]
    assert all(0 < each["gap"] <= 1e-5 and each["seconds"] > 0 for each in pushes)
    assert sampled(tmp_path / "fleet") == sampled(tmp_path / "plain") != []
    assert engines_of(run) == []  # stopped when the run ended
    _, row = (json.loads(line) for line in (tmp_path / "fleet" / "timeline.jsonl").read_text().splitlines())
    did = {(lane, kind) for lane, kind, *_ in row["intervals"]}
    assert did >= {(lane, kind) for lane in ("engine-0", "engine-1") for kind in ("push", "probe", "sample")}
    assert did >= {("learner", kind) for kind in ("push", "rollout", "update")}
    tokens = sum(numbers["tokens"] for lane, kind, _, _, numbers in row["intervals"] if kind == "sample")
    [stored] = [json.loads(line) for line in (tmp_path / "fleet" / "timings.jsonl").read_text().splitlines()][1:]
    assert (tokens, row["staleness"]) == (stored["tokens"], {"0": 3})
    assert not events(tmp_path / "fleet", "not_repeatable")


@pytest.mark.scale
@pytest.mark.parametrize("ahead", [None, AheadOptions(1, switch="in_flight", window=0.5)], ids=["plain", "in flight"])
def test_a_run_on_vllm(tmp_path, ahead):
    run = trained(tmp_path, options("gloo"), ahead)
    assert check_ledger(tmp_path).wrong == ()
    pushes = events(tmp_path, "push")
    assert [each["version"] for each in pushes] == [0, 1, 2]
    assert all(each["gap"] <= 1e-5 for each in pushes)
    assert engines_of(run) == []
    assert events(tmp_path, "not_repeatable")


@pytest.mark.scale
def test_a_run_that_pushes_its_adapter_to_vllm(tmp_path):
    """Completions in flight continue with the new adapter."""
    ahead = AheadOptions(1, switch="in_flight")
    run = trained(tmp_path, options("adapter"), ahead, Lora(rank=4))
    pushes = events(tmp_path, "push")
    assert [each["version"] for each in pushes] == [0, 1, 2]
    assert all(each["gap"] <= 1e-5 for each in pushes)
    assert check_ledger(tmp_path).wrong == ()
    assert engines_of(run) == []
