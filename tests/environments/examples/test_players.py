"""The worlds `words` and `python`: what their models were taught, and how they play before they are trained."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proximo import Done, Observation, presets
from proximo.environments.examples import WordGuessing, calculate
from proximo.environments.examples.python import _sandbox
from proximo.models import load_tokenizer
from proximo.models.shipped import resolve
from proximo.processes.sandbox import Limits, NoSandbox, missing_mechanisms
from proximo.rl.config import RunConfig
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.tasks.guessing import PROMPTS
from proximo_lab.experiments.pretrain_player import CALL, END, program, word

WORLDS = {"words": presets.WORDS, "python": presets.PYTHON}


def read(config: RunConfig, *messages: tuple[str, str], tools: bool = False) -> list[str]:
    """Each message as the model's template writes it when nothing comes before it."""
    tokenizer = load_tokenizer(resolve(config.model))
    called: list[Any] | None = [{"type": "function", "function": {"name": "run_python"}}] if tools else None
    chats = [[{"role": role, "content": text}] for role, text in messages]
    texts = tokenizer.apply_chat_template(chats, tools=called, tokenize=False, add_generation_prompt=True)
    assert isinstance(texts, list)
    return [str(text) for text in texts]


def test_careful_games_are_those_of_the_world_and_always_won():
    draw, games = random.Random(0), []
    for _ in range(50):
        turns = word(draw, careless=0.0)
        game = WordGuessing()
        game.reset({"answer": turns[-1][1]})
        answers = [game.step(reply) for _, reply in turns]
        assert answers.pop() == Done(1.0)
        hints = [("user", each.text) for each in answers if isinstance(each, Observation)]
        games.append(([seen for seen, _ in turns], [("user", PROMPTS["word"]), *hints]))
    assert max(len(seen) for seen, _ in games) == 3
    for seen, messages in games[:5]:
        assert seen == read(presets.WORDS, *messages)


def test_careful_programs_print_the_answer():
    draw = random.Random(0)
    for _ in range(5):
        (asked, call), (printed, said) = program(draw, careless=0.0)
        code = call.removeprefix(f"{CALL}print(").removesuffix(f"){END}")
        assert calculate(code) == said
        assert [printed] == read(presets.PYTHON, ("tool", f"{said}\n"))
        question = asked.partition("<user>")[2].partition("<eos>")[0]
        assert [asked] == read(presets.PYTHON, ("user", question), tools=True)


@pytest.mark.slow("trains runs that play games")
@pytest.mark.usefixtures("ordinary_precision")
@pytest.mark.parametrize("name", WORLDS)
def test_a_model_plays_above_chance_and_below_the_ceiling_and_trains(name: str, tmp_path: Path):
    if name == "python" and missing_mechanisms():
        pytest.skip("no sandbox here")
    config = WORLDS[name]
    assert {preset.name: preset.config for preset in presets.PRESETS}[name] == config
    assert sum(path.stat().st_size for path in Path(resolve(config.model)).iterdir()) < 5_000_000
    small = replace(
        config,
        training=replace(config.training, groups=2, group_size=4),
        evaluation=replace(config.evaluation, problems={"words": 16, "python": 40}[name], samples=4),
        steps=2,
    )
    result = train(Run(small, tmp_path / name, ProgressLines()))
    assert result.before.mean_at_k is not None
    chance, ceiling = {"words": (0.12, 0.5), "python": (0.0, 0.4)}[name]
    assert chance < result.before.mean_at_k < ceiling


def test_without_a_sandbox_nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refuse(limits: Limits) -> None:
        raise NoSandbox("programs cannot be held in on this machine, so none is run")

    monkeypatch.setattr("proximo.processes.sandbox.running._way_in", refuse)
    _sandbox.cache_clear()
    with pytest.raises(NoSandbox, match="programs cannot be held in"):
        train(Run(replace(presets.PYTHON, steps=1), tmp_path / "run", ProgressLines()))
    assert not (tmp_path / "run").exists()
