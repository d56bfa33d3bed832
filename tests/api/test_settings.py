"""Settings by one word in Python."""

import inspect
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import proximo
from proximo.api.settings import WITHOUT_TABLE, Settings, as_lora, refuse_unknown, with_settings
from proximo.config import toml
from proximo.config.unions import with_fields
from proximo.config.vocabulary import field_of, words_of
from proximo.environments.kinds import MultiTurn
from proximo.losses.pieces.gates import Clip
from proximo.models import loading
from proximo.recipes.presets import ARITHMETIC
from proximo.rl.config import RunConfig

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(20)]
MODEL = "tiny-arithmetic"


def short(prompts, completions, **columns):
    return [-float(len(each)) for each in completions]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_settings_are_the_words_of_the_command_line():
    words = {name for word, _ in words_of("train") for name in (word.name, word.also) if name}
    assert set(Settings.__annotations__) == words - {"environment", "tools", "max_turns", "steps"} | {*WITHOUT_TABLE}
    parameters = inspect.signature(proximo.train).parameters
    assert {"environment", "tools", "max_turns", "steps"} < set(parameters)
    assert not set(parameters) & set(Settings.__annotations__)


def test_each_setting_changes_its_field_and_no_other():
    given: dict[str, Any] = {
        "learning_rate": 3e-5,
        "max_tokens": 9,
        "group_size": 5,
        "batch": 6,
        "temperature": 0.7,
        "kl": 0.5,
        "lora": 3,
        "warmup_steps": 7,
        "weight_decay": 0.25,
        "token_budget": 999,
        "seed": 4,
        "dtype": "float32",
    }
    for name, value in given.items():
        changed = with_settings(ARITHMETIC, {name: value}, {})
        path = name if name in WITHOUT_TABLE else field_of("train", name)
        assert path is not None
        before, after = toml.plain(ARITHMETIC), toml.plain(changed)
        table: Any = after
        for part in path.split("."):
            table = table[part]
        assert table == value
        first = path.partition(".")[0]
        assert {key: item for key, item in before.items() if key != first} == {
            key: item for key, item in after.items() if key != first
        }
    tested = {*given, "lr", "system", "template", "chat", "epochs"}
    assert tested >= set(Settings.__annotations__)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"num_generations": 8}, "here it is group_size"),
        ({"num_iterations": 2}, "settings={'training.epochs': ...}"),
        ({"gradient_accumulation_steps": 2}, "not needed"),
        ({"bananas": 1}, "takes no such argument; it takes model, "),
        ({"stps": 1}, "the nearest is steps; it takes model, "),
        ({"beta": 0.1}, "here it is kl"),
        ({"eval_dataset": 1}, "here it is evaluation_data"),
    ],
)
def test_other_names_are_answered(arguments, remedy):
    for function in (proximo.train, proximo.config_for):
        with pytest.raises(TypeError) as error:
            function(MODEL, data=ROWS, **arguments)
        assert str(error.value).startswith(f"{next(iter(arguments))}: ")
        assert remedy in str(error.value)
    refuse_unknown({"lr": 1.0}, proximo.train)


def test_all_wrong_names_are_answered_in_one_error():
    with pytest.raises(TypeError) as error:
        proximo.train(MODEL, data=ROWS, num_generations=8, lr=1.0, bananas=1, loss_type="x")  # pyright: ignore
    names, whole = [line.partition(":")[0] for line in str(error.value).splitlines()], str(error.value)
    assert names == ["num_generations", "bananas", "loss_type"]
    for argument in ("data", "reward", "metrics", "schedules", "steps", "group_size", "lr"):
        assert f" {argument}," in whole
    assert " beta" not in whole
    with pytest.raises(TypeError, match=r"^max_steps: here it is steps\nref_model: here it is `settings="):
        proximo.dpo("pairs.jsonl", model="m", max_steps=8, ref_model="m")  # pyright: ignore


