"""A rank that runs out of memory: all ranks are started again with the same smaller plan."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proximo.distributed.fitting import planned
from proximo.distributed.launching import NOTES, PLAN, launch, tightest
from proximo.distributed.policy import ShardedPolicy
from proximo.learner.passes import Passes
from proximo.learner.policy import PlainPolicy
from proximo.models import tiny_model
from tests.distributed.groups import ROOT
from tests.distributed.test_launching import started
from tests.distributed.test_whole_run import SMALL
from tests.rows import metrics_of


def plan(tokens: int, checkpointed: int = 0, offloaded: int = 0) -> dict[str, int]:
    return {"token_budget": tokens, "checkpointed": checkpointed, "offloaded": offloaded}


def test_ranks_keep_to_the_smallest_plan(monkeypatch):
    assert json.loads(tightest([plan(300), plan(200, 1), plan(250, 0, 1)])) == plan(200, 1, 1)
    passes = Passes(1.0, 250, checkpointed=2)
    assert planned(passes) == passes
    monkeypatch.setenv(PLAN, tightest([plan(200, 1, 1)]))
    assert planned(passes) == Passes(1.0, 200, checkpointed=2, offloaded=True)
    assert planned(Passes(1.0, 100)).token_budget == 100


@pytest.mark.slow("starts ranks")
def test_the_launcher_starts_all_again_with_what_a_rank_left(tmp_path):
    """More often than it restarts ranks that die, and no longer when nothing gets smaller."""
    code = (
        f"import json; plan = json.loads(os.environ['{PLAN}'] or '{{}}'); tokens = plan.get('token_budget', 64) // 2; "
        f"rank or time.sleep(0.1); tokens < 8 and sys.exit(0); rank == 0 and sys.exit(75); "
        f"left = {plan(0)} | {{'token_budget': tokens}}; "
        f"(pathlib.Path(os.environ['{NOTES}']) / '1').write_text(json.dumps(left)); "
        "sys.exit(76)"
    )
    status, said = started(code, tmp_path, restarts=0)
    assert status == 0
    assert [line.split(":")[0] for line in said] == ["rank 1 ran out of memory"] * 3
    assert [json.loads(line[line.index("{") :])["token_budget"] for line in said] == [32, 16, 8]
    stuck = f"(pathlib.Path(os.environ['{NOTES}']) / str(rank)).write_text('{json.dumps(plan(8))}'); sys.exit(76)"
    status, said = started(stuck, tmp_path, restarts=0)
    assert (status, len(said)) == (1, 2)
    assert said[1] == "rank 0, 1 ran out of memory: the run has ended"


def test_a_plan_is_for_the_rank_with_the_least_memory(monkeypatch):
    crew: Any = SimpleNamespace(
        size=2, mesh=SimpleNamespace(shard_size=2, rank=0, device=torch.device("cpu")), add=lambda **jobs: None
    )
    crew.tell = lambda job: [900, 700] if job == "free" else None
    policy = ShardedPolicy(PlainPolicy(tiny_model(layers=1, hidden=16)), crew)
    monkeypatch.setattr(PlainPolicy, "pending_bytes", 100)
    assert policy.pending_bytes == 50  # a CPU's passes are not planned
    monkeypatch.setattr("proximo.distributed.policy.is_planned_on", lambda device: True)
    assert policy.pending_bytes == 50 + 200


@pytest.mark.scale
def test_a_run_on_two_ranks_goes_on_when_one_of_them_has_less_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    said: list[str] = []
    arguments = [*SMALL.split(), "--steps", "2", "--ranks", "2", "--training.token-budget", "400"]
    command = [sys.executable, "-m", "tests.distributed.memory_cases"]
    for tokens in (20, 10_000):
        run = ["train", *arguments, "--run", str(tmp_path / str(tokens))]
        assert launch([*command, str(tokens), *run], 2, said.append) == 0
    assert said
    assert all(line.startswith("rank 1 ran out of memory") for line in said)
    small, whole = (metrics_of(tmp_path / name) for name in ("20", "10000"))
    for ours, theirs in zip(small, whole, strict=True):
        for name in {"gradient_norm", "policy_loss", "reward"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
