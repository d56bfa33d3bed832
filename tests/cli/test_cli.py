"""The commands as a user types them: what is printed where, and with which exit status."""

import gc
import io
import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from proximo.algorithms import GSPO, UnusualChoice
from proximo.cli import main
from proximo.config import toml
from proximo.insight.folder import RunFolder
from proximo.losses import Clip
from proximo.models import load_model, prompt_tokens, tiny_model, tiny_tokenizer
from proximo.rewards import FormatReward, PythonFunction
from proximo.rl.config import EvaluationOptions, RunConfig
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.samplers.embedded import EmbeddedSampler
from proximo.samplers.sampler import SamplingOptions
from proximo.system.safe_text import visible
from proximo.tasks import Arithmetic, Echo, File

TINY = ["--task.held-out", "20", "--evaluation.problems", "4", "--sampling.max-tokens", "3"]
TINY_EVAL = ["--task.type", "Arithmetic", "--task.held-out", "20", "--problems", "4", "--sampling.max-tokens", "3"]
TINY_RUN = [
    *TINY,
    "--steps",
    "1",
    "--training.groups",
    "2",
    "--training.group-size",
    "2",
    "--training.minibatches",
    "1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def refused(arguments: list[str], capsys) -> str:
    """What stderr says of bad input; nothing else is printed."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


# train


@pytest.mark.slow("trains a run")
def test_train_prints_one_json_object_and_nothing_else(folder, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", "--model", folder, "--task.type", "Arithmetic", "--run", str(run), "--json", *TINY_RUN]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    said = printed.err.partition("held-out accuracy before")[0]
    for label in ("model  ", "algorithm  ", "prompt  ", "reward  ", f"run folder     {run}\n", "watch  ", "chosen  "):
        assert f"\n{label}" in f"\n{said}", label
    names = ["run", "steps", "checkpoint", "ended", "better"]
    names += ["held_out_before", "held_out_after", "generated_tokens", "seconds", "findings"]
    assert list(result) == names
    assert (result["run"], result["steps"]) == (str(run), 1)
    assert 4 <= result["generated_tokens"] <= 12  # 2 × 2 completions of 1 to 3 tokens
    load_model(str(run / "checkpoints" / "step-000001"))

    error = refused(
        ["train", "--model", folder, "--task.type", "Arithmetic", "--run", str(run), *TINY_RUN, "--seed", "1"], capsys
    )
    assert f"error: --run {run} holds a run with another config." in error
    assert error.endswith("  seed was 0, now 1  (--allow-change seed)\n")


# eval, sft, tasks


def test_eval_prints_its_numbers(folder, capsys):
    assert main(["eval", folder, "--json", *TINY_EVAL]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"] == folder
    assert result["held_out/problems"] == 4
    assert 0 <= result["held_out/low"] <= result["held_out/accuracy"] <= result["held_out/high"] <= 1
    assert main(["eval", folder, *TINY_EVAL]) == 0
    assert capsys.readouterr().out.startswith("held-out accuracy ")


@pytest.mark.slow("trains a run")
def test_a_runs_model_is_judged_as_the_run_judges_it(folder, tmp_path, capsys):
    rows = tmp_path / ("a" * 40) / "x.jsonl"
    rows.parent.mkdir()
    rows.write_text("".join(json.dumps({"prompt": f"say {n}", "answer": "x"}) + "\n" for n in range(40)))
    run = tmp_path / "run"
    config = RunConfig(
        model=folder,
        task=File(str(rows), reward=FormatReward("(?s).*"), held_out=0.5),
        rewards=RewardMix(rules=(WeightedRule(FormatReward("(?s).*"), weight=0.5),)),
        sampling=SamplingOptions(max_tokens=2),
        evaluation=EvaluationOptions(problems=3, samples=2),
    )
    checkpoint = run / "checkpoints" / "step-000001"
    shutil.copytree(folder, checkpoint)
    (run / "config.toml").write_text(toml.dumps(config))
    for name in (str(run), str(checkpoint)):
        assert main(["eval", name, "--json"]) == 0
        printed = capsys.readouterr()
        assert printed.err == f"settings from {run / 'config.toml'}: File …/x.jsonl, 2 tokens at most\n"
        result = json.loads(printed.out)
        # Everything a model says is right here, where two-digit sums would be wrong; 1 + 0.5 is the run's reward.
        assert (result["held_out/accuracy"], result["held_out/reward"]) == (1.0, 1.5)
        assert (result["held_out/problems"], result["held_out/k"]) == (3, 2)
    assert main(["eval", str(run), "--json", "--problems", "2", "--task.type", "Echo"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["held_out/problems"], result["held_out/accuracy"]) == (2, 0.0)
    rows.unlink()
    assert "there is no such file" in refused(["eval", str(run)], capsys)
    (run / "config.toml").write_text("[algorithm]\n\n[sampling]\nmax_tokens = -3\n")
    assert "config.toml" in refused(["eval", str(run)], capsys)
    (run / "config.toml").write_text("{algorithm\n")
    error = refused(["eval", str(run)], capsys)
    assert error.startswith(f"error: {run / 'config.toml'}: this is not TOML: ")
    # The run of another stage has no task of its own.
    (run / "config.toml").write_text('model = "x"\n')
    assert main(["eval", str(run), "--json", *TINY_EVAL]) == 0


def test_a_stored_unusual_choice_is_no_python_warning(folder, tmp_path, capsys):
    """It was said when the run began; a warning would be an error here."""
    run = tmp_path / "run"
    shutil.copytree(folder, run / "checkpoints" / "step-000001")
    with pytest.warns(UnusualChoice):
        config = RunConfig(algorithm=replace(GSPO, gate=Clip(0.2, 0.2)), task=Echo())
    (run / "config.toml").write_text(toml.dumps(config))
    (run / "run.json").write_text("{}")
    assert main(["eval", str(run), "--problems", "1", "--sampling.max-tokens", "2"]) == 0
    assert capsys.readouterr().err == f"settings from {run / 'config.toml'}: Echo, 8 tokens at most\n"
    assert RunFolder(run).config == config  # as replay reads it


@pytest.mark.parametrize("command", ["eval", "chat", "selfcheck", "train", "sft"])
def test_every_command_has_help(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # rendered, not the stored page, which a terminal of 80 columns gets
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: proximo {command}" in printed
    assert ("--accept-lost-rows" in printed) == (command in ("train", "sft"))


SUMS = "".join(f'{{"prompt": "{i}+1=", "completion": "{i + 1}"}}\n' for i in range(20))


def test_sft_leaves_a_run(folder, tmp_path, capsys):
    (tmp_path / "sums.jsonl").write_text(SUMS)
    flags = ["--model", folder, "--data.held-out", "0.3", "--fit.batch", "8", "--json"]
    assert main(["sft", str(tmp_path / "sums.jsonl"), "--run", str(tmp_path / "run"), *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["run"], result["skipped"]) == (str(tmp_path / "run"), 0)
    assert result["held_out_best"]["loss"] <= result["held_out_before"]["loss"]
    load_model(result["checkpoint"])
    # Its config is a run, too; and its folder is a model.
    again = ["sft", str(tmp_path / "run" / "config.toml"), "--run", str(tmp_path / "again")]
    assert main([*again, "--model", str(tmp_path / "run")]) == 0
    assert str(tmp_path / "again" / "checkpoints") in capsys.readouterr().out
    assert "model was " in refused(again, capsys)  # without --model it would be another run


@pytest.mark.slow("trains a reward model")
def test_a_reward_model_that_never_got_better_is_not_offered(folder, tmp_path, capsys):
    """Its checkpoint is a new score head on the model that it began with."""
    rows = "".join(f'{{"prompt": "{i}+1=", "chosen": "{i + 1}", "rejected": "{i}"}}\n' for i in range(20))
    (tmp_path / "pairs.jsonl").write_text(rows)
    run, flags = str(tmp_path / "run"), ["--model", folder, "--data.held-out", "0.3", "--fit.learning-rate", "1e-12"]
    assert main(["reward-model", str(tmp_path / "pairs.jsonl"), "--run", run, *flags]) == 0
    printed = capsys.readouterr().out
    assert (
        "held-out loss never got better: the checkpoint is the model it began with, and a score head that was"
        in printed
    )
    assert f"next        proximo doctor {run}\n" in printed
    assert "--reward-model" not in printed
    assert main(["doctor", run]) == 3
    assert "warning  kept-start" in capsys.readouterr().out
    checkpoint = str(next((tmp_path / "run" / "checkpoints").iterdir()))
    for judge in (run, checkpoint):
        judged = ["--task.type", "Arithmetic", "--model", folder, "--reward-model", judge]
        assert main(["train", *judged, "--dry-run"]) == 0
        assert (
            f"# rewards.models has {judge!r}, which is the model that its training began with"
            in capsys.readouterr().out
        )


def test_sft_learns_a_tasks_own_answers(folder, tmp_path, capsys):
    flags = ["--data.task.held-out", "20", "--data.examples", "8", "--model", folder]
    assert main(["sft", "--run", str(tmp_path / "run"), *flags]) == 0
    printed = capsys.readouterr()
    assert "held-out loss" in printed.out
    assert "8 to train on, 20 held out" in printed.err
    assert "--skip-bad is for data files" in refused(["sft", "--skip-bad", *flags], capsys)


def test_bad_rows_are_refused_or_skipped(folder, tmp_path, capsys):
    path = tmp_path / "sums.jsonl"
    path.write_text(SUMS + '{"prompt": "1+1="\n{"prompt": "1+1=", "completion": ""}\n')
    arguments = ["sft", str(path), "--model", folder, "--run", str(tmp_path / "run")]
    lines = refused(arguments, capsys).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"{path}:21: not JSON")
    assert lines[2] == f"{path}:22: completion is empty"
    assert not (tmp_path / "run").exists()
    assert main([*arguments, "--skip-bad"]) == 0
    printed = capsys.readouterr()
    assert f"2 bad rows were left out, see {tmp_path / 'run' / 'events.jsonl'}" in printed.out
    assert "2 bad rows left out" in printed.err
    event = json.loads((tmp_path / "run" / "events.jsonl").read_text())
    assert (event["kind"], f"{path}:22: completion is empty" in event["message"]) == ("skipped_rows", True)


def test_sft_refuses_what_it_cannot_read(folder, tmp_path, capsys):
    (tmp_path / "sums.txt").write_text("prompt,completion\n")
    assert "is not a known format" in refused(["sft", str(tmp_path / "sums.txt"), "--model", folder], capsys)
    assert "none.toml: there is no such file" in refused(["sft", "none.toml"], capsys)
    assert "'none.jsonl': there is no such file" in refused(["sft", "none.jsonl", "--model", folder], capsys)
    (tmp_path / "sums.jsonl").write_text(SUMS)
    arguments = ["sft", str(tmp_path / "sums.jsonl"), "--run", str(tmp_path / "run"), "--model", folder]
    error = refused([*arguments, "--data.held-out", "0", "--fit.patience", "2"], capsys)
    assert "fit.patience is 2, but no data is held out" in error
    assert main([*arguments, "--data.held-out", "0"]) == 0  # nothing was computed, so it may become another run


def test_sft_that_fails_on_the_way_says_what_is_left(folder, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise ValueError("no room for a checkpoint")

    monkeypatch.setattr("proximo.supervised.fitting.save", full)
    (tmp_path / "sums.jsonl").write_text(SUMS)
    arguments = ["sft", str(tmp_path / "sums.jsonl"), "--model", folder, "--data.held-out", "0.3"]
    assert main([*arguments, "--run", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    last = f"error: no room for a checkpoint\nwhat was written so far is in {tmp_path / 'run'}; running it again with"
    assert last in printed.err


def test_tasks_are_shown_by_example(capsys):
    assert main(["tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["Arithmetic", "Countdown", "Echo", "Sorting", "Chain", "Guessing", "Gym", "File", "Code"]
    assert [line.split()[0] for line in lines] == names


# selfcheck

CHECKED = ["--sampling.max-tokens", "4", "--task.held-out", "20"]


@pytest.mark.slow("checks a whole setup")
def test_selfcheck_prints_a_table_or_json(folder, capsys):
    assert main(["selfcheck", "--task.type", "Arithmetic", "--model", folder, *CHECKED]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    head, *rows, last = printed.out.splitlines()
    assert head.split() == ["check", "result", "bound", "ok"]
    assert len(rows) == 14
    assert all("  yes  " in row for row in rows)
    assert last.startswith("14 checks in ")

    assert (
        main(["selfcheck", "--task.type", "Arithmetic", "--model", folder, "--algorithm", "gspo", "--json", *CHECKED])
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["ok"], len(result["checks"])) == (folder, True, 14)
    assert set(result["checks"][0]) == {"name", "value", "bound", "detail", "only_warns", "ok", "warns"}
    [gate] = [check for check in result["checks"] if check["name"] == "sampler = learner, log-ratio"]
    assert gate["bound"] == pytest.approx(3e-5)


@pytest.mark.slow("checks a whole setup")
def test_selfcheck_names_the_culprit(folder, capsys, monkeypatch):
    monkeypatch.setattr(Arithmetic, "reference", lambda self, problem: "\x1b[31mwrong")
    assert main(["selfcheck", "--task.type", "Arithmetic", "--model", folder, *CHECKED]) == 1
    printed = capsys.readouterr()
    assert "14 checks" in printed.out
    assert "  NO  " in printed.out
    [line] = printed.err.splitlines()
    assert line.startswith("selfcheck failed: references graded wrong 20, bound 0 (arithmetic-")
    assert "\x1b" not in printed.out + printed.err


@pytest.mark.slow("checks whole setups")
def test_selfcheck_refuses_what_it_cannot_load(capsys, folder):
    assert "there is no folder" in refused(
        ["selfcheck", "--task.type", "Arithmetic", "--model", "/no/such/folder"], capsys
    )
    too_long = [
        "selfcheck",
        "--task.type",
        "Arithmetic",
        "--model",
        folder,
        "--sampling.max-tokens",
        "40",
        "--task.digits",
        "2100",
    ]
    assert "the model has 4096 positions" in refused([*too_long, "--task.held-out", "1"], capsys)


# chat


def chat(arguments: list[str], typed: str, monkeypatch) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return main(["chat", *arguments])


def test_chat_answers_each_line_of_a_pipe(folder, capsys, monkeypatch):
    # A line feed among the sampled characters would make two lines of a reply: greedy has none here.
    greedy = [folder, "--temperature", "0", "--max_tokens", "3"]
    assert chat(greedy, "1+2=\n\n3+4=\n1+2=", monkeypatch) == 0
    printed = capsys.readouterr()
    first, second, third = printed.out.splitlines()
    assert first == third
    assert 0 < len(second) <= 3
    assert printed.err == ""
    assert chat([*greedy, "--chat"], "1+2=\n", monkeypatch) == 0
    assert len(capsys.readouterr().out) == 4
    assert chat(greedy, "", monkeypatch) == 0
    assert capsys.readouterr().out == ""


def test_chat_asks_a_run_as_it_was_trained(folder, tmp_path, capsys, monkeypatch):
    model = shutil.copytree(folder, tmp_path / "checkpoints/step-000001")
    task = File("x.jsonl", system="Add.", template="{question}=", reward=PythonFunction("gone.py:reward"))
    (tmp_path / "config.toml").write_text(toml.dumps(RunConfig(task=task)))
    prompts: list[tuple[int, ...]] = []
    stream = EmbeddedSampler.stream

    def noting(self, requests, options, **more):
        prompts.extend(request.prompt_tokens for request in requests)
        return stream(self, requests, options, **more)

    monkeypatch.setattr(EmbeddedSampler, "stream", noting)
    assert chat([str(model), "--temperature", "0", "--max-tokens", "3"], "1+2\n", monkeypatch) == 0
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]
    assert prompts == [prompt_tokens(tiny_tokenizer(), messages)]
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_chat_goes_on_after_a_line_that_is_too_long(folder, capsys, monkeypatch):
    arguments = [folder, "--temperature", "0", "--max-tokens", "3"]
    assert chat(arguments, f"{'1' * 5000}\n1+2=\n", monkeypatch) == 1
    printed = capsys.readouterr()
    assert "the model has 4096 positions" in printed.err
    assert len(printed.out.splitlines()) == 1


def test_chat_is_cut_where_the_model_has_no_more_positions(folder, capsys, monkeypatch):
    limits: list[int] = []
    stream = EmbeddedSampler.stream

    def noting(self, requests, options, **more):
        limits.append(options.max_tokens)
        return stream(self, requests, options, **more)

    monkeypatch.setattr(EmbeddedSampler, "stream", noting)
    assert chat([folder, "--temperature", "0", "--max-tokens", "9"], f"{'1' * 4090}\n1+2=\n", monkeypatch) == 0
    assert limits == [6, 9]
    assert capsys.readouterr().err == ""


def test_chat_remembers_a_conversation(folder, capsys, monkeypatch):
    prompts: list[int] = []
    stream = EmbeddedSampler.stream

    def noting(self, requests, options, **more):
        prompts.extend(len(request.prompt_tokens) for request in requests)
        return stream(self, requests, options, **more)

    monkeypatch.setattr(EmbeddedSampler, "stream", noting)
    arguments = [folder, "--chat", "--remember", "--temperature", "0", "--max-tokens", "3"]
    assert chat(arguments, "1+2=\n1+2=\n/reset\n1+2=\n", monkeypatch) == 0
    first, second, third = prompts
    assert first == third < second
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert chat(arguments, f"1+2=\n{'1' * 5000}\n1+2=\n", monkeypatch) == 1
    assert prompts[3::2] == [first, second]  # what could not be answered is forgotten
    assert "the model has 4096 positions" in capsys.readouterr().err
    prompts.clear()
    assert chat([each for each in arguments if each != "--remember"], "1+2=\n1+2=\n", monkeypatch) == 0
    assert prompts == [first, first]
    capsys.readouterr()
    assert "--remember needs --chat" in refused(["chat", folder, "--remember"], capsys)


def test_a_line_that_is_not_utf8_costs_only_itself(folder, capsys, monkeypatch):
    assert chat([folder, "--temperature", "0", "--max_tokens", "3"], "1+2=\n\udcff\n1+2=\n", monkeypatch) == 1
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2
    assert printed.err == "error: the line is not UTF-8: convert it\n"


def test_chat_refuses_what_it_cannot_do(folder, tmp_path, capsys):
    assert "needs a model" in refused(["chat"], capsys)
    assert "there is no folder" in refused(["chat", str(tmp_path / "none")], capsys)
    assert "temperature is -1.0" in refused(["chat", folder, "--temperature", "-1"], capsys)
    load_model(folder).save_pretrained(tmp_path)
    bare = tiny_tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    assert "has no chat template" in refused(["chat", str(tmp_path), "--chat"], capsys)


def test_a_model_cannot_steer_the_terminal():
    assert visible("a\x1b[2Jb\x07\r\x7f\x9b") == "a\\x1b[2Jb\\x07\\r\\x7f\\x9b"
    assert visible("safe \u202egnirts") == "safe \\u202egnirts"
    assert visible("half a pair \ud800") == "half a pair \\ud800"
    assert visible("é 数\n\tनि\u200dx 👩\u200d🔬") == "é 数\n\tनि\u200dx 👩\u200d🔬"


def test_an_algorithm_of_one_update_gets_one(capsys):
    assert main(["train", "--algorithm", "rloo", "--dry-run"]) == 0
    assert "minibatches = 1" in capsys.readouterr().out


def test_only_a_process_of_its_own_leaves_imports_out_of_garbage_collection(monkeypatch, capsys):
    done: list[str] = []
    watched = SimpleNamespace(**{name: partial(done.append, name) for name in ("disable", "freeze", "enable")})
    monkeypatch.setattr("proximo.cli.gc", watched)
    assert main(["tasks"]) == 0
    assert done == []
    monkeypatch.setattr("sys.argv", ["proximo", "tasks"])
    assert main() == 0
    assert done == ["disable", "freeze", "enable"]


def test_an_import_that_fails_leaves_garbage_collection_on(monkeypatch):
    monkeypatch.setattr("sys.argv", ["proximo", "tasks"])
    monkeypatch.setattr("proximo.cli.import_module", lambda name: sys.exit(3))
    monkeypatch.setattr("proximo.cli.gc.freeze", lambda: None)
    with pytest.raises(SystemExit, match="3"):
        main()
    assert gc.isenabled()