@pytest.mark.parametrize(
    ("arguments", "field", "remedy"),
    [
        ({"learning_rate": "1e-6"}, "training.learning_rate", "give a number"),
        ({"max_tokens": "8"}, "sampling.max_tokens", "give a whole number"),
        ({"epochs": 2, "steps": 3}, "epochs", "give one of them"),
        ({"epochs": "two"}, "epochs", "give a positive number"),
        ({"kl": -1.0}, "kl", "give 0 or more"),
        ({"settings": {"training.nope": 1}}, "training.nope", "TrainingOptions has groups"),
        ({"reward": short, "rewards": short}, "reward", "give one of them"),
    ],
)
def test_wrong_values_are_told_with_field_and_remedy(arguments, field, remedy):
    with pytest.raises(ValueError, match=remedy) as error:
        proximo.config_for(MODEL, data=ROWS, quiet=True, **arguments)
    assert field in str(error.value)


def test_what_is_given_stands_and_the_rest_is_chosen_around_it(capsys):
    config = proximo.config_for(
        MODEL,
        data=ROWS,
        reward=short,
        lr=3e-5,
        max_tokens=9,
        group_size=4,
        batch=6,
        epochs=2,
        algorithm="dapo",
        kl=0.1,
        settings={"training.weight_decay": 0.5},
    )
    assert (config.training.learning_rate, config.sampling.max_tokens) == (3e-5, 9)
    assert (config.training.group_size, config.training.groups) == (4, 6)
    assert config.steps == 6  # twice 18 prompts, by 6
    assert config.algorithm.kl is not None
    assert config.algorithm.kl.coefficient == 0.1
    assert config.training.weight_decay == 0.5
    said = capsys.readouterr().err
    assert "steps 6: 2 times the 18 prompts, 6 of them a step" in said
    assert "learning_rate" not in said.partition("chosen for this model")[2]


def test_prompts_are_asked_as_the_words_say():
    config = proximo.config_for(MODEL, data=ROWS, system="Be brief.", template="{prompt} ?", chat=False, quiet=True)
    assert (config.task.system, config.task.template, config.task.chat) == ("Be brief.", "{prompt} ?", False)  # pyright: ignore


def test_an_environment_is_taken_by_config_for(tmp_path: Path):
    Path("game.py").write_text(
        "class Game:\n    def reset(self, problem):\n        return 'go'\n"
        "    def step(self, reply):\n        return 1.0\n"
    )
    config = proximo.config_for(MODEL, data=ROWS, environment="game.py:Game", max_turns=3, quiet=True)
    assert config.environment == MultiTurn("game.py:Game", max_turns=3)


@dataclass
class LoraConfig:
    """Fields of peft's, so far as they matter."""

    r: int = 8
    lora_alpha: int = 8
    target_modules: Any = None
    lora_dropout: float = 0.0
    task_type: str | None = None


def test_pefts_adapters_are_taken_or_refused_at_once():
    assert as_lora(None) is None
    assert as_lora(True) == proximo.Lora()
    assert as_lora(False) is None
    assert as_lora(LoraConfig(4, 16, ["v_proj", "q_proj"], task_type="CAUSAL_LM")) == proximo.Lora(
        4, 16, ("q_proj", "v_proj")
    )
    assert as_lora(LoraConfig(target_modules="all-linear")) == proximo.Lora(8, 8)
    with pytest.raises(ValueError, match="lora_dropout 0.1.*leave it out"):
        as_lora(LoraConfig(lora_dropout=0.1))
    with pytest.raises(ValueError, match="target_modules.*as a list"):
        as_lora(LoraConfig(target_modules=".*_proj"))
    with pytest.raises(TypeError, match="give a rank"):
        as_lora("16")
    chosen = proximo.config_for(MODEL, data=ROWS, lora=4, quiet=True)
    assert chosen.adapter is not None
    assert chosen.adapter.rank == 4
    assert chosen.training.learning_rate == 10 * proximo.config_for(MODEL, data=ROWS, quiet=True).training.learning_rate


def test_a_field_is_set_by_its_dotted_name():
    gate = with_fields(ARITHMETIC, {"algorithm.gate.high": 0.3}).algorithm.gate
    assert gate == replace(Clip(), high=0.3)
    with pytest.raises(ValueError, match="gate.height is 0.3: there is no such field, Clip has low, high, dual"):
        with_fields(ARITHMETIC.algorithm, {"gate.height": 0.3})
    with pytest.raises(ValueError, match="seed.more: seed is 0 and has no fields"):
        with_fields(ARITHMETIC, {"seed.more": 1})


