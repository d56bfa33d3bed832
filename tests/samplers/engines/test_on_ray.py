"""Engines that Ray places on nodes."""

import sys

import pytest

from proximo.samplers.engines.options import Fleet
from tests.ray_clusters import run_cases
from tests.samplers.engines.conformance import SmallPolicy


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    policy = SmallPolicy()
    with pytest.raises(ValueError, match='sampler.cluster is "ray".* pip install "proximo\\[ray\\]"'):
        Fleet(cluster="ray").build(policy, policy.tokenizer, slots=1, record_routes=False)


@pytest.mark.scale
def test_the_engine_of_a_node_that_is_lost_starts_again_on_another(tmp_path):
    found = run_cases("tests.samplers.engines.ray_cases", tmp_path, seconds=900)
    assert found["versions"] == [1, 1, 1, 2, 2]
    assert found["events"] == ["push", "engine_lost", "push"]
    assert len(set(found["first"])) == 2
    [then] = found["then"]
    assert then not in found["first"]
    assert found["servers"] == 3
