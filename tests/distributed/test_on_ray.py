"""Ranks that Ray places on nodes."""

import sys

import pytest

from proximo.distributed.on_ray import starting
from proximo.learner.ranks import Ranks
from tests.ray_clusters import run_cases


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match='ranks.cluster is "ray".* pip install "proximo\\[ray\\]"'):
        starting(Ranks(processes=2, cluster="ray")).__enter__()
    with starting(Ranks(processes=2)) as start:
        assert start is None


def test_an_address_is_for_ray_alone():
    with pytest.raises(ValueError, match="ranks.address is '10.0.0.1:6379'.*ranks.cluster"):
        Ranks(processes=2, address="10.0.0.1:6379")


@pytest.mark.scale
def test_a_node_that_is_lost_starts_all_ranks_again_on_the_others(tmp_path):
    found = run_cases("tests.distributed.ray_cases", tmp_path, seconds=500)
    assert found["status"] == 3
    assert found["said"] == [
        "rank 1 was ended by SIGKILL: all are started again from the newest checkpoint, 3 times at most"
    ]
    nodes = {name: (tmp_path / f"rank-{name}").read_text() for name in ("0-0", "1-0", "0-1", "1-1")}
    assert len({nodes["0-0"], nodes["1-0"]}) == len({nodes["0-1"], nodes["1-1"]}) == 2
    assert nodes["1-0"] not in (nodes["0-1"], nodes["1-1"])
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]