def test_fields_are_set_together_and_not_one_before_the_other():
    """Two prompts do not suit four minibatches, and need not on the way."""
    assert ARITHMETIC.training.minibatches == 4
    changed = with_settings(ARITHMETIC, {"batch": 2}, {"training.minibatches": 1})
    assert (changed.training.groups, changed.training.minibatches) == (2, 1)
    with pytest.raises(ValueError, match="minibatches is 4"):
        with_settings(ARITHMETIC, {"batch": 2}, {})


@pytest.mark.slow("measures the machine, which a dry run tells")
def test_a_dry_run_says_what_would_run_and_starts_nothing(capsys, monkeypatch):
    monkeypatch.setattr(loading, "load_weights", lambda *_, **__: pytest.fail("weights were loaded"))
    seen: list[Any] = []
    given: dict[str, Any] = {"data": ROWS, "steps": 2, "dry_run": True}
    lines: Any = proximo.train(MODEL, "runs/a", log=seen.append, **given)
    assert lines == seen
    text = "\n".join(lines)
    assert toml.loads(text, RunConfig).steps == 2
    for line in (
        "# model          tiny-arithmetic",
        "# reward         1 for the reference answer",
        "# run folder     runs/a",
    ):
        assert line in text
    assert not Path("runs/a").exists()
    capsys.readouterr()
    again: Any = proximo.train(MODEL, "runs/a", quiet=True, **given)
    assert again == lines
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="no tracker is called 'wandbb'"):
        proximo.train(MODEL, track="wandbb", **given)
    with pytest.raises(TypeError, match="dry_run: nothing is trained here"):
        proximo.config_for(MODEL, data=ROWS, dry_run=True)  # pyright: ignore


def test_stages_and_evaluations_have_dry_runs(capsys, monkeypatch):
    monkeypatch.setattr(loading, "load_weights", lambda *_, **__: pytest.fail("weights were loaded"))
    chats = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(20)]
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0"} for n in range(20)]
    for stage, data in ((proximo.sft, chats), (proximo.dpo, pairs), (proximo.reward_model, pairs)):
        lines: Any = stage(data, "runs/b", model=MODEL, dry_run=True)
        assert capsys.readouterr().err.splitlines() == lines
        assert any(line.startswith("# data ") for line in lines)
        assert f'model = "{MODEL}"' in lines
    asked: Any = proximo.evaluate(MODEL, problems=5, dry_run=True)
    assert "5 problems from the held-out ones" in asked[-1]
    assert not Path("runs/b").exists()
    with pytest.raises(ValueError, match="fit.freeze"):
        proximo.sft(chats, model=MODEL, dry_run=True, settings={"fit.freeze": ("nothing",)})


@pytest.mark.slow("trains a run")
def test_log_sees_each_step(tmp_path: Path):
    seen: list[dict[str, float]] = []
    run = proximo.train(
        MODEL, "runs/a", data=ROWS, reward=short, steps=2, batch=2, group_size=2, log=seen.append, quiet=True
    )
    assert [each["step"] for each in seen] == [1, 2]
    assert [each["reward"] for each in seen] == [each.as_py() for each in run.metrics().column("reward")][1:]
    assert json.loads(json.dumps(seen))


def test_schedules_and_metrics_are_put_into_the_config():
    config = proximo.config_for(
        MODEL,
        data=ROWS,
        steps=4,
        schedules={"temperature": proximo.linear(1.0, 0.7), "algorithm.gate.high": lambda step, steps: 0.2 + step / 10},
        metrics=[short, lambda completions, **columns: []],
        quiet=True,
    )
    assert config.schedules == {
        "sampling.temperature": proximo.linear(1.0, 0.7),
        "algorithm.gate.high": proximo.piecewise((0.2, 0.2 + 1 / 10, 0.2 + 2 / 10, 0.2 + 3 / 10), at=(1, 2, 3)),
    }
    assert config.metrics is not None
    assert [each.label for each in config.metrics] == ["short", "lambda"]
    with pytest.raises(TypeError, match="schedules is 3: give a dict of fields"):
        proximo.config_for(MODEL, data=ROWS, schedules=3, quiet=True)  # pyright: ignore[reportArgumentType]
