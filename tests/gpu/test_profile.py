"""A profile on a GPU: the same bytes, steps in their parts, and kernels by phase."""

import gzip
import json
from dataclasses import replace

import pytest
import torch
from tests.gpu.test_sampling import OPTIONS, REQUESTS, on_gpu
from tests.rl.test_profiling import config, run_in  # noqa: F401 -- a fixture  # pyright: ignore[reportUnusedImport]

from proximo.models import tiny_tokenizer
from proximo.rl.phase_marks import PhaseMarks
from proximo.runs.step_profile import read_profile
from proximo.samplers.embedded.sampler import EmbeddedSampler
from proximo.system.phases import watched

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_steps_in_their_parts_draw_the_same():
    """Whole steps are captured in the first two calls, parts in the next two, and all of them are replayed."""
    sampler = EmbeddedSampler(on_gpu(torch.bfloat16), tiny_tokenizer(), slots=10)
    whole = [sampler.sample(REQUESTS, OPTIONS, seed=0, step=step) for step in range(3)]
    with watched(marks := PhaseMarks(torch.device("cuda"))):
        parts = [sampler.sample(REQUESTS, OPTIONS, seed=0, step=step) for step in range(3)]
    again = [sampler.sample(REQUESTS, OPTIONS, seed=0, step=step) for step in range(3)]
    assert whole == parts == again
    spans = marks.end()
    seconds = {
        name: sum(each.seconds for each in spans if each.path[-1:] == (name,)) for name in ("decoding", "head and draw")
    }
    assert all(each > 0 for each in seconds.values())


def test_a_profile_of_a_run(config, tmp_path):  # noqa: F811
    config = replace(config, device="cuda")
    run_in(tmp_path / "plain", config)
    run_in(tmp_path / "profiled", config, profile=2)
    for name in ("metrics.jsonl", "ledger.jsonl", "rollouts/step-000005.parquet"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "profiled" / name).read_bytes()
    profile = read_profile(tmp_path / "profiled")
    assert profile is not None
    assert (profile.device, profile.steps, profile.traced, profile.remark) == ("cuda", (3, 4), 5, "")
    busy = {each.path: each.busy for each in profile.phases}
    assert 0 < (busy["update", "backward"] or 0) <= 1
    assert any("rollout / decoding" in each.phase for each in profile.kernels)
    content = json.loads(gzip.decompress((tmp_path / "profiled" / "trace.json.gz").read_bytes()))
    assert {each["pid"] for each in content["traceEvents"]} == {1, 2}
