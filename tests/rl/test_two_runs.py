"""Runs in one process do not know of each other: each writes the bytes that it writes alone."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proximo.algorithms import DAPO, PPO
from proximo.models import tiny_model, tiny_tokenizer
from proximo.models.adapters.lora import Lora
from proximo.models.torch_globals import OwnDraws, guarded
from proximo.models.values import OwnModel
from proximo.rewards import PythonFunction
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.options import CheckpointOptions
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks.arithmetic import Arithmetic
from proximo.tasks.echo import Echo

FUNCTION = """
import random

calls = 0

def judge(completions, **_):
    # Its own count shows whether another run has called it; what it draws, whether its seed is another's.
    global calls
    calls += 1
    if any(sum(map(ord, text)) % 9 == 4 for text in completions):
        raise KeyError("a text that it does not like")
    return [len(text) / 10 + random.random() + calls for text in completions]
"""


pytestmark = pytest.mark.usefixtures("ordinary_precision")


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> list[RunConfig]:
    """Two whole models of different widths in float32, and an adapter on the first of them in bfloat16."""
    folder = tmp_path_factory.mktemp("models")
    for name, hidden, seed in (("narrow", 32, 1), ("wide", 48, 2)):
        tiny_model(hidden=hidden, layers=2, heads=2, kv_heads=1, intermediate=64, seed=seed).save_pretrained(
            folder / name
        )
        tiny_tokenizer().save_pretrained(folder / name)
    (folder / "judging.py").write_text(FUNCTION)
    # One process: on a busy machine calls seem to wait, which gets a function more of them, each with its own count.
    judge = PythonFunction(f"{folder / 'judging.py'}:judge", memory_mb=512, at_once=1)
    first = RunConfig(
        algorithm=replace(DAPO, keep=PPO.keep),
        task=Echo(held_out=8),
        model=str(folder / "narrow"),
        device="cpu",
        sampling=SamplingOptions(max_tokens=6),
        training=TrainingOptions(groups=3, group_size=3, minibatches=1, learning_rate=1e-3),
        rewards=RewardMix(rules=(WeightedRule(judge),), max_unscored=1.0),
        evaluation=EvaluationOptions(problems=4),
        checkpoints=CheckpointOptions(every=2),
        steps=3,
        seed=3,
    )
    second = replace(
        first,
        algorithm=PPO,
        task=Arithmetic(held_out=8),
        model=str(folder / "wide"),
        value=ValueOptions(OwnModel()),
        rewards=RewardMix(rules=(WeightedRule(judge, weight=0.5),), max_unscored=1.0),
        steps=3,
        seed=4,
    )
    adapter = replace(
        first,
        adapter=Lora(rank=2),
        dtype="bfloat16",
        training=replace(first.training, groups=2, group_size=2),
        evaluation=EvaluationOptions(problems=1),
        steps=2,
        seed=5,
    )
    return [first, second, adapter]


def trained(config: RunConfig, folder: Path) -> dict[str, bytes]:
    train(Run(config, folder, ProgressLines()))
    return written(folder)


def written(folder: Path) -> dict[str, bytes]:
    """What the run wrote, by file."""
    kinds = (
        "metrics.jsonl",
        "ledger.jsonl",
        "rollouts/*",
        "checkpoints/*/*.safetensors",
        "checkpoints/*/*/*.safetensors",
    )
    files = sorted(path for kind in kinds for path in folder.glob(kind))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    told = [(each["step"], each["kind"], each["message"]) for each in events]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files} | {"told": repr(told).encode()}


@pytest.fixture(scope="module")
def alone(configs, tmp_path_factory) -> list[dict[str, bytes]]:
    """Each with torch's generator elsewhere, as other programs may leave it."""
    before, found = torch.get_rng_state(), []
    torch.set_default_dtype(torch.float32)
    for number, config in enumerate(configs):
        torch.manual_seed(100 + number)
        found.append(trained(config, tmp_path_factory.mktemp("alone") / str(number)))
        assert torch.equal(torch.get_rng_state(), torch.manual_seed(100 + number).get_state()), "it drew from torch"
    torch.set_rng_state(before)
    return found


def differing(found: list[dict[str, bytes]], alone: list[dict[str, bytes]]) -> list[str]:
    assert [each.keys() for each in found] == [each.keys() for each in alone]
    return [name for one, other in zip(found, alone, strict=True) for name in one if one[name] != other[name]]


@pytest.mark.slow("trains several runs")
def test_the_runs_are_worth_comparing(alone):
    for each in alone:
        assert {"metrics.jsonl", "ledger.jsonl"} < each.keys()
        assert any("model.safetensors" in name for name in each)
        assert any(name.startswith("rollouts/") for name in each)
        assert any("state/" in name for name in each)
    assert all(b"a text that it does not like" in each["told"] for each in alone[:2])
    assert "checkpoints/step-000002/adapter_model.safetensors" in alone[2]


@pytest.mark.slow("trains several runs")
def test_made_together_and_trained_one_after_the_other(configs, alone, tmp_path):
    runs = [Run(config, tmp_path / str(number), ProgressLines()) for number, config in enumerate(configs)]
    for run in reversed(runs):
        train(run)
    assert differing([written(tmp_path / str(number)) for number in range(len(configs))], alone) == []


@pytest.mark.slow("trains several runs")
def test_in_threads_at_the_same_time(configs, alone, tmp_path):
    found: dict[int, dict[str, bytes]] = {}
    failures: list[BaseException] = []
    at_once = threading.Barrier(len(configs))

    def work(number: int) -> None:
        try:
            at_once.wait()
            found[number] = trained(configs[number], tmp_path / str(number))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(configs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert differing([found[number] for number in range(len(configs))], alone) == []


@pytest.mark.slow("trains several runs")
def test_a_run_does_not_ask_for_the_default_dtype(configs, alone, tmp_path):
    """Another thread that loads a model in half precision changes it for as long as that takes."""
    for number, config in enumerate(configs):
        run = Run(config, tmp_path / str(number), ProgressLines())
        torch.set_default_dtype(torch.bfloat16)
        train(run)
        torch.set_default_dtype(torch.float32)
        assert (tmp_path / str(number) / "metrics.jsonl").read_bytes() == alone[number]["metrics.jsonl"]


def test_what_draws_from_torchs_generator_has_numbers_of_its_own():
    def drawn(draws: OwnDraws) -> list[float]:
        with draws.active():
            return torch.nn.functional.dropout(torch.ones(8), 0.5).tolist()

    cpu, before = torch.device("cpu"), torch.get_rng_state()
    first = OwnDraws(1, cpu)
    expected = [drawn(first) for _ in range(4)]
    one, other = OwnDraws(1, cpu), OwnDraws(2, cpu)
    found = []
    for _ in range(4):
        found.append(drawn(one))
        drawn(other)
        with guarded():
            torch.rand(3)
    assert found == expected
    resumed = OwnDraws(7, cpu)
    resumed.load(one.state())
    assert drawn(resumed) == drawn(one)
    assert torch.equal(torch.get_rng_state(), before)
