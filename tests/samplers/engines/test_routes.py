"""Routes that engines say: those of the policy, in order, for every token that was read."""

import base64
import io
import json
import os
import sys
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from proximo.algorithms import GRPO
from proximo.models import tiny_tokenizer
from proximo.models.routing import router_layers
from proximo.models.tiny import tiny_moe
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.samplers.embedded import Embedded, local_sampler
from proximo.samplers.engines import building
from proximo.samplers.engines.command import RETURN_ROUTES, server_arguments
from proximo.samplers.engines.embedded import EmbeddedEngine
from proximo.samplers.engines.engine import Draw, EngineLost, Generated, Span
from proximo.samplers.engines.options import Fleet
from proximo.samplers.engines.vllm import VllmEngine
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks.echo import Echo
from proximo.types import Completion, Request
from proximo_lab.faults.engine_server import PLANTED, install
from tests import ROOT
from tests.samplers.engines.conformance import SmallPolicy

FREE = SamplingOptions(max_tokens=6)
PROMPT = (10, 20, 30, 7)


@pytest.fixture
def mixture() -> Qwen3MoeForCausalLM:
    return tiny_moe(hidden=32, layers=3, heads=2, kv_heads=1, experts=4, intermediate=16).requires_grad_(False)


def read(completion: Completion) -> torch.Tensor:
    """Routes of the prompt and of the completion."""
    assert completion.routes is not None
    assert completion.prompt_routes is not None
    return torch.cat([completion.prompt_routes, completion.routes])


def packed(rows: np.ndarray) -> str:
    written = io.BytesIO()
    np.save(written, rows)
    return base64.b64encode(written.getvalue()).decode()


def test_an_engine_of_this_process_says_the_routes_of_its_sampler(mixture):
    engine = EmbeddedEngine("engine", mixture, tiny_tokenizer(), record_routes=True)
    found = engine.generate(PROMPT, FREE, Draw(0, 0, 5, 0))
    sampler = local_sampler(mixture, tiny_tokenizer(), slots=1, record_routes=True)
    [(said,)] = sampler.sample([Request(5, PROMPT, 1)], FREE, seed=0, step=0)
    assert found.routes is not None
    assert torch.equal(found.routes, read(said)[:-1])


def test_a_continued_completion_keeps_what_was_read_first():
    def of(tokens: tuple[int, ...], rows: list[int] | None, finish: Literal["stop", "abort"] = "abort") -> Generated:
        routes = None if rows is None else torch.tensor(rows).reshape(-1, 1, 1)
        return Generated(tokens, (0.0,) * len(tokens), finish, (Span(1, 0, len(tokens)),), routes)

    begun = of((1, 2), [10, 11, 12])  # a prompt of two, and the first of two tokens
    whole = begun.continued(of((3,), [20, 21, 22, 23], "stop"))
    assert whole.routes is not None
    assert whole.routes.flatten().tolist() == [10, 11, 12, 23]
    at_once = begun.continued(of((), None)).continued(of((3,), [20, 21, 22, 23], "stop"))
    assert at_once.routes is not None
    assert at_once.routes.tolist() == whole.routes.tolist(), "an interruption before the first token changes nothing"
    unknown = of((1, 2), None).continued(of((3,), [20, 21, 22, 23], "stop"))
    assert unknown.routes is not None
    assert unknown.routes.flatten().tolist() == [20, 21, 22, 23], "read again by the engine that goes on"


def test_a_server_is_asked_for_routes_where_they_are_replayed():
    flags = {"dtype": "float32", "length": 64, "slots": 2, "sync": "folder", "tensor_parallel": 1, "adapter_rank": 0}
    assert RETURN_ROUTES in server_arguments("m", **flags, returns_routes=True)
    assert RETURN_ROUTES not in server_arguments("m", **flags, returns_routes=False)


def answering(monkeypatch, routes: str | None, finish: str = "stop") -> VllmEngine:
    """An engine for layers 0 and 2 whose server answers with two tokens and these routes."""
    engine = VllmEngine("engine-0", frozenset((1,)), url="http://nowhere", layers=(0, 2))
    choice = {"token_ids": [5, 1], "logprobs": None, "finish_reason": finish, "weight_versions": None}
    answer = {"choices": [choice | {"routed_experts": routes}]}
    monkeypatch.setattr(engine, "_answer", lambda *_: (200, json.dumps(answer).encode()))
    return engine


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_routes_are_those_of_the_layers_with_experts(monkeypatch, kind):
    rows = np.arange(5 * 3 * 2, dtype=kind).reshape(5, 3, 2)  # four tokens of a prompt and one that was read back
    found = answering(monkeypatch, packed(rows)).generate(PROMPT, FREE, Draw(0, 0, 0, 0))
    assert found.routes is not None
    assert found.routes.dtype == torch.int16
    assert found.routes.tolist() == rows[:, [0, 2]].tolist()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "does not say which experts tokens went to: start it with --enable-return-routed-experts, on a GPU"),
        (np.zeros((4, 3, 2), np.uint8), r"a table of \(4, 3, 2\), for 5 tokens that were read and 3 layers"),
        (np.zeros((5, 2, 2), np.uint8), r"a table of \(5, 2, 2\), for 5 tokens that were read and 3 layers"),
    ],
)
def test_a_server_that_says_no_routes_or_others_is_not_used(monkeypatch, rows, message):
    engine = answering(monkeypatch, None if rows is None else packed(rows))
    with pytest.raises(EngineLost, match=message):
        engine.generate(PROMPT, FREE, Draw(0, 0, 0, 0))


