"""Stages from Python in a user's words: settings by one word, and data as it is."""

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import proximo
from proximo.api import stages
from proximo.api.stage_settings import ARGUMENTS, DpoSettings, StageSettings
from proximo.config.vocabulary import words_of
from proximo.data import DataFile
from proximo.models.adapters.lora import Lora
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.fitting import FitOptions
from proximo.supervised.sft import SftConfig

CALLED: Any = proximo
"""Called with what its types do not allow."""
PAIRS = [{"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": "x"} for number in range(8)]


@pytest.fixture
def configs(monkeypatch, tmp_path: Path) -> list:
    """The configs that would be trained, in the order of the calls."""
    seen: list = []
    monkeypatch.setattr(stages, "_fitted", lambda command, config, *_: seen.append(config))
    monkeypatch.chdir(tmp_path)
    return seen


@pytest.mark.parametrize(
    ("kind", "settings"), [("sft", StageSettings), ("dpo", DpoSettings), ("reward-model", StageSettings)]
)
def test_each_word_of_a_stage_is_an_argument(kind: str, settings: type):
    words = {name for word, _ in words_of(kind) for name in (word.name, word.also) if name}
    assert set(get_type_hints(settings)) == words | {"seed", "dtype"}


def test_words_are_the_fields_that_they_stand_for(configs: list):
    proximo.dpo(
        "pairs.jsonl", model="m", lr=1e-4, epochs=2, batch=8, max_tokens=64, lora=4, beta=0.3, seed=5, dtype="float32"
    )
    [config] = configs
    fit = FitOptions(learning_rate=1e-4, epochs=2, batch=8)
    assert (config.fit, config.adapter, config.loss.beta, config.seed) == (fit, Lora(rank=4), 0.3, 5)
    assert (config.data, config.dtype) == (DataFile("pairs.jsonl", max_tokens=64), "float32")
    proximo.sft("a.jsonl", model=Path("m"), lora=True, settings={"fit.patience": 3, "data.held_out": 0.2})
    assert (configs[1].model, configs[1].adapter, configs[1].fit.patience) == ("m", Lora(), 3)
    assert configs[1].data == DataFile("a.jsonl", held_out=0.2)
    proximo.dpo(DpoConfig(DataFile("a.jsonl"), fit=fit), batch=2)
    assert configs[2].fit == FitOptions(learning_rate=1e-4, epochs=2, batch=2)


def test_rows_are_kept_as_a_file_that_a_resume_reads(configs: list):
    columns = {name: [row[name] for row in PAIRS] for name in PAIRS[0]}
    for given in (PAIRS, columns):
        proximo.reward_model(given, model="m", evaluation_data=PAIRS[:2])
    first, second = configs
    assert first == second
    assert Path(first.data.path).read_text().count("\n") == 8
    assert Path(first.data.held_out).read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("num_train_epochs", "here it is epochs"),
        ("max_grad_norm", "here it is `settings={'fit.max_gradient_norm': ...}`"),
        ("eval_steps", "here it is `settings={'fit.evaluate_every': ...}`"),
        ("save_total_limit", "sft takes no such argument"),
        ("gradient_accumulation_steps", "not needed"),
        ("output_dir", "here it is run"),
        ("num_generations", "sft takes no such argument"),
        ("beta", "sft takes no such argument; it takes data, run, model, "),
        ("max_steps", "here it is steps"),
        ("eval_dataset", "here it is evaluation_data"),
        ("speed", "sft takes no such argument"),
    ],
)
def test_other_names_are_answered(name: str, message: str, configs: list):
    with pytest.raises(TypeError, match=f"^{name}: ") as refused:
        CALLED.sft("a.jsonl", model="m", **{name: 1})
    assert message in str(refused.value)
    assert not configs


def test_the_arguments_that_are_listed_are_those_of_the_stages():
    for stage in (proximo.sft, proximo.dpo, proximo.reward_model):
        assert set(inspect.signature(stage).parameters) - {"words"} == set(ARGUMENTS)


def test_a_model_that_comes_first_is_told(configs: list):
    with pytest.raises(TypeError, match=r"sft takes the data first.*: proximo.sft\(data=..., model='m'\)"):
        proximo.sft("m", data=PAIRS)  # pyright: ignore
    proximo.sft(data="a.jsonl", model="m")
    assert configs == [SftConfig(data=DataFile("a.jsonl"), model="m")]


def test_values_of_another_kind_are_refused_in_a_line(configs: list):
    with pytest.raises(ValueError, match="fit.learning_rate is 'fast': give a number"):
        CALLED.sft("a.jsonl", model="m", learning_rate="fast")
    with pytest.raises(TypeError, match="data is a DpoConfig: give data, or a SftConfig"):
        proximo.sft(DpoConfig(DataFile("a")), model="m")
    with pytest.raises(ValueError, match="data has 2 paths: give one file"):
        proximo.sft(["a.jsonl", "b.jsonl"], model="m")
    with pytest.raises(ValueError, match="evaluation_data is given, and a whole config"):
        proximo.sft(SftConfig(), evaluation_data="b.jsonl")
    with pytest.raises(ValueError, match="model is not given"):
        proximo.sft(PAIRS)
    with pytest.raises(ValueError, match="data is a int: give a path"):
        proximo.sft(5, model="m")
    assert not configs
