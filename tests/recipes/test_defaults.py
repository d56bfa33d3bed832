"""Defaults that follow from the model and the data."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from proximo.algorithms import GRPO, PPO, RLOO
from proximo.cli import main
from proximo.config import toml
from proximo.environments.kinds import MultiTurn
from proximo.models import tiny_model, tiny_tokenizer
from proximo.models.adapters.lora import Lora
from proximo.models.loading import is_new
from proximo.models.values import OwnModel, TrunkHead
from proximo.recipes.defaults import (
    START,
    Default,
    RunTraits,
    defaults_for,
    kept,
    learning_rate,
    traits_of,
    with_defaults,
)
from proximo.rewards import ExactMatch
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.tasks import Arithmetic, File

GSM8K = RunTraits(
    parameters=1_500_000_000,
    positions=32768,
    thinks=False,
    has_adapter=False,
    prompt_tokens=250,
    answer_tokens=400,
    is_literal=False,
    problems=6726,
    held_out=747,
)


def chosen(facts: RunTraits, config: RunConfig = START) -> dict[str, Default]:
    return {each.field: each for each in defaults_for(config, facts)}


def test_a_model_of_billions_on_gsm8k():
    found = chosen(GSM8K)
    assert {name: each.value for name, each in found.items()} == {
        "sampling.max_tokens": 1024,
        "training.learning_rate": 1e-6,
        "training.groups": 32,
        "training.group_size": 16,
        "training.minibatches": 2,
        "steps": 211,
        "evaluation.every": 21,
        "evaluation.problems": 200,
    }
    assert found["steps"].reason == "one pass over the 6,726 prompts"
    assert "1.5 B" in found["training.learning_rate"].reason


def test_a_model_without_packed_passes_gets_a_value_model_that_it_can_have():
    with_values, padded = replace(START, algorithm=PPO), replace(GSM8K, is_packed=False)
    found = chosen(padded, with_values)["value.form"]
    assert str(found).startswith("value.form OwnModel: a copy of the policy;")
    config = with_defaults(with_values, [found])
    assert config.value == ValueOptions(OwnModel())
    assert kept(config, [found]) == [found]
    given = replace(with_values, value=ValueOptions(TrunkHead()))
    for facts, asked in ((padded, START), (GSM8K, with_values), (padded, given)):
        assert "value.form" not in chosen(facts, asked)
    assert with_defaults(START, [found]) == START  # flags chose an advantage that needs values; they say so again


@pytest.mark.parametrize(
    ("changes", "tokens", "why"),
    [
        ({"thinks": True}, 4096, "think"),
        ({"answer_tokens": 600}, 2048, "the longest answer in the data has 600 tokens"),
        ({"answer_tokens": 9000}, 4096, "the longest answer"),
        ({"answer_tokens": None}, 1024, "room to reason"),
        ({"positions": 1024}, 774, "the model has 1024 positions; the longest prompt takes 250"),
        ({"positions": 512, "prompt_tokens": 500}, 256, "the model has 512 positions; half of them for the prompt"),
        ({"positions": None}, 1024, "room to reason"),
        ({"is_literal": True, "answer_tokens": 3}, 8, "a completion must equal the answer, and the longest has 3"),
        ({"is_literal": True, "answer_tokens": 7}, 16, "must equal"),
    ],
)
def test_the_completion_limit_follows_context_and_answers(changes, tokens: int, why: str):
    found = chosen(replace(GSM8K, **changes))["sampling.max_tokens"]
    assert found.value == tokens
    assert why in found.reason


@pytest.mark.parametrize(
    ("parameters", "has_adapter", "rate"),
    [
        (8e9, False, 1e-6),
        (8e9, True, 1e-5),
        (494_032_768, False, 1e-6),
        (494_032_768, True, 1e-5),
        (135e6, False, 1.9e-6),
        (135e6, True, 1.9e-5),
        (8e5, False, 2e-5),
        (5e3, False, 2e-5),
    ],
)
def test_the_learning_rate_follows_the_size_and_the_adapter(parameters, has_adapter: bool, rate: float):
    found = chosen(replace(GSM8K, parameters=int(parameters), has_adapter=has_adapter))
    assert found["training.learning_rate"].value == rate
    assert "pretrained weights" in found["training.learning_rate"].reason


@pytest.mark.parametrize("new", [False, True])
def test_the_learning_rate_has_no_cliff_and_never_rises_with_the_size(new: bool):
    sizes = [int(1e3 * 1.1**each) for each in range(180)]
    assert sizes[-1] > 1e10
    rates = [float(learning_rate(size, has_adapter=False, is_new=new).shown) for size in sizes]
    assert all(one >= two >= 0.9 * one for one, two in pairwise(rates))


def test_new_weights_get_a_higher_rate_and_the_reason_says_so():
    old, new = (chosen(replace(GSM8K, is_new=new))["training.learning_rate"] for new in (False, True))
    assert (old.value, new.value) == (1e-6, 1e-5)
    assert "which nothing has trained yet" in new.reason


def test_values_beside_an_adapter_learn_at_the_rate_of_whole_layers():
    """They have no adapter: fifty times an adapter's rate would be five hundred times the whole model's."""
    facts, with_values = replace(GSM8K, has_adapter=True), replace(START, algorithm=PPO)
    assert chosen(facts, with_values)["value.learning_rate"].value == 5e-5
    assert chosen(replace(facts, is_packed=False), with_values)["value.learning_rate"].value == 1e-5
    given = replace(with_values, value=ValueOptions(learning_rate=1e-3))
    for asked, known in ((START, facts), (with_values, GSM8K), (given, facts)):
        assert "value.learning_rate" not in chosen(known, asked)


@pytest.mark.parametrize(
    ("problems", "groups", "minibatches", "steps", "why"),
    [
        (5, 5, 1, 50, "50 passes over the 5 prompts"),
        (12, 12, 2, 50, "50 passes over the 12 prompts"),
        (1600, 32, 2, 50, "one pass over the 1,600 prompts"),
        (100_000, 32, 2, 500, "16,000 of the 100,000 prompts, each once"),
        (None, 32, 2, 200, "the task generates problems without end"),
    ],
)
def test_steps_and_batches_follow_the_number_of_prompts(problems, groups, minibatches, steps, why):
    found = chosen(replace(GSM8K, problems=problems))
    values = [found[name].value for name in ("training.groups", "training.minibatches", "steps")]
    assert values == [groups, minibatches, steps]
    assert found["steps"].reason == why


@pytest.mark.parametrize(("parameters", "batch"), [(0.8e6, (16, 8, 4)), (135e6, (32, 16, 2))])
def test_small_models_have_smaller_batches(parameters, batch):
    found = chosen(replace(GSM8K, parameters=parameters))
    assert tuple(found[f"training.{name}"].value for name in ("groups", "group_size", "minibatches")) == batch


def test_given_groups_are_divided_into_updates():
    found = chosen(GSM8K, replace(START, training=TrainingOptions(groups=6, minibatches=1)))
    assert "training.groups" not in found
    assert found["training.minibatches"].value == 2
    assert found["steps"].value == 500
    single = RunConfig(algorithm=RLOO, training=TrainingOptions(minibatches=1))
    assert chosen(GSM8K, single)["training.minibatches"].value == 1


def test_evaluations_follow_given_steps():
    found = chosen(GSM8K, replace(START, steps=30))
    assert "steps" not in found
    assert found["evaluation.every"].value == 3
    assert "evaluation.every" not in chosen(GSM8K, replace(START, steps=19))
    without = chosen(GSM8K, replace(START, evaluation=EvaluationOptions(problems=0)))
    assert [name for name in without if name.startswith("evaluation")] == []


def test_few_held_out_problems_are_all_used():
    assert chosen(replace(GSM8K, held_out=12))["evaluation.problems"].value == 12


def test_a_default_that_a_flag_changed_is_not_listed():
    config = with_defaults(RunConfig(), defaults_for(START, GSM8K))
    assert (config.steps, config.sampling.max_tokens, config.evaluation.every) == (211, 1024, 21)
    assert config.algorithm == GRPO
    names = [each.field for each in kept(replace(config, steps=3), defaults_for(START, GSM8K))]
    assert "steps" not in names
    assert "evaluation.every" in names
    given = [each.field for each in kept(config, defaults_for(START, GSM8K), {"steps", "training.groups"})]
    assert not {"steps", "training.groups"} & set(given)  # the value that would have been chosen, too


# Read from a model and a file


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def sums(tmp_path) -> str:
    rows = [{"prompt": f"{'0' * (number == 7) * 10}{number}+1=", "answer": str(number + 1)} for number in range(40)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_facts_are_read_without_weights(folder: str, sums: str, tmp_path):
    (tmp_path / "held.jsonl").write_text('{"prompt": "5+5=", "answer": "10"}\n')
    task = File(sums, held_out=str(tmp_path / "held.jsonl"))
    found = traits_of(RunConfig(model=folder, task=task))
    assert found.parameters == tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64).num_parameters()
    assert (found.prompt_tokens, found.answer_tokens, found.problems, found.held_out) == (14, 2, 40, 1)
    assert (found.is_literal, found.thinks, found.has_adapter) == (True, False, False)
    reasons = replace(task, reward=ExactMatch(last_number=True))
    assert not traits_of(RunConfig(model=folder, task=reasons, adapter=Lora())).is_literal
    assert traits_of(RunConfig(model=folder, task=Arithmetic())).problems is None


def test_weights_are_new_until_something_trains_them(folder: str, tmp_path):
    assert traits_of(RunConfig(model=folder, task=Arithmetic())).is_new
    assert not traits_of(RunConfig(model="tiny-arithmetic", task=Arithmetic())).is_new
    model = tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)
    with torch.no_grad():
        model.model.norm.weight[3] += 0.01
    model.save_pretrained(tmp_path / "trained")
    assert is_new(folder)
    assert not is_new(str(tmp_path / "trained"))
    shutil.copy(f"{folder}/config.json", tmp_path)
    assert not is_new(str(tmp_path))  # without weights: the run says what is missing


def test_a_tokenizer_without_a_template_is_named_and_not_the_room_for_a_prompt(folder: str, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(40)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = replace(START, model=bare(folder, tmp_path), task=File(str(tmp_path / "chat.jsonl"), reward=ExactMatch()))
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        traits_of(config)


def bare(folder: str, tmp_path) -> str:
    """The model with a tokenizer that has no chat template."""
    shutil.copytree(folder, tmp_path / "bare")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink(missing_ok=True)
    return str(tmp_path / "bare")


def test_prompts_are_measured_with_their_tools_and_an_episode_is_no_literal_answer(folder: str):
    task = Arithmetic(chat=True)
    alone = traits_of(RunConfig(model=folder, task=task))
    played = traits_of(
        RunConfig(model=folder, task=task, environment=MultiTurn(tools=("proximo.environments.examples:calculate",)))
    )
    assert played.prompt_tokens > alone.prompt_tokens + 100  # characters of the tool's description
    assert traits_of(RunConfig(model=folder, task=Arithmetic())).is_literal
    game = MultiTurn("proximo.environments.examples:NumberGuessing")
    assert not traits_of(RunConfig(model=folder, task=Arithmetic(), environment=game)).is_literal


def test_data_that_are_all_held_out_cannot_be_trained_on(folder: str, sums: str):
    config = replace(START, model=folder, task=File(sums, held_out=1.0))
    with pytest.raises(ValueError, match="task.held_out leaves no problem to train on: hold out less"):
        traits_of(config)


@pytest.mark.slow("trains a run")
def test_a_command_with_a_model_and_data_does_not_run_the_demo(folder: str, sums: str, capsys):
    arguments = ["train", "--model", folder, "--task.type", "File", "--task.path", sums, "--dry-run"]
    assert main([*arguments, "--task.reward.last-number", "True", "--training.groups", "6"]) == 0
    printed = capsys.readouterr().out
    config = toml.loads(printed, RunConfig)
    assert (config.sampling.max_tokens, config.training.groups, config.training.minibatches) == (1024, 6, 3)
    assert (config.steps, config.evaluation.problems) == (50, config.task.size("held_out"))
    told = " ".join(printed.partition("\n# model ")[2].replace("\n# ", " ").split())
    assert "of at most 1,024 tokens (room to reason before the answer)" in told
    assert "chosen for this model and data, a flag changes each: max_tokens, learning_rate, group_size," in told
    assert "training.minibatches, steps" in told  # and no batch, which was given
