"""Pieces put in, added and taken away by flag, and remarks on unusual choices as one plain line."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import pytest

from proximo.algorithms import DAPO, GRPO, KL_COV, PPO, VAPO, Algorithm
from proximo.cli import main
from proximo.cli.arguments import as_flags
from proximo.cli.configs import base_config
from proximo.cli.flags import changed
from proximo.config import toml
from proximo.losses import EntropyBonus, KlReward, SoftOverlong, TokenTruncated, ValueLoss
from proximo.recipes.presets import PRESETS
from proximo.rewards import ExactMatch, FormatReward, PythonFunction
from proximo.rl.config import RunConfig, ValueOptions
from proximo.rl.reward_config import RewardMix, RewardModel, WeightedRule
from proximo.runs.options import CheckpointOptions
from proximo.tasks import File

EXTRAS = "ValueLoss, EntropyBonus, PositiveNll, RouterBalance"
FULL = replace(KL_COV, shape=SoftOverlong(), correct=TokenTruncated(), kl=GRPO.kl, extra=EntropyBonus())


def given(algorithm: Algorithm, *flags: str) -> Algorithm:
    return changed(algorithm, flags, prog="test", description="")


def refusal(algorithm: Algorithm, *flags: str, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        given(algorithm, *flags)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("stage", ["shape", "select", "correct", "kl", "extra"])
def test_every_optional_stage_can_be_taken_away(stage: str):
    expected = replace(FULL, **{stage: None})
    for flags in ([f"--{stage}.type", "None"], [f"--{stage}.type=none"], [f"--{stage}", "None"], [f"--{stage}=None"]):
        assert given(FULL, *flags) == expected
    assert given(expected, f"--{stage}.type", "None") == expected


def test_stages_that_must_hold_something_keep_it(capsys):
    for stage in ("keep", "advantage", "anchor", "ratio", "gate", "weights"):
        assert f"--{stage}.type None: give one of" in refusal(GRPO, f"--{stage}.type", "None", capsys=capsys)
    assert "give one of" in refusal(DAPO, "--shape.type", "Soft", capsys=capsys)
    assert "nothing trains one" in refusal(PPO, "--extra.type", "None", capsys=capsys)


def test_a_none_that_is_a_fields_own_value_stays_that():
    assert given(DAPO, "--shape.cap", "None") == replace(DAPO, shape=SoftOverlong(cap=None))


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (["--checkpoints.keep-best", "False"], False),
        (["--checkpoints.keep_best=false"], False),
        (["--checkpoints.no-keep-best"], False),
        (["--checkpoints.keep-best", "true"], True),
        (["--checkpoints.keep-best"], True),
    ],
)
def test_a_switch_may_be_given_its_value(flags: list[str], kept: bool):
    run = RunConfig(checkpoints=CheckpointOptions(keep_best=not kept))
    assert changed(run, [*flags, "--steps", "3"], prog="test", description="") == (
        replace(run, checkpoints=CheckpointOptions(keep_best=kept), steps=3)
    )
    assert not changed(run, ["--no-compile"], prog="test", description="").compile
    assert not changed(run, ["--compile", "False"], prog="test", description="").compile


def test_options_of_a_run_can_be_taken_away():
    run = RunConfig(algorithm=PPO, value=ValueOptions(pretrain_steps=1))
    assert changed(run, ["--value", "None", "--algorithm.shape.type", "None"], prog="test", description="") == (
        replace(run, value=None, algorithm=replace(PPO, shape=None))
    )


def test_an_entropy_bonus_comes_beside_the_value_loss():
    both = (ValueLoss(0.1, clip=0.2), EntropyBonus(0.01))
    assert given(PPO, "--extra.add", "EntropyBonus", "--extra.1.coefficient", "0.01") == replace(PPO, extra=both)
    three = given(VAPO, "--extra.add", "EntropyBonus")
    assert three == replace(VAPO, extra=(*VAPO.extras, EntropyBonus()))
    assert given(GRPO, "--extra.add", "EntropyBonus") == replace(GRPO, extra=EntropyBonus())
    assert given(PPO, "--shape.add", "SoftOverlong") == replace(PPO, shape=(KlReward(0.05), SoftOverlong()))


def test_rewards_and_their_weights_are_given_by_flags(capsys):
    rule = "--rewards.rules.add"
    flags = [rule, "FormatReward", "--rewards.rules.0.reward.pattern", "a.*", "--rewards.rules.0.weight", "0.5"]
    flags += [rule, "ExactMatch", "--rewards.rules.1.reward.last-number", "--rewards.rules.1.weight", "-1"]
    flags += ["--rewards.models.add", "RewardModel", "--rewards.models.0.path", "runs/judge", "--rewards.task", "2"]
    rules = (WeightedRule(FormatReward("a.*"), 0.5), WeightedRule(ExactMatch(last_number=True), -1.0))
    found = changed(RunConfig(), flags, prog="test", description="").rewards
    assert found == RewardMix(2.0, (RewardModel("runs/judge"),), rules)
    for name, line in (
        ("Format", "--rewards.rules.add Format: give one of ExactMatch, FormatReward, "),
        ("FormatReward", "--rewards.rules.add FormatReward needs --rewards.rules.0.reward.pattern too, or a .toml"),
    ):
        with pytest.raises(SystemExit):
            changed(RunConfig(), [rule, name], prog="test", description="")
        assert capsys.readouterr().err.startswith(f"error: {line}")


def test_what_cannot_be_added_is_refused(capsys):
    assert "this field holds one piece" in refusal(GRPO, "--select.add", "TopEntropy", capsys=capsys)
    assert "give one of ValueLoss" in refusal(GRPO, "--extra.add", "Entropy", capsys=capsys)
    for name in ("None", "x"):  # .type None empties the field, .add has nothing to add
        error = refusal(GRPO, "--extra.add", name, capsys=capsys)
        assert error == f"error: --extra.add {name}: give one of {EXTRAS}, or FILE.py:NAME\n"
    assert refusal(GRPO, "--extra.type", "x", capsys=capsys).endswith("RouterBalance, None, or FILE.py:NAME\n")
    assert "names one kind of piece twice" in refusal(PPO, "--extra.add", "ValueLoss", capsys=capsys)


def test_the_help_names_what_can_be_added(capsys):
    with pytest.raises(SystemExit):
        given(GRPO, "--help")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if ".add " in line]
    assert lines == [
        "--shape.add {SoftOverlong,LinearOverlong,KlReward} or FILE.py:NAME  (adds one more)",
        f"--extra.add {{{EXTRAS.replace(', ', ',')}}} or FILE.py:NAME  (adds one more)",
    ]


# Remarks; a Python warning would be an error here


def test_an_unusual_choice_is_one_plain_line(capsys):
    assert main(["explain", "grpo", "--kl.estimator.type", "K1"]) == 0
    printed = capsys.readouterr().err
    assert printed.startswith("unusual: kl.estimator is K1()")
    assert printed.count("\n") == 1


def test_an_unusual_choice_of_a_file_is_one_plain_line(tmp_path, capsys):
    path = tmp_path / "run.toml"
    text = toml.dumps(RunConfig(algorithm=GRPO))
    assert '[algorithm.kl.estimator]\ntype = "K3"' in text
    path.write_text(text.replace('[algorithm.kl.estimator]\ntype = "K3"', '[algorithm.kl.estimator]\ntype = "K1"'))
    changed(base_config([str(path)]), [], prog="test", description="")
    assert capsys.readouterr().err.count("unusual: kl.estimator is K1()") == 1


def test_what_later_flags_mend_is_not_remarked_on(capsys):
    given(GRPO, "--ratio.type", "SequenceRatio", "--gate.low", "3e-4", "--gate.high", "4e-4")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--algorithm.gate SoftGate",
            "--algorithm.gate alone takes no value: --algorithm.gate.type SoftGate chooses a piece and "
            "--algorithm.gate.low, --algorithm.gate.high, --algorithm.gate.dual set its fields",
        ),
        ("--evaluation=3", "--evaluation alone takes no value: --evaluation.problems, --evaluation.every, "),
        ("--steps 0", "steps is 0: give at least 1"),
        ("--steps x", "--steps: 'x' is no whole number"),
        ("--training.learning-rate big", "--training.learning-rate: 'big' is no number"),
        ("--sampling.temperature -1", "sampling: temperature is -1.0: give 0 (greedy) or a positive number"),
        ("--algorithm.gate.high -1", "gate.low 0.2, gate.high -1.0: widths of the clip cannot be negative"),
        ("--stpes 3", "--stpes: there is no such flag, the nearest is '--steps'; test --help lists all"),
        ("--lr 3", "--lr: there is no such flag, the nearest is '--training.learning-rate'; test --help"),
        ("--max-tokens 3", "--max-tokens: there is no such flag, the nearest is '--sampling.max-tokens'; test --help"),
        ("--algorithm.keep none", "--algorithm.keep alone takes no value: --algorithm.keep.type NAME chooses a piece"),
        ("--adapter lora", "--adapter alone takes no value: --adapter.type Lora adds it"),
        ("--steps.type Echo", "--steps.type Echo: this field holds a value and no piece; give it with --steps VALUE"),
        ("--task.type File", "--task.type File needs --task.path"),
        ("--value.form.type OwnLayers", "--value.form.type OwnLayers: nothing is set there that it could change; this"),
        ("--sampler.engines 2", "--sampler.engines belongs to --sampler.type Fleet: give that, too"),
        ("--algorithm.gate.tau-pos 2", "--algorithm.gate.tau-pos belongs to --algorithm.gate.type SoftGate: give that"),
        ("more", "more: test takes no such argument; test --help lists what it takes"),
        ("--algorithm.gate.high", "Missing value for argument '--algorithm.gate.high'"),
    ],
)
def test_what_is_wrong_with_a_flag_is_one_line(flags: str, line: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        changed(RunConfig(), flags.split(), prog="test", description="")
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.startswith(f"error: {line}")
    assert said.count("\n") == 1


def test_a_flag_that_only_one_piece_can_mean_chooses_it():
    """--task.reward.path can be PythonFunction's alone, which cannot be made without it."""
    base = RunConfig(task=File("x.jsonl"))
    found = changed(base, ["--task.reward.path", "f.py:f", "--task.reward.seconds=3"], prog="test", description="")
    assert isinstance(found.task, File)
    assert found.task.reward == PythonFunction("f.py:f", seconds=3.0)
    both = ["--task.type", "File", "--task.path", "y.jsonl", "--task.reward.path=f.py:f"]
    task = changed(RunConfig(), both, prog="test", description="").task
    assert task == File("y.jsonl", reward=PythonFunction("f.py:f"))


