"""Iterative GRPO: the rounds are the stages' own commands, one after the other, and resume where they ended."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from proximo import presets
from proximo.cli import main
from proximo.recipes.pipeline.rounds import Round, RoundsConfig, table
from proximo.rl.reward_config import RewardMix, RewardModel

POLICY = ["--rewards.task", "0", "--steps", "1", "--training.groups", "24", "--training.minibatches", "1",
          "--evaluation.problems", "4"]  # fmt: skip
FIT = ["--fit.learning-rate", "3e-4"]


def said(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.fixture
def begun(tmp_path: Path, monkeypatch, ordinary_precision) -> None:
    """A folder with pairs.jsonl and the reward model that was trained on them."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", *POLICY[2:], "--run", "first"]) == 0
    assert main(["pairs", "first", "--out", "pairs.jsonl"]) == 0
    assert main(["reward-model", "pairs.jsonl", "--model", "tiny-arithmetic", "--run", "judge", *FIT]) == 0


@pytest.mark.slow("trains every stage of a pipeline")
def test_rounds_are_the_commands_by_hand(begun, monkeypatch, capsys):
    rounds = ["iterate", "--reward-model", "judge", *POLICY, "--pairs", "pairs.jsonl", "--run", "rounds", "--json"]
    found = json.loads(said(capsys, rounds))["rounds"]

    assert main(["train", "--reward-model", "judge", *POLICY, "--run", "policy"]) == 0
    assert main(["pairs", "policy", "--out", "more.jsonl", "--old", "pairs.jsonl"]) == 0
    assert main(["reward-model", "more.jsonl", "--model", "judge", "--run", "judge-2", *FIT]) == 0
    assert Path("rounds/pairs-2.jsonl").read_bytes() == Path("more.jsonl").read_bytes()
    for made, by_hand in (("policy-1", "policy"), ("judge-2", "judge-2")):
        assert (Path("rounds") / made / "metrics.jsonl").read_bytes() == (Path(by_hand) / "metrics.jsonl").read_bytes()
    config = Path("rounds/policy-2/config.toml").read_text()
    assert 'model = "rounds/policy-1"' in config
    assert 'path = "rounds/judge-2"' in config
    assert [each["number"] for each in found] == [1, 2]
    assert found[0]["judge_before"] is not None
    assert found[0]["rankings"] == len(Path("more.jsonl").read_text().splitlines())
    assert found[1]["judge_after"] is None
    before = Path("rounds/policy-2/metrics.jsonl").read_bytes()
    assert json.loads(said(capsys, rounds))["rounds"] == found  # finished: told again, not trained again
    assert Path("rounds/policy-2/metrics.jsonl").read_bytes() == before


@pytest.mark.slow("trains every stage of a pipeline")
def test_a_round_that_was_cut_off_goes_on(begun, monkeypatch, capsys):
    rounds = ["iterate", "--reward-model", "judge", *POLICY, "--pairs", "pairs.jsonl", "--json", "--run"]
    assert main([*rounds, "whole"]) == 0
    from proximo.recipes.pipeline import rounds as module

    kept = module.write_pairs

    def cut_off(config):
        kept(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_pairs", cut_off)
    assert main([*rounds, "parts"]) == 130
    monkeypatch.setattr(module, "write_pairs", kept)
    assert main([*rounds, "parts"]) == 0
    for name in ("policy-1/metrics.jsonl", "pairs-2.jsonl", "judge-2/metrics.jsonl", "policy-2/metrics.jsonl"):
        assert (Path("parts") / name).read_bytes() == (Path("whole") / name).read_bytes(), name


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rounds": 0}, "rounds is 0: give at least 1"),
        ({"old_share": 1.0}, "old_share is 1.0: give a share from 0 to below 1"),
        ({"policy": presets.ARITHMETIC}, "policy.rewards.models has 0: rounds need one reward model"),
    ],
)
def test_rounds_that_cannot_be_are_refused(changes: dict, line: str):
    judged = replace(presets.ARITHMETIC, rewards=RewardMix(0.0, (RewardModel("judge"),)))
    with pytest.raises(ValueError, match=line):
        RoundsConfig(**{"policy": judged, "pairs": "pairs.jsonl", **changes})


def test_the_command_says_what_is_missing(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, line in (
        ([], "iterate needs --pairs FILE"),
        (["--pairs", "none.jsonl"], "--pairs none.jsonl: there is no such file"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["iterate", "--reward-model", "judge", *arguments])
        assert ended.value.code == 2
        assert line in capsys.readouterr().err


def test_the_table_shows_outcomes_where_answers_are_graded():
    lines = table([Round(1, 0.25, 0.5, 0.8, 0.9, 4), Round(2, 0.5, 1.0, None, None, 0)]).splitlines()
    assert lines[1:] == ["    1            25.0%  50.0%    80.0% → 90.0%", "    2            50.0%  100.0%   "]
    lines = table([Round(1, 0.0, 0.0, None, None, 0, (0.5, 0.625))]).splitlines()
    assert lines[1:] == [
        "    1            0.500  0.625   ",
        "held out: mean task scores, since answers are not just right or wrong",
    ]
