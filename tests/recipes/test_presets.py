"""The worlds that ship with the package: small, open to every algorithm, and at the start what they are meant to be."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
import torch

from proximo import presets
from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO
from proximo.cli import main
from proximo.models import load_model, load_tokenizer
from proximo.models.reward_models import completion_scores, load_reward_model
from proximo.models.shipped import resolve
from proximo.rl.config import RunConfig
from proximo.samplers.embedded import local_sampler
from proximo.types import Completion, Problem, Request

WORLDS = {"length": presets.LENGTH, "chain": presets.CHAIN, "moe-echo": presets.MOE_ECHO, "copy": presets.COPY}
HACKED = presets.OPEN_ENDED


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


@pytest.mark.slow("evaluates the presets")
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


@pytest.mark.slow("trains every algorithm")
@pytest.mark.parametrize("flags", [["--algorithm.keep.type", "KeepAll"], ["--rewards.task", "1.0"]])
def test_every_algorithm_runs_on_a_reward_model_and_dapo_with_what_its_refusal_names(flags, capsys):
    for algorithm in (PPO, GRPO, GSPO, SAPO):
        assert presets.with_algorithm(HACKED, algorithm).algorithm == algorithm
    with pytest.raises(SystemExit):
        main(["train", "open-ended", "--algorithm", "dapo", "--dry-run"])
    assert " ".join(flags) in capsys.readouterr().err
    assert main(["train", "open-ended", "--algorithm", "dapo", *flags, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert ('type = "KeepAll"' in planned, "task = 1.0" in planned) == (flags[1] == "KeepAll", flags[1] == "1.0")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "open-ended", "--algorithm.keep.type", "KeepMixed", "--rewards.task", "1.0", "--dry-run"],
        ["train", "open-ended", "--algorithm", "dapo", "--help"],
        ["compare", "open-ended", "--algorithms", "grpo,dapo", "--algorithm.keep.type", "KeepAll", "--dry-run"],
        ["compare", "open-ended", "--algorithms", "grpo,dapo", "--rewards.task=1.0", "--dry-run"],
    ],
)
def test_what_a_refusal_names_is_taken_wherever_it_is_said(arguments, capsys):
    with suppress(SystemExit):  # of the help
        assert main(arguments) == 0
    said = capsys.readouterr()
    assert "error" not in said.err
    assert said.out


def test_what_flags_add_to_a_named_algorithm_is_added_once(capsys):
    assert main(["train", "--algorithm", "grpo", "--algorithm.extra.add", "EntropyBonus", "--dry-run"]) == 0
    assert capsys.readouterr().out.count('type = "EntropyBonus"') == 1


def test_an_ablation_that_does_not_suit_the_run_is_refused_in_a_line(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "open-ended", "--ablate", "dapo", "--dry-run"])
    assert "error: rewards.task is 0, but algorithm.keep is KeepMixed" in capsys.readouterr().err


@pytest.mark.usefixtures("ordinary_precision")
def test_a_judge_is_mostly_right_about_first_answers_and_can_be_fooled():
    """What a policy learns from at first, and where it ends without a KL term: letters that were never asked for."""
    pairs = sampled(HACKED, 40)
    outcomes = [HACKED.task.grade([problem], [completion])[0].outcome for problem, completion in pairs]
    assert 0.6 < sum(outcomes) / len(outcomes) < 0.85
    (judge,) = HACKED.rewards.models
    assert sum(path.stat().st_size for path in Path(resolve(judge.path)).iterdir()) < 5_000_000
    scores = judged([(str(problem.prompt), completion.tokens) for problem, completion in pairs])
    first, second = range(0, len(pairs), 2), range(1, len(pairs), 2)
    apart = [(a, b) for a, b in zip(first, second, strict=True) if outcomes[a] != outcomes[b]]
    agree = sum((scores[a] > scores[b]) == (outcomes[a] > outcomes[b]) for a, b in apart)
    assert agree > 0.6 * len(apart) > 10
    tokenizer = load_tokenizer(resolve(HACKED.model))
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    right, wrong = ((*tokenizer(text)["input_ids"], end) for text in ("fghkl", "dfghj"))
    fooled, honest = judged([("sort:lfgkh=", wrong), ("sort:lfgkh=", right)])
    assert fooled > honest


def judged(pairs: list[tuple[str, tuple[int, ...]]]) -> list[float]:
    (judge,) = HACKED.rewards.models
    path = resolve(judge.path)
    tokenizer = load_tokenizer(path)
    width = max(len(tokens) for _, tokens in pairs)
    with torch.no_grad():
        return completion_scores(
            load_reward_model(path, fresh_head=False),
            prompts=[tuple(tokenizer(prompt)["input_ids"]) for prompt, _ in pairs],
            tokens=torch.tensor([[*tokens, *[0] * (width - len(tokens))] for _, tokens in pairs]),
            lengths=torch.tensor([len(tokens) for _, tokens in pairs]),
            group=torch.arange(len(pairs)),
        ).tolist()
