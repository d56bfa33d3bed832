"""`proximo.train` and `proximo.config_for` of a model and data: what the command line chooses, without a config."""

import inspect
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

import proximo
from proximo.cli import main
from proximo.cli.flags import changed
from proximo.config import toml
from proximo.environments.kinds import MultiTurn
from proximo.rewards import ExactMatch
from proximo.tasks import Arithmetic, File
from tests.api.settings import small

MODEL = "tiny-arithmetic"
ROWS = [{"prompt": f"{n}+{k}=", "answer": str(n + k)} for n in range(10) for k in (1, 2)]


@pytest.fixture(autouse=True)
def sums(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def planned(capsys, *flags: str) -> dict[str, Any]:
    assert main(["train", *flags, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["config"]


@pytest.mark.slow("trains a run")
@pytest.mark.parametrize(("algorithm", "steps"), [("ppo", None), ("dapo", 40)])
def test_the_config_is_the_command_lines(algorithm: str, steps: int | None, capsys):
    value, more = getattr(proximo, algorithm.upper()), ["--steps", "40"] if steps else []
    config = proximo.config_for(MODEL, data="sums.jsonl", algorithm=value, steps=steps, quiet=True)
    assert config.evaluation.every == (4 if steps else 5)
    flags = ["--model", MODEL, "--data", "sums.jsonl", "--algorithm", algorithm, *more]
    assert toml.plain(config) == planned(capsys, *flags)


@pytest.mark.slow("trains a run")
def test_a_model_and_a_task_are_the_command_lines(capsys):
    config = proximo.config_for(Path(MODEL), data=Arithmetic(), quiet=True)
    assert toml.plain(config) == planned(capsys, "--model", MODEL, "--task.type", "Arithmetic")


@pytest.mark.slow("trains a run")
def test_rows_train_and_the_lines_say_what_was_chosen_and_why(capsys):
    run = proximo.train(MODEL, "runs/mine", data=ROWS, steps=1, algorithm="sapo")
    said = " ".join(capsys.readouterr().err.split())
    assert "20 rows, TRL's shape: prompt in prompt, answer in answer" in said
    assert "chosen for this model and data, `proximo.config_for` gives the config" in said
    assert "learning rate 2e-05, constant after 2 steps of warm-up: for pretrained weights, 801 k of them" in said
    config = proximo.open_run("runs/mine").config
    chosen = proximo.config_for(MODEL, data=ROWS, steps=1, algorithm=proximo.SAPO, quiet=True)
    assert toml.dumps(config) == toml.dumps(chosen)
    # The same call is done, and says nothing of what was chosen.
    again = proximo.train(MODEL, "runs/mine", data=ROWS, steps=1, algorithm="SAPO")
    assert again.result == run.result
    assert "chosen for" not in capsys.readouterr().err


@pytest.mark.slow("trains a run")
def test_what_train_returns_is_the_run(capsys):
    """One line trains and one looks, without opening the folder that was just written."""
    run = proximo.train(small(steps=1), "runs/mine", quiet=True)
    opened = proximo.open_run("runs/mine")
    assert isinstance(run, proximo.OpenedRun)
    assert repr(run) == repr(opened) == "<run runs/mine: grpo, finished, 1 step>"
    assert run.metrics() == opened.metrics()
    assert run.rollouts(1) == opened.rollouts(1)
    result = opened.result
    assert isinstance(result, proximo.RunResult)
    assert run.result == result
    assert (run.before, run.after, run.examples) == (result.before, result.after, result.examples)
    assert (run.checkpoint, run.seconds) == (Path("runs/mine/checkpoints/step-000001"), result.seconds)
    assert run.generated_tokens == sum(map(len, run.rollouts(1).column("tokens").to_pylist()))
    ids = run.tokenizer("12+13=", return_tensors="pt")["input_ids"]
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(run.checkpoint)
    own: Any = run.model
    greedy = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert own.generate(ids.to(own.device), **greedy).tolist() == plain.generate(ids, **greedy).tolist()


def test_config_for_says_its_choices_unless_quiet(capsys):
    config = proximo.config_for(MODEL, data=Arithmetic(digits=1, held_out=4), adapter=proximo.Lora(), steps=3)
    assert config.task == Arithmetic(digits=1, held_out=4)
    assert config.training.learning_rate == 2e-4
    assert "as a LoRA adapter is trained" in capsys.readouterr().err
    proximo.config_for(MODEL, data=Arithmetic(), quiet=True)
    assert capsys.readouterr().err == ""


def test_rewards_take_the_place_of_the_answers():
    brief = lambda completions, **columns: [-float(len(text)) for text in completions]  # noqa: E731
    one = proximo.config_for(MODEL, data=ROWS, rewards=brief, quiet=True)
    assert isinstance(one.task, File)
    assert one.sampling.max_tokens > 8  # no longer must a completion equal the answer
    two = proximo.config_for(MODEL, data=ROWS, rewards=[brief, (ExactMatch(), 0.5)], quiet=True)
    assert [rule.weight for rule in two.rewards.rules] == [1.0, 0.5]


@pytest.mark.slow("trains a run")
def test_an_environment_that_rewards_needs_no_answers():
    asked = [{"prompt": f"{n}>"} for n in range(20)]
    played = small(environment=MultiTurn("tests.environments.worlds:Parity", max_turn_tokens=3), steps=1)
    run = proximo.train(played, "runs/played", data=asked, quiet=True)
    assert run.metrics().column("outcome").null_count < len(run.metrics())
    config = proximo.open_run("runs/played").config
    assert isinstance(config, proximo.RunConfig)
    assert isinstance(config.task, File)
    assert config.task.reward is None


@pytest.mark.slow("trains a run")
def test_what_is_given_takes_the_place_of_a_configs_own():
    seen = []
    result = proximo.train(
        small(steps=9),
        "runs/mine",
        data=Arithmetic(digits=1, held_out=4),
        algorithm=proximo.SAPO,
        steps=1,
        on_step=lambda step, metrics: seen.append(step),
        quiet=True,
    )
    config = proximo.open_run("runs/mine").config
    assert isinstance(config, proximo.RunConfig)
    assert (config.steps, config.algorithm, seen) == (1, proximo.SAPO, [1])
    assert config.task == Arithmetic(digits=1, held_out=4)
    assert config.sampling == small().sampling
    assert result.checkpoint.name == "step-000001"


@pytest.mark.parametrize(
    ("call", "error", "line"),
    [
        (lambda: proximo.train(7), TypeError, "model is 7: give a model's folder or name, or a RunConfig"),  # pyright: ignore
        (lambda: proximo.train("no/model", data=ROWS), ValueError, "no/model"),
        (lambda: proximo.config_for(MODEL, data=ROWS, algorithm=7), TypeError, "algorithm is 7: give a name"),  # pyright: ignore
        (lambda: proximo.config_for(MODEL, data=ROWS, algorithm="dappo"), ValueError, "no algorithm is called 'dappo'"),
        (lambda: proximo.train(small(), evaluation_data=ROWS), ValueError, "evaluation_data goes with data"),
        (
            lambda: proximo.train(MODEL, data=Arithmetic(), evaluation_data=ROWS),
            ValueError,
            "data is a task, which has its own",
        ),
        (lambda: proximo.train(MODEL, data=ROWS, steps=0), ValueError, "steps is 0: give at least 1"),
    ],
)  # fmt: skip
def test_refusals_are_one_line(call, error, line: str):
    with pytest.raises(error, match=line) as found:
        call()
    assert "\n" not in str(found.value)


def test_bad_rows_are_left_out_by_the_task():
    Path("some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, {"prompt": "1+1="}]))
    with pytest.raises(ValueError, match="skip_bad"):
        proximo.config_for(MODEL, data="some.jsonl", quiet=True)
    task = replace(proximo.task_of("some.jsonl", model=MODEL, quiet=True), skip_bad=True)  # pyright: ignore
    assert proximo.config_for(MODEL, data=task, quiet=True).task == task


def test_arguments_of_another_kind_are_refused_in_a_line(tmp_path):
    """Each was a TypeError from somewhere inside, or was accepted and refused later with a long repr."""
    task = proximo.tasks.Arithmetic()
    with pytest.raises(TypeError, match="^steps is '10': give a whole number, such as 40$"):
        proximo.train(MODEL, tmp_path / "run", data=task, steps="10")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^training is a dict: give a TrainingOptions\(...\)$"):
        proximo.RunConfig(training={"groups": 3})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^training\.groups is '8': give a whole number$"):
        proximo.TrainingOptions(groups="8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="^steps is '3': give a whole number$"):
        proximo.RunConfig(steps="3")  # pyright: ignore[reportArgumentType]
    other: object = SimpleNamespace(r=8)  # such as another library's LoraConfig
    with pytest.raises(TypeError, match=r"proximo\.Lora"):
        proximo.config_for(MODEL, data=task, adapter=other)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^adapter is a SimpleNamespace: give a Lora\(...\) or None$"):
        proximo.RunConfig(adapter=other)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no tracker is called 'tensorbord'"):
        proximo.train(MODEL, tmp_path / "run", data=task, track="tensorbord")


def test_numbers_of_numpy_are_numbers():
    steps: Any = np.int64(3)
    assert proximo.RunConfig(steps=steps, training=proximo.TrainingOptions(learning_rate=np.float64(1e-5)))


def test_the_package_shows_its_own_names_and_short_signatures():
    shown = [name for name in dir(proximo) if not name.startswith("__")]
    assert sorted(shown) == sorted(name for name in proximo.__all__ if name != "__version__")
    for function in (proximo.train, proximo.config_for, proximo.evaluate):
        assert len(str(inspect.signature(function))) < 700, function


def test_a_reward_function_and_examples_need_no_type_of_their_own(tmp_path):
    """--ptx.path alone works, as the changelog says."""
    config = changed(proximo.RunConfig(), ["--ptx.path", "x.jsonl"], prog="test", description="")
    assert config.ptx is not None
    assert config.ptx.path == "x.jsonl"
