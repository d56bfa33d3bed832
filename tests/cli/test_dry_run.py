"""`train --dry-run` refuses what a run would refuse before it loads weights, and says what will not fit."""

import json
import os
import re
from pathlib import Path

import pytest

from proximo.algorithms import PPO
from proximo.cli import main
from proximo.config import toml
from proximo.environments.kinds import MultiTurn
from proximo.learner import footprint
from proximo.models import loading, tiny_model, tiny_tokenizer
from proximo.planning import cards
from proximo.recipes.pipeline import PipelineConfig
from proximo.rewards import ExactMatch, FormatReward
from proximo.rl.config import RunConfig
from proximo.tasks import File, Mixture

SMALL = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model(**SMALL).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def no_weights(monkeypatch):
    """Whoever loads weights fails."""

    def load_weights(*_, **__):
        pytest.fail("weights were loaded")

    monkeypatch.setattr(loading, "load_weights", load_weights)


def sums(path: Path, rows: int = 40) -> str:
    path.write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(rows)))
    return str(path)


def refusal(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    return printed.err


def file_flags(path: str, *more: str) -> list[str]:
    return ["--task.type", "File", "--task.path", path, *more]


@pytest.mark.slow("checks whole setups")
@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (file_flags("none.jsonl"), "task.path is 'none.jsonl': there is no such file"),
        (["--model", "no/such-model"], "path 'no/such-model': neither a folder nor a model"),
        (["--device", "cuda"], "device is 'cuda', but there is no GPU here"),
        (
            ["--routing-replay", "old_policy"],
            "routing_replay is 'old_policy', but Qwen3ForCausalLM has no experts to choose from",
        ),
        (
            ["--algorithm", "ppo", "--value.form.type", "OwnLayers", "--value.form.layers", "9"],
            "value.form.layers is 9, but the policy has 2",
        ),
        (["--reward-model", "no/judge"], "path 'no/judge': neither a folder nor a model"),
    ],
)
def test_a_dry_run_refuses_as_the_run_does(dry_run, flags, said, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = [] if "--model" in flags else ["--model", folder]
    model += [] if "--task.type" in flags else ["--task.type", "Arithmetic"]
    run = ["--dry-run"] if dry_run else ["--run", "run"]
    error = refusal(["train", *model, *flags, *run], capsys)
    assert error.startswith(f"error: {said}")
    assert len(error.splitlines()) == 1


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_a_file_with_nothing_held_out_is_refused_before_a_model_loads(dry_run, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = file_flags(sums(tmp_path / "sums.jsonl"), "--task.held-out", "0.0")
    error = refusal(["train", "--model", folder, *flags, *dry_run], capsys)
    assert error.startswith("error: task.held_out leaves no problem to evaluate on")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_a_policy_is_no_reward_model(dry_run, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refusal(
        ["train", "--task.type", "Arithmetic", "--model", folder, "--reward-model", folder, *dry_run], capsys
    )
    assert error.startswith(f"error: path {folder!r}: no score head, so its scores would be random; train one first")


@pytest.mark.usefixtures("no_weights")
def test_a_dry_run_says_which_rows_it_leaves_out_and_what_is_odd_about_the_grader(folder, tmp_path, capsys):
    """Answers that end with `#### 72` are whole solutions: no reason to refuse, enough to say."""
    data, held = tmp_path / "sums.jsonl", tmp_path / "held.jsonl"
    good = "".join(f'{{"prompt": "{i}+1=", "answer": "so #### {i + 1}"}}\n' for i in range(8))
    data.write_text(good + "{}\n" * 22)
    held.write_text('{"prompt": "8+8=", "answer": "#### 16"}\n')
    flags = ["--model", folder, *file_flags(str(data), "--task.held-out", str(held)), "--skip-bad", "--dry-run"]
    assert main(["train", *flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    [at] = [number for number, line in enumerate(printed) if line.startswith("# bad rows left out: 22; ")]
    first = "; ".join(f"{data}:{row}: no column 'prompt', only : set task.prompt_column" for row in (9, 10, 11))
    assert printed[at].removeprefix("# bad rows left out: 22; ") == f"{first}; and 19 more"
    assert printed[at + 1].startswith("# calibration: ")
    assert "the grader requires the whole solution text" in printed[at + 1]
    assert main(["train", *flags, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [f"# {note}" for note in notes[-2:]] == printed[at : at + 2]


def test_a_grader_that_cannot_be_trained_with_is_refused(folder, tmp_path, capsys):
    """Calibration needs no weights: the run would refuse this, too."""
    data, reward = sums(tmp_path / "sums.jsonl"), tmp_path / "rewards.py"
    reward.write_text("def nothing(prompts, completions, **columns):\n    return None\n")
    task = f'[task]\ntype = "File"\npath = "{data}"\n'
    task += f'[task.reward]\ntype = "PythonFunction"\npath = "{reward}:nothing"\n'
    (tmp_path / "run.toml").write_text(f'model = "{folder}"\n{task}')
    error = refusal(["train", str(tmp_path / "run.toml"), "--dry-run"], capsys)
    assert error.startswith(f"error: calibration: {reward}:nothing: 9 completions unscored")  # the cause
    assert error.endswith("calibration: no text could be scored, of 3 problems; nothing was trained\n")


def test_a_dry_run_loads_no_weights_and_prints_a_config_of_the_same_run(no_weights, folder, tmp_path, capsys):
    assert main(["train", "--task.type", "Arithmetic", "--model", folder, "--algorithm", "ppo", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "value model's 1 layers" in printed.replace("\n#" + " " * 16, " ")
    found = toml.loads(printed, RunConfig)
    assert (found.algorithm, found.model) == (PPO, folder)
    (tmp_path / "run.toml").write_text(printed)
    assert main(["train", str(tmp_path / "run.toml"), "--dry-run"]) == 0
    assert toml.loads(capsys.readouterr().out, RunConfig) == found


def test_a_dry_run_as_data(folder, capsys):
    assert main(["train", "--task.type", "Arithmetic", "--model", folder, "--steps", "3", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    facts = ["models", "bytes", "device_bytes", "fits", "peak_bytes", "step_seconds"]
    assert list(found) == ["config", "defaults", *facts, "notes"]
    assert "steps" not in [each["field"] for each in found["defaults"]]  # given by a flag
    assert (found["config"]["steps"], found["config"]["model"]) == (3, folder)
    policy = tiny_model(**SMALL).num_parameters()
    assert [(each["role"], each["parameters"]) for each in found["models"]] == [
        ("policy", policy),
        ("reference", policy),
    ]
    assert found["bytes"] == 20 * policy  # 16 of what trains, 4 of the frozen reference
    assert found["fits"]
    assert toml.loads(toml.dumps(RunConfig()), RunConfig) == RunConfig()


def fits(gib: float, flags: list[str], capsys, monkeypatch) -> str:
    """What a dry run says about whether it fits into so much memory."""
    monkeypatch.setattr(cards, "machine_bytes", lambda: int(gib * 2**30))
    assert main(["train", *flags, "--dry-run"]) == 0
    return re.sub(r"\n#  +", " ", capsys.readouterr().out).partition("\n# memory, time")[2].splitlines()[0].strip()


@pytest.mark.slow("checks whole setups")
def test_whether_a_run_fits_is_said(folder, capsys, monkeypatch):
    flags = ["--model", folder, "--task.type", "Arithmetic", "--sampling.max-tokens", "512"]
    line = fits(64, flags, capsys, monkeypatch)
    assert re.match(r"fits: predicted peak 0\.\d of 63\.7 GiB; a step takes about .*s if all completions reach", line)
    no, remedy = fits(0.45, flags, capsys, monkeypatch).rsplit("; it fits", 1)
    assert no.startswith("does not fit: predicted peak ")
    assert remedy == " with --training.token-budget 8192: shorter passes, for the same results"
    never = fits(0.31, flags, capsys, monkeypatch)
    assert never.startswith("does not fit: needs at least ")


def test_a_machine_has_no_more_than_its_pages():
    assert 0 < footprint.machine_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("arguments", [["pipeline-demo", "--dry-run"], ["--dry-run", "pipeline-demo"]])
def test_a_pipeline_may_come_after_its_switches(arguments, capsys):
    assert main(["train", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "# in turn: demonstrations.jsonl, sft, rankings.jsonl, reward-model, ppo" in printed
    assert isinstance(toml.loads(printed, PipelineConfig), PipelineConfig)
    assert main(["train", "--json", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][:2] == ["demonstrations.jsonl", "sft"]


@pytest.mark.slow("checks whole setups")
def test_data_becomes_a_task_and_flags_change_it(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f'{{"question": "{i}+1", "answer": "so\\n#### {i + 1}", "solution": "x"}}\n' for i in range(40)]
    Path("x.jsonl").write_text("".join(rows))
    command = ["train", "--model", folder, "--data", "x.jsonl", "--dry-run"]
    assert "choose with --task.answer-columns answer or --task.answer-columns solution" in refusal(command, capsys)
    chosen = ["--task.answer-columns", "answer", "--task.chat-template-kwargs", "enable_thinking", "False"]
    assert main([*command, *chosen, "--task.held-out", "0.5"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("answers end in ####: comparing last numbers") == 1
    task = toml.loads(printed.out, RunConfig).task
    assert isinstance(task, File)
    assert (task.reward, task.held_out) == (ExactMatch(last_number=True), 0.5)
    assert task.chat_template_kwargs == {"enable_thinking": False}
    own = ["--task.reward.type", "FormatReward", "--task.reward.pattern", ".*"]
    assert main([*command, *own]) == 0
    task = toml.loads(capsys.readouterr().out, RunConfig).task
    assert isinstance(task, File)
    assert task.reward == FormatReward(".*")


def test_flags_of_a_file_apply_to_each_source(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, first in (("a", 0), ("b", 40)):
        rows = [f'{{"question": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(first, first + 40)]
        Path(f"{name}.jsonl").write_text("".join(rows))
    flags = ["--task.no-chat", "--task.held-out", "0.5", "--task.template", "{question}="]
    assert main(["train", "--model", folder, "--data", "a.jsonl=3", "b.jsonl", *flags, "--dry-run"]) == 0
    task = toml.loads(capsys.readouterr().out, RunConfig).task
    assert isinstance(task, Mixture)
    assert [(each.name, each.weight) for each in task.sources] == [("a", 3.0), ("b", 1.0)]
    for each in task.sources:
        assert isinstance(each.task, File)
        assert (each.task.chat, each.task.held_out, each.task.template) == (False, 0.5, "{question}=")


def test_data_for_an_environment_that_rewards_need_no_answers(folder, tmp_path, capsys):
    data = tmp_path / "asked.jsonl"
    data.write_text("".join(f'{{"prompt": "{n}>"}}\n' for n in range(20)))
    command = ["train", "--model", folder, "--data", str(data), "--environment.type", "MultiTurn"]
    played = ["--environment.path", "tests.environments.worlds:Parity", "--environment.max-turn-tokens", "3"]
    assert main([*command, *played, "--dry-run"]) == 0
    config = toml.loads(capsys.readouterr().out, RunConfig)
    assert isinstance(config.task, File)
    assert config.task.reward is None
    assert config.environment == MultiTurn("tests.environments.worlds:Parity", max_turn_tokens=3)
    with pytest.raises(SystemExit):  # tools reward nothing
        main([*command, "--environment.tools", "proximo.environments.examples:calculate", "--dry-run"])
    assert "with no answers in" in capsys.readouterr().err


@pytest.mark.usefixtures("no_weights")
def test_eval_says_what_it_would_ask_and_loads_no_weights(folder, tmp_path, capsys):
    data = sums(tmp_path / "sums.jsonl")
    flags = ["eval", folder, "--data", data, "--samples", "4", "--max-tokens", "5", "--temperature", "0.5"]
    assert main([*flags, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^model    {folder}: [\d.]+ k parameters; float32 on cpu$", printed, re.MULTILINE)
    assert re.search(
        r"^data     File .*: 0 to train on, 40 held out; in memory, all checked$",
        printed.replace("\n" + " " * 9, " "),
        re.MULTILINE,
    )
    assert "\nprompt   4 tokens, '0+1='\n" in printed
    assert "40 problems from the held-out ones: once greedily for accuracy, and 4 times at temperature 0.5" in printed
    assert main([*flags, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["config"]["sampling"]["max_tokens"] == 5
    assert "prompt: 4 tokens, '0+1='" in planned["notes"]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--problems", "0"], "problems is 0: give at least 1"),
        (["--max-tokens", "5000"], "sampling.max_tokens is 5000, which leaves no room for a prompt"),
        (["--split", "train"], "task has no train problems to ask"),
        (["--device", "cuda:9"], "device"),
    ],
)
def test_a_dry_run_of_eval_refuses_as_eval_does(flags, error, folder, tmp_path, capsys):
    data = sums(tmp_path / "sums.jsonl")
    assert error in refusal(["eval", folder, "--data", data, *flags, "--dry-run"], capsys)
