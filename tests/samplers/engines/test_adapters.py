"""LoRA adapters that reach vLLM as adapters, and what is refused."""

from collections.abc import Iterator

import pytest
import torch

from proximo.models.adapters.lora import Lora, add_lora, merged_weights
from proximo.samplers.engines.adapters import AdapterFolder, base_weights, pushed_rank
from proximo.samplers.engines.building import build_fleet
from proximo.samplers.engines.command import server_arguments
from proximo.samplers.engines.embedded import EmbeddedEngine
from proximo.samplers.engines.engine import Draw, EngineLost
from proximo.samplers.engines.options import Fleet
from proximo.samplers.engines.probe import LogprobProbe
from proximo.samplers.engines.sync import Folder
from proximo.samplers.engines.vllm import VllmEngine
from proximo.samplers.sampler import SamplingOptions
from tests.samplers.engines.conformance import Bench, SmallPolicy, nudge
from tests.samplers.engines.vllm_servers import DEADLINE, one_engine, options


class AdaptedPolicy(SmallPolicy):
    """With an adapter of rank 4 that changes something."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = {name: each.clone() for name, each in self.model.named_parameters()}
        add_lora(self.model, Lora(rank=4), base="tiny-arithmetic", seed=0)
        with torch.no_grad():
            for name, each in self.model.named_parameters():
                if "lora_B" in name:
                    each.add_(0.02)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return merged_weights(self.model)


def test_engines_start_with_what_is_under_the_adapter():
    policy = AdaptedPolicy()
    found = dict(base_weights(policy.model))
    assert found.keys() == policy.whole.keys() == dict(policy.weights()).keys()
    assert all(torch.equal(found[name], each) for name, each in policy.whole.items())
    assert pushed_rank(policy.model) == 4
    flags = {"dtype": "float32", "length": None, "slots": 1, "sync": "adapter", "tensor_parallel": 1}
    arguments = server_arguments("m", **flags, adapter_rank=4, returns_routes=False)
    assert arguments[arguments.index("--max-lora-rank") + 1] == "8"
    assert "--weight-transfer-config" not in arguments
    assert "--enable-lora" not in server_arguments("m", **flags, adapter_rank=0, returns_routes=False)


@pytest.mark.slow("starts an engine")
def test_an_engine_of_this_process_takes_weights_with_the_adapter_added(tmp_path):
    policy, sync = AdaptedPolicy(), Folder(tmp_path)
    engine = EmbeddedEngine("engine-0", policy.model, policy.tokenizer)
    nudge(policy.model, 1, only="lora_")
    probe = LogprobProbe(policy.model, 16)
    assert not probe.passes(probe.compare(policy, probe.ask(engine, 0)))
    assert sync.push([engine], policy.weights, 1, 60.0) == {}
    assert probe.passes(probe.compare(policy, probe.ask(engine, 1)))


def test_what_cannot_be_pushed_is_refused(tmp_path):
    policy = SmallPolicy()
    fleet = Fleet(sync="adapter", urls=("http://127.0.0.1:9",))
    with pytest.raises(ValueError, match='sampler.sync is "adapter", but no adapter is trained'):
        build_fleet(fleet, policy, policy.tokenizer, slots=1)
    with pytest.raises(ValueError, match='sampler.engine is "embedded"'):
        Fleet(engine="embedded", sync="adapter")


class Answers(VllmEngine):
    """Answers without a server."""

    def __init__(self, status: int) -> None:
        super().__init__("engine-0", frozenset(), url="http://127.0.0.1:9")
        self.status, self.asked = status, []

    def _answer(self, method, path, body, deadline):
        self.asked.append((path, dict(body or {})))
        return self.status, b"Success"


def test_a_server_without_lora_is_refused_by_name(tmp_path):
    sync = AdapterFolder(tmp_path, AdaptedPolicy().model)
    with pytest.raises(EngineLost, match="engine-0 .*--enable-lora and VLLM_ALLOW.*start it with both"):
        sync.join(Answers(404), 1.0)
    sync.join(Answers(400), 1.0)


def test_an_adapter_has_a_name_of_its_own_and_the_one_before_is_unloaded(tmp_path):
    sync, engine = AdapterFolder(tmp_path, AdaptedPolicy().model), Answers(200)
    for version in (1, 2):
        assert sync.push([engine], dict, version, 1.0) == {}  # pyright: ignore[reportArgumentType]
    (_, first), (_, second), (path, unloaded) = engine.asked
    assert first["lora_name"] != second["lora_name"]
    assert (path, unloaded) == ("/v1/unload_lora_adapter", {"lora_name": first["lora_name"]})
    assert engine.version() == 2
    assert [each.name for each in tmp_path.iterdir()] == [second["lora_path"].rpartition("/")[2]]
    failed = sync.push([Answers(500)], dict, 3, 1.0)  # pyright: ignore[reportArgumentType]
    assert "load_lora_adapter was answered with 500" in failed["engine-0"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[Bench]:
    policy = AdaptedPolicy()
    sync = AdapterFolder(tmp_path_factory.mktemp("adapters"), policy.model)
    fleet = build_fleet(options("adapter"), policy, policy.tokenizer, slots=8)
    [engine] = fleet.roster.missing()
    try:
        engine.start(DEADLINE)
        sync.join(engine, DEADLINE)
        yield Bench(engine, sync, policy, 60.0)
    finally:
        fleet.close()


@pytest.mark.scale
def test_the_probe_finds_the_adapter_after_every_push(bench: Bench):
    probe = LogprobProbe(bench.policy.model, 64)
    for number in range(3):
        nudge(bench.policy.model, number, only="lora_")
        stale = probe.compare(bench.policy, probe.ask(bench.engine, bench.version))
        bench.push()
        gap = probe.compare(bench.policy, probe.ask(bench.engine, bench.version))
        print("adapter:", gap, "| before the push", stale)
        assert probe.passes(gap)
        assert not probe.passes(stale)
    found = bench.engine.generate(bench.prompt(), SamplingOptions(max_tokens=4), Draw(0, 0, 0, 0))
    assert {span.version for span in found.spans} == {bench.version}


@pytest.mark.scale
def test_a_server_that_takes_whole_weights_takes_no_adapter():
    policy = SmallPolicy()
    fleet, engine = one_engine(policy, "folder")
    try:
        engine.start(DEADLINE)
        with pytest.raises(EngineLost, match="without --enable-lora"):
            engine.check_adapters(60.0)
    finally:
        fleet.close()
