"""The worlds that ship with the package: small, open to every algorithm, and at the start what they are meant to be."""

from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest

from proximo import presets
from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO
from proximo.models import load_model, load_tokenizer
from proximo.models.shipped import resolve
from proximo.samplers.embedded import local_sampler
from proximo.training.config import RunConfig
from proximo.types import Completion, Problem, Request

WORLDS = {"length": presets.LENGTH, "chain": presets.CHAIN, "moe-echo": presets.MOE_ECHO, "copy": presets.COPY}


def sampled(config: RunConfig, problems: int) -> list[tuple[Problem, Completion]]:
    """Two completions of each of some held-out problems."""
    path = resolve(config.model)
    tokenizer = load_tokenizer(path)
    asked = [config.task.problem(index, "held_out", 0) for index in range(problems)]
    requests = [
        Request(index, tuple(tokenizer(str(problem.prompt))["input_ids"]), 2) for index, problem in enumerate(asked)
    ]
    found = local_sampler(load_model(path, device="cpu"), tokenizer).sample(requests, config.sampling, seed=0, step=0)
    return [(problem, each) for problem, siblings in zip(asked, found, strict=True) for each in siblings]


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_is_a_preset_of_every_algorithm_with_a_small_model(name):
    config = WORLDS[name]
    assert {preset.name: preset.config for preset in presets.PRESETS}[name] == config
    for algorithm in (PPO, GRPO, DAPO, GSPO, SAPO):
        assert presets.with_algorithm(config, algorithm).algorithm == algorithm
    assert sum(path.stat().st_size for path in Path(resolve(config.model)).iterdir()) < 5_000_000


@pytest.mark.usefixtures("ordinary_precision")
@pytest.mark.parametrize("name", WORLDS)
def test_a_world_is_neither_solved_nor_hopeless_at_the_start(name):
    config = WORLDS[name]
    pairs = sampled(config, 30)
    right = sum(config.task.grade([problem], [completion])[0].outcome for problem, completion in pairs)
    assert 0.1 < right / len(pairs) < 0.7


@pytest.mark.usefixtures("ordinary_precision")
def test_lengths_differ_and_are_known_before_the_sum():
    """With any limit some completions are cut, and those that are not restate the problem behind their filler."""
    pairs = sampled(replace(presets.LENGTH, sampling=replace(presets.LENGTH.sampling, max_tokens=64)), 30)
    assert stdev(len(completion.tokens) for _, completion in pairs) > 12
    assert 0.05 < sum(completion.finish == "length" for _, completion in pairs) / len(pairs) < 0.45
    ended = [(problem, completion) for problem, completion in pairs if completion.finish == "stop"]
    assert sum(str(problem.prompt) in completion.text for problem, completion in ended) > 0.8 * len(ended)