def test_an_interrupted_request_need_not_say_them(monkeypatch):
    found = answering(monkeypatch, None, "abort").generate(PROMPT, FREE, Draw(0, 0, 0, 0))
    assert found.routes is None


def test_layers_are_counted_over_all_of_the_model(mixture):
    assert router_layers(mixture) == [0, 1, 2]
    config = replace_config(mixture, mlp_only_layers=[1])
    assert router_layers(Qwen3MoeForCausalLM(config)) == [0, 2]


def replace_config(model: Qwen3MoeForCausalLM, **changes):
    return type(model.config)(**(model.config.to_dict() | changes))


def test_a_dense_model_has_none_to_say():
    policy = SmallPolicy()
    with pytest.raises(ValueError, match='routing_replay is "sampler".*no experts.*leave it out'):
        Fleet(engine="embedded").build(policy, policy.tokenizer, slots=1, record_routes=True)


def trained(folder, sampler) -> list[dict]:
    config = RunConfig(
        algorithm=replace(GRPO, kl=None),
        task=Echo(length=4, alphabet="abcdefghijklmnop", held_out=8),
        model="tiny-moe",
        routing_replay="sampler",
        sampling=SamplingOptions(max_tokens=6),
        sampler=sampler,
        training=TrainingOptions(groups=3, group_size=4, minibatches=1, learning_rate=1e-5, warmup_steps=0),
        evaluation=EvaluationOptions(problems=0),
        steps=2,
    )
    run = Run(config, folder, ProgressLines())
    train(run)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("outcome", "gradient_norm", "routing_drift")
    return [{name: row[name] for name in names} for row in rows if "outcome" in row]


@pytest.mark.slow("starts engines")
def test_a_run_that_replays_the_routes_of_engines_is_the_run_without_them(tmp_path):
    plain = trained(tmp_path / "plain", Embedded())
    assert plain == trained(tmp_path / "fleet", Fleet(engine="embedded", engines=2, probe=4))
    assert len(plain) == 2


def test_vllm_on_a_cpu_is_refused_before_it_starts(mixture):
    policy = Mixture(mixture)
    with pytest.raises(ValueError, match='on GPUs only: use "old_policy", or sampler.engine = "embedded"'):
        Fleet(python=sys.executable).build(policy, policy.tokenizer, slots=1, record_routes=True)


class Mixture(SmallPolicy):
    def __init__(self, model) -> None:
        self.model, self.tokenizer = model, tiny_tokenizer()


@pytest.mark.slow("starts engines")
def test_routes_reach_a_completion_from_a_server(tmp_path, monkeypatch, mixture):
    """From a process that answers as vLLM does."""
    servers = install(tmp_path / "servers")
    monkeypatch.syspath_prepend(str(servers))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(servers), str(ROOT), str(ROOT / "src")]))
    monkeypatch.setenv(PLANTED, str(tmp_path))
    monkeypatch.setattr(building, "SAY_ROUTES", ("cpu",))
    policy, greedy = Mixture(mixture), SamplingOptions(temperature=0.0, max_tokens=6)
    fleet = Fleet(engines=1, python=sys.executable, probe=4, deadline=60.0)
    built = fleet.build(policy, policy.tokenizer, slots=2, record_routes=True)
    try:
        built.training.refresh(policy, 1)
        stream = built.training.stream([Request(5, PROMPT, 1)], greedy, seed=0, step=0, version=1)
        [(_, (said,))] = list(stream)
    finally:
        built.close()
    [(ours,)] = local_sampler(mixture, tiny_tokenizer(), slots=1, record_routes=True).sample(
        [Request(5, PROMPT, 1)], greedy, seed=0, step=0
    )
    assert said.tokens == ours.tokens
    assert read(said).tolist() == read(ours).tolist()


def test_what_is_no_table_of_numbers_is_not_read(monkeypatch):
    """An array of objects would be unpickled."""
    written = io.BytesIO()
    np.save(written, np.array([{}], dtype=object), allow_pickle=True)
    objects, nothing = (base64.b64encode(each).decode() for each in (written.getvalue(), b"no array"))
    for packed_text in (objects, nothing, packed(np.full((5, 3, 2), 0.7))):
        with pytest.raises(EngineLost, match="says experts that cannot be read"):
            answering(monkeypatch, packed_text).generate(PROMPT, FREE, Draw(0, 0, 0, 0))
