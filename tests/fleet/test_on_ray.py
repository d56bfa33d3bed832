"""Engines that Ray places on nodes."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from proximo.fleet.options import Fleet
from tests import ROOT
from tests.fleet.conformance import SmallPolicy


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    policy = SmallPolicy()
    with pytest.raises(ValueError, match='sampler.cluster is "ray".* pip install "proximo\\[ray\\]"'):
        Fleet(cluster="ray").build(policy, policy.tokenizer, slots=1, record_routes=False)


@pytest.mark.scale
def test_the_engine_of_a_node_that_is_lost_starts_again_on_another(tmp_path):
    python = os.environ.get("PROXIMO_RAY_PYTHON") or sys.executable
    if python == sys.executable and importlib.util.find_spec("ray") is None:
        pytest.skip("PROXIMO_RAY_PYTHON names no Python with Ray")
    places = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    # A cluster of a test sees a lost node after seconds, not minutes.
    places |= {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
    command = [python, "-m", "tests.fleet.ray_cases", str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, **places}, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert (tmp_path / "result.json").exists(), done.stderr[-3000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["versions"] == [1, 1, 1, 2, 2]
    assert found["events"] == ["push", "engine_lost", "push"]
    assert len(set(found["first"])) == 2
    [then] = found["then"]
    assert then not in found["first"]
    assert found["servers"] == 3
