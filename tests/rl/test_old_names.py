"""Run folders of earlier versions: their configs load, are shown and are resumed under today's names."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from proximo.algorithms import GRPO
from proximo.api.evaluating import own_evaluation
from proximo.cli import main
from proximo.config import toml
from proximo.config.aliases import ADDED, completed, renewed
from proximo.config.plugins import load_class, load_function, named_file
from proximo.insight.doctor.checkup import check_up
from proximo.insight.folder import RunFolder
from proximo.insight.lens.lens import policy_loss
from proximo.insight.page.overview import about, summary
from proximo.losses.pieces.gates import Clip
from proximo.recipes.presets import PIPELINE_DEMO
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, load_run, loads_run
from proximo.rl.progress import ProgressLines
from proximo.rl.reward_config import RewardMix
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.config_changes import differences, flat
from proximo.runs.options import CheckpointOptions
from proximo.samplers.embedded import Embedded
from proximo.samplers.mismatched import Mismatched
from proximo.samplers.sampler import SamplingOptions
from proximo.system.sealing import HASH, SEALED
from tests.rows import metrics_of

CONFIG = RunConfig(
    algorithm=GRPO,
    sampling=SamplingOptions(max_tokens=4),
    sampler=Mismatched("bfloat16", lag=1),
    training=TrainingOptions(groups=2, group_size=2, minibatches=1, warmup_steps=0, max_skipped=7),
    rewards=RewardMix(max_unscored=0.5),
    evaluation=EvaluationOptions(problems=2),
    checkpoints=CheckpointOptions(every=1),
    steps=2,
    max_generated_tokens=10_000,
)


def as_before(config: RunConfig) -> str:
    """The text that the version before wrote."""
    text = toml.dumps(config)
    text = re.sub(r'\[sampler\]\ntype = "Mismatched"\n', "[mismatch]\n", text)
    text = re.sub(r'\[sampler\]\n(type = "Embedded"\n)?\n', "", text)
    text = re.sub(r'\[environment\]\n(type = "SingleTurn"\n)?\n', "", text)
    for new, old in (
        ("max_generated_tokens", "most_generated"),
        ("max_unscored", "most_unscored"),
        ("max_skipped", "most_skipped"),
        ("routing_replay", "replay"),
    ):
        text = re.sub(rf"^{new} =", f"{old} =", text, flags=re.MULTILINE)
    return text


REPLAYING = replace(CONFIG, sampler=Embedded(), routing_replay="sampler", max_generated_tokens=None)


@pytest.mark.parametrize("config", [CONFIG, REPLAYING], ids=["mismatch", "replay"])
def test_an_old_config_loads_as_the_value_that_it_was(config: RunConfig, tmp_path: Path):
    text = as_before(config)
    tables = tomllib.loads(text)
    assert not {"sampler", "environment", "routing_replay", "max_generated_tokens"} & tables.keys()
    assert ("mismatch" in tables) == (config is CONFIG)
    assert "most_skipped" in tables["training"]
    assert "most_unscored" in tables["rewards"]
    assert loads_run(text) == config
    (tmp_path / "config.toml").write_text(text)
    assert load_run(str(tmp_path / "config.toml")) == config
    with pytest.raises(toml.ConfigError, match="training.most_skipped = 7 is unknown"):
        toml.loads(text, RunConfig)


def test_today_s_configs_stay_as_they_are():
    tables = toml.plain(CONFIG)
    assert renewed(tables) == tables
    assert completed(toml.dumps(CONFIG)) == tables
    assert set(ADDED) <= {*tables, *dict(flat(tables))}
    today = toml.plain(RunConfig())
    assert {name: today[name] for name in ADDED if name in today} == {
        name: value for name, value in ADDED.items() if name in today
    }


def test_an_old_field_beside_its_new_name_is_refused():
    text = toml.dumps(CONFIG).replace("max_skipped = 7", "max_skipped = 7\nmost_skipped = 5")
    with pytest.raises(toml.ConfigError, match="training.most_skipped = 5 is unknown"):
        loads_run(text)


def test_the_runs_of_an_old_chain_have_today_s_names():
    tables = toml.plain(PIPELINE_DEMO)
    old = toml.plain(PIPELINE_DEMO)
    for stage in ("ppo", "grpo"):
        old[stage]["training"]["most_skipped"] = old[stage]["training"].pop("max_skipped")
    assert old != tables
    assert renewed(old) == tables


def test_nothing_of_an_old_config_counts_as_changed():
    for config in (CONFIG, REPLAYING):
        assert differences(as_before(config), toml.dumps(config)) == {}
    other = replace(CONFIG, sampler=Mismatched("bfloat16", lag=2))
    assert differences(as_before(CONFIG), toml.dumps(other)) == {"sampler.lag": "was 1, now 2"}
    assert "sampler.type" in differences(as_before(REPLAYING), toml.dumps(replace(REPLAYING, sampler=Mismatched())))


@pytest.mark.slow("resumes a run")
@pytest.mark.usefixtures("ordinary_precision")
def test_an_old_folder_opens_and_is_resumed(tmp_path: Path, capsys):
    train(Run(CONFIG, tmp_path / "whole", ProgressLines()))
    folder = tmp_path / "old"
    train(Run(replace(CONFIG, steps=1), folder, ProgressLines()))
    (folder / "config.toml").write_text("# Proximo 0.1.0\n" + as_before(CONFIG))
    record = json.loads((folder / "run.json").read_text())
    for name in ("config", SEALED, HASH):  # which the version before did not write
        del record[name]
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "result.json").unlink()
    run = RunFolder(folder)
    assert run.config == CONFIG
    assert [each.finding for each in check_up(run).standing if each.finding.rule == "damaged-file"] == []
    assert summary(run)["step"] == 1
    assert about(run, {})["algorithm"]["name"] == "grpo"
    logged = json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])["policy_loss"]
    assert policy_loss(run.step(1), CONFIG.algorithm, CONFIG) == pytest.approx(logged, abs=1e-6)
    for command in (["report", str(folder)], ["replay", str(folder), "--step", "1", "--as", "dapo"]):
        assert main(command) == 0
    assert main(["doctor", str(folder)]) == 0
    assert own_evaluation(str(folder / "checkpoints" / "step-000001"))[0].problems == 2
    train(Run(CONFIG, folder, ProgressLines()))
    assert loads_run((folder / "config.toml").read_text()) == CONFIG
    assert "mismatch" not in (folder / "config.toml").read_text()
    rows, wanted = (metrics_of(path) for path in (folder, tmp_path / "whole"))
    assert rows[-1] == wanted[-1]
    assert [row["step"] for row in rows] == [0, 1, 2, 2]


def test_names_of_modules_that_have_moved_still_open():
    """Old run folders, and users' own configs, name classes and functions of the package by their module."""
    tools = ["proximo.worlds:calculate", "proximo.worlds.python:run_python"]
    assert renewed({"environment": {"tools": tools}})["environment"]["tools"] == [
        "proximo.environments.examples:calculate",
        "proximo.environments.examples.python:run_python",
    ]
    assert load_function(tools[0]) is load_function("proximo.environments.examples:calculate")
    assert load_class("proximo.acting.adapters.openenv:OpenEnv").__module__ == "proximo.environments.adapters.openenv"
    assert named_file("proximo.acting.adapters.openenv:OpenEnv") == named_file(
        "proximo.environments.adapters.openenv:OpenEnv"
    )


def test_a_user_s_file_may_import_from_where_a_module_was(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from proximo.maths.pieces.gates import Clip\nfrom proximo.acting import Done\n"
        "from proximo.environments import MultiTurn, Starts\nfrom proximo.samplers import SamplingOptions, gathered\n"
        "from proximo.training.runfolder.ledger import check_ledger\nfrom proximo.health import findings\n"
        "from proximo.presets import ARITHMETIC\n"
    )
    assert load_class(f"{tmp_path / 'mine.py'}:Clip") is Clip
