"""Words on the command line and in files, and what other libraries' names are answered with."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import proximo
from proximo.algorithms import explain
from proximo.cli import COMMANDS, main
from proximo.cli.help_pages import PAGED, TAKES, page, unknown_flag
from proximo.cli.mistakes import ALGORITHMS, DATA, DEMO_MODEL, DEMO_TASK, mistake
from proximo.cli.words import answer_to, spelled_out, word_lines
from proximo.config import toml
from proximo.config.toml import ConfigError
from proximo.config.vocabulary import FOREIGN, STAGES
from proximo.data.formats import FORMATS
from proximo.recipes.presets import ARITHMETIC
from proximo.rl.config import load_run

MODEL = ["--model", "tiny-arithmetic", "--data", "sums.jsonl"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(40)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text(
        "def short(prompts, completions, **columns):\n    return [-len(each) for each in completions]\n"
    )


def planned(capsys, *flags: str) -> dict[str, Any]:
    assert main(["train", *flags, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["config"]


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main(list(arguments))
    return capsys.readouterr().err.splitlines()[-1]


def test_words_stand_for_flags():
    assert spelled_out("train", ["--lr", "1e-5", "--max_tokens=9"]) == [
        *("--training.learning-rate", "1e-5"),
        "--sampling.max-tokens=9",
    ]
    assert spelled_out("dpo", ["--lr", "1", "--beta", "2"]) == ["--fit.learning-rate", "1", "--loss.beta", "2"]
    assert spelled_out("train", ["--no-chat", "--lora", "--run", "a"]) == [
        *("--task.no-chat", "--adapter.type", "Lora"),
        *("--run", "a"),
    ]
    assert spelled_out("rate", ["--max-tokens", "4", "--temperature=0.5"]) == [
        *("--sampling.max-tokens", "4"),
        "--sampling.temperature=0.5",
    ]
    assert spelled_out("train", ["--lora", "8"]) == ["--adapter.rank", "8"]
    assert spelled_out("train", ["--environment", "g.py:Game", "--max-turns", "3"]) == [
        *("--environment.type", "MultiTurn", "--environment.path", "g.py:Game"),
        *("--environment.max-turns", "3"),
    ]
    assert spelled_out("train", ["--environment", "None"]) == ["--environment", "None"]
    assert spelled_out("chat", ["--max-tokens", "3"]) == ["--max-tokens", "3"]


def test_most_tokens_are_of_a_completion_where_something_is_sampled():
    both = "most tokens of prompt and completion together"
    for command in ("train", "eval", "rate", "sft", "dpo"):
        assert any(both in line for line in word_lines(command)) is (command in STAGES)
    assert any("most tokens of a completion (sampling.max_tokens)" in line for line in word_lines("rate"))


@pytest.mark.slow("reads a model's data three times")
def test_words_are_the_same_on_the_command_line_in_a_file_and_as_fields(capsys):
    words = {"lr": "3e-5", "max-tokens": "12", "group-size": "4", "batch": "6", "kl": "0.02", "temperature": "0.9"}
    fields = {
        "training.learning-rate": "3e-5",
        "sampling.max-tokens": "12",
        "training.group-size": "4",
        "training.groups": "6",
        "algorithm.kl.coefficient": "0.02",
        "sampling.temperature": "0.9",
    }
    by_word = planned(capsys, *MODEL, *(part for name in words for part in (f"--{name}", words[name])))
    by_field = planned(capsys, *MODEL, *(part for name in fields for part in (f"--{name}", fields[name])))
    assert by_word == by_field
    lines = "".join(f"{name.replace('-', '_')} = {value}\n" for name, value in words.items())
    Path("run.toml").write_text(f'model = "tiny-arithmetic"\n{lines}[task]\ntype = "File"\npath = "sums.jsonl"\n')
    config = load_run("run.toml")
    assert (config.training.learning_rate, config.sampling.max_tokens, config.training.groups) == (3e-5, 12, 6)
    assert config.algorithm.kl is not None
    assert (config.algorithm.kl.coefficient, config.sampling.temperature) == (0.02, 0.9)


def test_schedules_and_metrics_are_the_same_by_flag_and_in_a_file(capsys):
    flags = ["temperature=linear:1:0.5", "algorithm.gate.high=cosine:0.3:0.2:7", "kl=0.02"]
    config = planned(capsys, *MODEL, "--schedule", *flags, "--metrics", "rewards.py:short")
    Path("run.toml").write_text(
        'model = "tiny-arithmetic"\nmetrics = ["rewards.py:short"]\n[task]\ntype = "File"\npath = "sums.jsonl"\n'
        '[schedules]\nsampling.temperature = "linear:1:0.5"\n"algorithm.kl.coefficient" = 0.02\n'
        'algorithm.gate.high = {type = "Cosine", start = 0.3, end = 0.2, steps = 7}\n'
    )
    read = toml.plain(load_run("run.toml"))
    assert (config["schedules"], config["metrics"]) == (read["schedules"], read["metrics"])
    assert config["schedules"]["sampling.temperature"] == {"type": "Linear", "start": 1.0, "end": 0.5}


def test_schedules_and_metrics_are_given_once_or_several_times():
    from proximo.cli.arguments import take_all
    from proximo.cli.data import take_schedules

    arguments = ["--schedule", "lr=1e-5", "--seed", "1", "--schedule=temperature=0.7", "--metrics", "a.py:f"]
    assert take_schedules(arguments) == {"lr": "1e-5", "temperature": "0.7"}
    assert arguments == ["--seed", "1", "--metrics", "a.py:f"]
    assert take_all(["--metrics", "a.py:f", "--metrics", "b.py:g", "c.py:h"], "--metrics") == [
        "a.py:f",
        "b.py:g",
        "c.py:h",
    ]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--schedule", "temperature"], "--schedule temperature: give FIELD=SCHEDULE"),
        (["--schedule", "temperature=linear:1"], "schedules.temperature: linear:1 has 1 numbers"),
        (
            ["--schedule", "group-size=4"],
            "schedules has training.group_size, which cannot change in the middle of a run",
        ),
        (["--schedule", "temperature=linear:1:0"], "schedules: at step "),
        (
            ["--schedule", "temperature=rewards.py:none"],
            "schedules.sampling.temperature: rewards.py has no function none",
        ),
        (["--metrics", "short"], "metrics has 'short': give a function, FILE.py:NAME"),
    ],
)
def test_what_is_wrong_with_a_schedule_or_metric_is_told_in_a_line(flags, line, capsys):
    assert line in refused(capsys, "train", *MODEL, *flags, "--dry-run")


def test_a_file_takes_an_algorithm_a_reward_an_environment_and_epochs_by_name():
    Path("run.toml").write_text(
        'algorithm = "dapo"\nkl = 0.01\nepochs = 2\nbatch = 8\nlora = 4\nreward = "rewards.py:short"\n'
        'system = "Be brief."\n[task]\ntype = "File"\npath = "sums.jsonl"\nheld_out = 0.0\n'
    )
    config = load_run("run.toml")
    assert config.algorithm.kl is not None
    assert (config.algorithm.kl.coefficient, config.algorithm.gate.high) == (0.01, 0.28)  # pyright: ignore
    assert config.steps == 10
    assert config.adapter is not None
    assert config.adapter.rank == 4
    assert config.task.system == "Be brief."  # pyright: ignore
    assert config.task.reward.path.endswith("rewards.py:short")  # pyright: ignore
    Path("run.toml").write_text('environment = "rewards.py:Game"\nreward = ["rewards.py:short=0.5", "ExactMatch"]\n')
    config = load_run("run.toml")
    assert config.environment.path.endswith("rewards.py:Game")  # pyright: ignore
    assert config.rewards.task == 0
    assert [rule.weight for rule in config.rewards.rules] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("text", "field", "remedy"),
    [
        ("lr = 1e-5\nlearning_rate = 1e-5\n", "learning_rate", "give one of them"),
        ("lr = 1e-5\n[training]\nlearning_rate = 1e-5\n", "training.learning_rate", "give one of them"),
        ("epochs = 2\nsteps = 3\n", "epochs", "give one of them"),
        ("epochs = -1\n", "epochs", "give a positive number"),
        ("epochs = 2\n", "epochs", "give steps"),
        ('algorithm = "grpoo"\n', "algorithm", "give one of"),
        ('reward = "a.py:f=x"\n', "reward a.py:f", "give a number"),
        ('\n\nlr = "fast"\n', "run.toml:3: training.learning_rate", "give a number"),
        ("beta = 0.1\n", "beta", "unknown"),
    ],
)
def test_what_is_wrong_with_a_word_in_a_file_is_told(text, field, remedy):
    Path("run.toml").write_text(text)
    with pytest.raises((ConfigError, ValueError)) as error:
        load_run("run.toml")
    assert field in str(error.value)
    assert remedy in str(error.value)


@pytest.mark.slow("reads a model's data twice")
def test_rewards_and_epochs_by_flag(capsys):
    config = planned(capsys, *MODEL, "--reward", "rewards.py:short", "--epochs", "2", "--batch", "9")
    assert config["task"]["reward"]["path"] == "rewards.py:short"
    assert config["steps"] == 8  # 36 prompts of 40
    config = planned(capsys, *MODEL, "--reward", "rewards.py:short=0.5", "ExactMatch")
    assert config["rewards"]["task"] == 0
    assert [rule["weight"] for rule in config["rewards"]["rules"]] == [0.5, 1.0]
    assert "give one of them" in refused(capsys, "train", *MODEL, "--epochs", "2", "--steps", "3")
    assert "ExactMatch, MathVerify" in refused(capsys, "train", *MODEL, "--reward", "math")


def test_other_libraries_flags_are_answered_with_ours(capsys):
    wrong = {
        "--num-generations": "here it is --group-size",
        "--actor_rollout_ref.rollout.n": "here it is --group-size",
        "--beta": "here it is --kl",
        "--num_train_epochs": "here it is --epochs",
        "--num-iterations": "here it is --training.epochs",
        "--gradient-accumulation-steps": "--token-budget bounds it",
        "--wandb": "here it is --track",
        "--reward_funcs": "here it is --reward",
    }
    for flag, answer in wrong.items():
        line = refused(capsys, "train", flag, "3")
        assert flag in line
        assert answer in line
    assert "here it is --fit.max-gradient-norm" in refused(capsys, "sft", "a.jsonl", "--max_grad_norm", "1")
    assert answer_to("sft", "--num-generations", ["--group-size"]) is None


@pytest.mark.slow("reads every flag")
@pytest.mark.parametrize("command", PAGED)
def test_each_answer_names_flags_that_the_command_has(command, capsys):
    flags = set(re.findall(r"(?<![\w.-])--[a-z][\w.-]*\w", page(command) or ""))
    answers = []
    for name in sorted(FOREIGN):
        flag = f"--{name.replace('_', '-')}"
        if flag not in flags:
            line = refused(capsys, command, "a.jsonl", "--model", "m", flag, "1")
            named = line.partition(": ")[2].partition("; proximo")[0].partition(f"{flag}: ")[2]
            assert set(re.findall(r"(?<![\w.-])--[a-z][\w.-]*\w", named)) <= flags, line
            answers.append(line)
    unanswered = [line for line in answers if "there is no such flag" in line]
    assert not [line for line in unanswered if "nearest" in line]  # it would mean something else
    assert len(answers) - len(unanswered) >= {"train": len(answers), "eval": 80}.get(command, 150)
    assert set(PAGED) <= set(COMMANDS)


def test_fields_of_ours_are_none_of_another_librarys():
    """Else they would be refused: --algorithm.advantage.beta, --sampler.precision."""
    for flag in ("--algorithm.advantage.beta", "--sampler.precision", "--training.epochs"):
        assert unknown_flag("train", [flag, "1"]) is None


@pytest.mark.parametrize(
    ("command", "flag", "answer"),
    [
        ("sft", "--max-steps", "here it is --steps"),
        ("sft", "--packing", "not needed: rows are always packed"),
        ("sft", "--eval_dataset", "here it is --data.held-out"),
        ("dpo", "--loss_type", "here it is --loss.type, Dpo or Ipo"),
        ("dpo", "--ref_model", "here it is --reference"),
        ("train", "--ref_model", "not needed: the reference is the model that training starts from"),
        ("train", "--loss_type", "here it is --algorithm"),
        ("train", "--adv_estimator", "here it is --algorithm"),
        ("train", "--config", "a config is named first, without a flag"),
        ("eval", "--num_generations", "here it is --samples"),
        ("eval", "--model_name_or_path", "the model comes first, without a flag"),
        ("chat", "--max_new_tokens", "here it is --max-tokens"),
        ("sft", "--reward_funcs", "there is no such flag"),
        ("sft", "--num_iterations", "there is no such flag"),
        ("sft", "--dataset_name", "here it is --data"),
        ("sft", "--lr_scheduler_type", "here it is --fit.learning-rate-schedule"),
        ("eval", "--max_grad_norm", "there is no such flag"),
    ],
)
def test_a_stage_is_not_answered_with_flags_of_train(command, flag, answer, capsys):
    first = [] if command == "train" else ["a.jsonl"]
    assert answer in refused(capsys, command, *first, "--model", "m", flag, "1")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lr", "fast"],
        ["--lr"],
        ["--steps", "1.5"],
        ["--dtype", "float8"],
        ["--max-turns", "many"],
        ["--epochs", "two"],
        ["--training.refill", "no"],
        ["--temperature=hot"],
        ["--training.groups", "--run"],
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_the_page(arguments, capsys):
    line = refused(capsys, "train", *MODEL, *arguments)
    assert arguments[0].partition("=")[0] in line
    assert ": give " in line


def test_the_page_says_what_each_flag_takes():
    takes = dict(TAKES.findall(page("train") or ""))
    assert takes["--lr"] == takes["--training.learning-rate"] == "FLOAT"
    assert takes["--max-generated-tokens"] == "{None}|INT"
    assert "--task.type" not in takes


@pytest.mark.slow("reads a model's data twice")
def test_what_a_flag_gives_is_not_listed_as_chosen(capsys):
    assert main(["train", *MODEL, "--group-size", "8", "--dry-run"]) == 0  # 8 would have been chosen, too
    chosen = capsys.readouterr().out.partition("# chosen")[2]
    assert "training.minibatches" in chosen
    assert "group_size" not in chosen
    proximo.config_for("tiny-arithmetic", data="sums.jsonl", group_size=8)
    told = capsys.readouterr().err
    assert "training.minibatches" in told
    assert "group_size" not in told


def test_all_wrong_names_are_answered_at_once(capsys):
    wrong = ["--loss_type", "dr_grpo", "--num_generations", "8", "--stpes", "3", "--num_generations", "4"]
    for before in (MODEL, ["arithmetic"]):  # by the page, and by the config of a preset
        with pytest.raises(SystemExit):
            main(["train", *before, *wrong])
        lines = [line for line in capsys.readouterr().err.splitlines() if ": " in line and "loading" not in line]
        assert [line.partition(": ")[2] if line.startswith("error") else line.strip() for line in lines] == [
            "--loss_type: here it is --algorithm, `proximo explain --all` compares them",
            "--num_generations: here it is --group-size",
            "--stpes: there is no such flag, the nearest is '--steps'; proximo train --help lists all",
        ]


def test_files_and_algorithms_of_others_and_what_is_not_there_are_told(capsys):
    Path("recipe.yaml").write_text("a: 1\n")
    answers = {
        ("dr_grpo",): "dr_grpo is an algorithm, no command: proximo train --algorithm dr-grpo",
        ("train", "recipe.yaml"): "proximo init --model MODEL --data DATA` writes one; docs/tutorials/from-trl.md",
        ("sft", "script.py"): "script.py is a script, and sft takes",
        ("train", "--model", "m", "--data", "sum.jsonl"): "'sum.jsonl': there is no such file, the nearest is 'sums.js",
        ("sft", "none.csv", "--model", "m"): "'none.csv': there is no such file",
        ("train", "--data", "sums.jsonl", "--model", "tiny-arithmetc"): "did you mean tiny-arithmetic",
        ("eval", "runs/dpo"): "there is no folder runs/dpo",
        ("train", "--data", "sums.jsonl"): "has data and no model",
        ("dpo", "sums.jsonl"): "dpo needs a model",
        ("train", "sums.jsonl"): "proximo train --model MODEL --data sums.jsonl",
        ("train", "arithmetic", "--data", "sums.jsonl", "--data", "sums.jsonl"): "--data is given twice: give it once",
    }
    for arguments, answer in answers.items():
        assert answer in refused(capsys, *arguments)
    there = [["--data", "sums.jsonl=0.5"], ["--data", "*.jsonl"], ["--data", "a/b:c.jsonl"], ["--data", "a/b"]]
    assert not [data for data in there if mistake("train", ["--model", "tiny-copy", *data])]
    assert not mistake("train", ["--model", "org/name", "--data", "x", "--eval-data", "late=sums.jsonl"])


def test_names_that_are_known_before_torch_are_those_of_the_code():
    assert tuple(card.name for card in explain.CARDS) == ALGORITHMS
    assert FORMATS == DATA
    assert (ARITHMETIC.model, type(ARITHMETIC.task).__name__) == (DEMO_MODEL, DEMO_TASK)


@pytest.mark.parametrize("flags", [["--num-generations", "8"], ["--stpes", "3"], ["--eval-data", "none.csv"]])
def test_wrong_names_and_values_are_answered_without_torch(flags):
    page("train")  # made once, and kept
    code = (
        "import sys\nfrom proximo.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as stopped:\n"
        "    print(stopped.code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "train", *MODEL, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "2 False False\n", done.stderr


def test_overrides_of_hydra_are_answered_all_at_once():
    given = "actor_rollout_ref.rollout.n=8 +algorithm.filter_groups.enable=True my.own=3 --lr 1e-6"
    first, *answers = (mistake("train", given.split()) or "").split("\n  ")
    assert "`--NAME VALUE`" in first
    assert [each.partition(", ")[0] for each in answers] == [
        "actor_rollout_ref.rollout.n: here it is --group-size",
        "algorithm.filter_groups.enable: here it is --algorithm.keep.type",
        "my.own: no setting of this name is known here",
    ]
    # Weights of data and rewards, and schedules, have the same form.
    ours = "--reward my.rewards.py:f=0.5 --schedule actor.optim.lr=linear:1:0 --model tiny-copy"
    assert "NAME VALUE" not in (mistake("train", ours.split()) or "")