def test_messages_name_options_as_python_does_and_commands_show_flags():
    said = "`run=runs/a` holds another: `allow_change=['training.groups']` or `accept_lost_rows=True`, `task.type=File`"
    assert as_flags(said) == (
        "--run runs/a holds another: --allow-change training.groups or --accept-lost-rows, --task.type File"
    )
    assert as_flags("see `proximo doctor`; a = `b`") == "see `proximo doctor`; a = `b`"


def test_a_signal_while_flags_are_read_is_no_mistake_in_them(monkeypatch):
    """A handler of SIGTERM raises SystemExit(143), wherever the process stands."""

    def stopped(*_: object, **__: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr("tyro.cli", stopped)
    with pytest.raises(SystemExit) as ended:
        changed(RunConfig(), ["--steps", "3"], prog="test", description="")
    assert ended.value.code == 143


@dataclass(frozen=True)
class Inner:
    pair: tuple[int, ...] = (1, 2)
    made: int = field(default=3, init=False)

    @cached_property
    def total(self) -> int:
        return sum(self.pair)


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    seed: int = 0
    inner_seed: int = 0


def test_a_flag_leaves_all_other_fields_as_they_are():
    """What a value has computed for itself is no field of it."""
    value = Outer(Inner((4, 5)))
    assert value.inner.total == 9
    for flags, expected in (
        ([], value),
        (["--seed", "7"], replace(value, seed=7)),
        (["--inner-seed=8"], replace(value, inner_seed=8)),
        (["--inner.pair", "6", "7"], Outer(Inner((6, 7)))),
    ):
        assert changed(value, flags, prog="test", description="") == expected
    for preset in PRESETS:
        assert changed(preset.config, ["--seed", "7"], prog="test", description="") == replace(preset.config, seed=7)
