"""vLLM passes the suite that any engine must pass, and the probe finds what is planted in it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from proximo.samplers.engines.engine import Draw, EngineLost
from proximo.samplers.engines.probe import Gap, LogprobProbe
from proximo.samplers.engines.sync import Folder, Gloo
from proximo.samplers.sampler import SamplingOptions
from tests.samplers.engines.conformance import Bench, EngineConformance, SmallPolicy, nudge
from tests.samplers.engines.vllm_servers import DEADLINE, one_engine, plant_fault

pytestmark = pytest.mark.scale


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield plant_fault(tmp_path_factory.mktemp("planted"), patch)


@pytest.fixture(scope="module")
def bench(planted, tmp_path_factory) -> Iterator[Bench]:
    policy = SmallPolicy()
    (fleet, engine), sync = one_engine(policy, "folder"), Folder(tmp_path_factory.mktemp("weights"))
    try:
        engine.start(DEADLINE)
        sync.join(engine, DEADLINE)
        yield Bench(engine, sync, policy, 60.0)
    finally:
        fleet.close()


def gap_of(bench: Bench) -> Gap:
    probe = LogprobProbe(bench.policy.model, 64)
    return probe.compare(bench.policy, probe.ask(bench.engine, bench.version))


class TestPlanted:
    """Before the suite, whose last test ends the engine."""

    def test_a_stale_head_fails_the_probe(self, bench: Bench, planted: Path):
        bench.push()
        right = gap_of(bench)
        nudge(bench.policy.model, 1)
        planted.touch()
        bench.push()
        stale = gap_of(bench)
        planted.unlink()
        bench.push()
        print("stale head:", right, "|", stale, "|", gap_of(bench))
        assert bench.engine.version() == bench.version
        assert right.mean <= 1e-5
        assert stale.mean > 1e-3
        assert gap_of(bench).mean <= 1e-5

    def test_a_cache_that_outlives_its_weights_fails_the_probe(self, bench: Bench):
        bench.push()
        gap_of(bench)  # the probe's prompts are in the cache
        nudge(bench.policy.model, 2)
        bench.version += 1
        engine = bench.engine
        engine._ask("POST", "/pause?mode=keep&clear_cache=false", {}, 60)  # pyright: ignore[reportAttributeAccessIssue]
        bench.sync.push([engine], bench.policy.weights, bench.version, 60)
        engine.resume(60)
        stale = gap_of(bench)
        bench.push()
        print("stale cache:", stale, "|", gap_of(bench))
        assert stale.mean > 1e-3
        assert gap_of(bench).mean <= 1e-5

    def test_half_of_the_weights_fail_the_probe(self, bench: Bench):
        bench.push()
        nudge(bench.policy.model, 3)
        bench.engine.pause("abort", 60)
        named = [(name, each) for name, each in bench.policy.weights() if "layers.1." not in name]
        assert bench.sync.push([bench.engine], lambda: iter(named), bench.version, 60) == {}
        bench.engine.resume(60)
        half = gap_of(bench)
        bench.push()
        print("half:", half, "|", gap_of(bench))
        assert half.mean > 1e-3
        assert gap_of(bench).mean <= 1e-5

    def test_a_request_in_flight_has_a_span_for_each_version(self, bench: Bench):
        bench.push()
        options = SamplingOptions(temperature=1.0, max_tokens=200)
        prompt = bench.prompt("12+7=")
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(bench.engine.generate, prompt, options, Draw(0, 0, 0, n)) for n in range(8)]
            bench.engine.pause("keep", 60)
            nudge(bench.policy.model, 4)
            bench.version += 1
            bench.sync.push([bench.engine], bench.policy.weights, bench.version, 60)
            bench.engine.resume(60)
            found = [each.result() for each in asked]
        for each in found:
            assert [span.start for span in each.spans[1:]] == [span.end for span in each.spans[:-1]]
            assert each.spans[-1].end == len(each.tokens)
            assert {span.version for span in each.spans} <= {bench.version - 1, bench.version}
        new = torch.cat(
            [bench.gaps(prompt, each)[each.spans[-1].start :] for each in found if each.version == bench.version]
        )
        assert not len(new) or new.mean() <= 1e-5


class TestVllm(EngineConformance):
    pass


def test_weights_over_gloo():
    policy = SmallPolicy()
    (fleet, engine), sync = one_engine(policy, "gloo"), Gloo()
    try:
        engine.start(DEADLINE)
        sync.join(engine, DEADLINE)
        bench = Bench(engine, sync, policy, 60.0)
        for number in range(3):
            nudge(policy.model, number)
            bench.push()
            print("gloo:", gap_of(bench))
            assert gap_of(bench).mean <= 1e-5
    finally:
        fleet.close()
    with pytest.raises(EngineLost):
        engine.version()
