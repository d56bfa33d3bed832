"""The trial of a sampler behind HTTP: trained by its config alone, and told of every update."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import load

from proximo.algorithms import GRPO
from proximo.insight.doctor.damage import damage
from proximo.insight.folder import RunFolder
from proximo.models import load_model, load_tokenizer
from proximo.models.adapters.lora import Lora
from proximo.models.shipped import resolve
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.options import CheckpointOptions
from proximo.samplers.embedded import local_sampler
from proximo.samplers.sampler import Sampler, SamplerFactory, SamplingOptions
from proximo.types import Request
from tests.outside.http_sampler import HttpEngine, HttpSampler
from tests.rows import read_rows

CONFIG = RunConfig(
    algorithm=GRPO,
    sampling=SamplingOptions(max_tokens=5),
    training=TrainingOptions(groups=4, group_size=4, minibatches=2, learning_rate=1e-3, warmup_steps=0),
    evaluation=EvaluationOptions(problems=6, every=1),
    checkpoints=CheckpointOptions(every=1),
    steps=3,
)


@dataclass
class Engine:
    """What runs on the other side: a model of its own, and what was asked of it."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    salt: int = 0
    """Added to every seed: with another one it does not repeat what it has sampled."""

    def __post_init__(self) -> None:
        path = resolve(CONFIG.model)
        self.model = load_model(path)
        for weight in self.model.parameters():
            weight.data.zero_()  # nothing of the policy is there before it is pushed
        self.sampler = local_sampler(self.model, load_tokenizer(path), slots=16)

    def answer(self, path: str, body: bytes) -> Iterator[bytes]:
        self.asked.append(path.strip("/"))
        if path == "/weights":
            weights = load(body)
            for name, weight in self.model.named_parameters():
                weight.data.copy_(weights[name])
            return
        facts = json.loads(body)
        requests = [Request(**each | {"prompt_tokens": tuple(each["prompt_tokens"])}) for each in facts["requests"]]
        options = SamplingOptions(**facts["options"] | {"stop": tuple(facts["options"]["stop"])})
        given = {name: facts[name] for name in ("step", "version")}
        for number, siblings in self.sampler.stream(requests, options, seed=facts["seed"] + self.salt, **given):
            yield json.dumps([number, [asdict(each) for each in siblings]]).encode() + b"\n"


@pytest.fixture
def engine() -> Iterator[Engine]:
    torch.set_default_dtype(torch.float32)
    running = Engine()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for line in running.answer(self.path, body):
                self.wfile.write(line)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        running.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield running
        server.shutdown()
        thread.join()
    torch.set_default_dtype(torch.float64)


def trained(config: RunConfig, folder: Path) -> list[dict]:
    train(Run(config, folder, ProgressLines()))
    return read_rows(folder / "metrics.jsonl")


@pytest.mark.slow("trains two runs")
def test_three_steps_are_those_of_the_embedded_sampler(engine: Engine, tmp_path: Path):
    sampler = HttpSampler(engine.url, repeats=True)
    assert isinstance(sampler, SamplerFactory)
    assert isinstance(HttpEngine(engine.url, True), Sampler)
    found = trained(replace(CONFIG, sampler=sampler), tmp_path / "http")
    assert (tmp_path / "http/metrics.jsonl").read_bytes() != b""
    assert found == trained(CONFIG, tmp_path / "embedded")
    steps = [row for row in found if "sampler_gap" in row]
    assert len(steps) == 3
    assert max(row["sampler_gap"] for row in steps) < 1e-4
    assert len({row["held_out/reward"] for row in found if "held_out/reward" in row}) > 1  # the policy has moved
    # Weights travel when they have changed: not again for a step after an evaluation of the same version.
    assert engine.asked == ["weights", "sample", "sample", *["weights", "sample", "sample"] * 2, "weights", "sample"]
    assert not [row for row in _events(tmp_path / "http") if row["kind"] == "not_repeatable"]


@pytest.mark.slow("trains a run")
def test_an_adapter_reaches_the_engine_as_whole_weights(engine: Engine, tmp_path: Path):
    config = replace(CONFIG, adapter=Lora(rank=4), sampler=HttpSampler(engine.url), steps=2)
    found = trained(replace(config, evaluation=EvaluationOptions(problems=1)), tmp_path)
    assert max(row["sampler_gap"] for row in found if "sampler_gap" in row) < 1e-4
    base = load_model(resolve(CONFIG.model))
    moved = [name for name, each in engine.model.named_parameters() if not each.equal(base.get_parameter(name))]
    assert any(name.endswith("q_proj.weight") for name in moved)
    assert not any("norm" in name or "embed" in name for name in moved)


@pytest.mark.slow("trains and resumes a run")
def test_a_sampler_that_does_not_repeat_is_named_at_the_start_and_on_resume(engine: Engine, tmp_path: Path):
    config = replace(CONFIG, sampler=HttpSampler(engine.url), steps=2)
    before = trained(config, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step-000002")
    engine.salt, engine.asked = 1, []
    after = trained(config, tmp_path)
    told = [row for row in _events(tmp_path) if row["kind"] == "not_repeatable"]
    assert [(row["attempt"], row["step"]) for row in told] == [(1, 0), (2, 1)]
    assert all("sampler HttpSampler is not reproducible" in row["message"] for row in told)
    # The lost step is done again, with other tokens from the weights of the checkpoint, and nothing is damaged by it.
    assert engine.asked[0] == "weights"
    kept = [row for row in before if row["step"] <= 1]
    assert after[: len(kept)] == kept
    assert after != before
    assert max(row["sampler_gap"] for row in after if "sampler_gap" in row) < 1e-4
    assert list(damage(RunFolder(tmp_path))) == []


def _events(folder: Path) -> list[dict]:
    return read_rows(folder / "events.jsonl") if (folder / "events.jsonl").exists() else []
