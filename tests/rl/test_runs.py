"""Whole runs with value and reward models: what is in memory, what is logged, what is refused."""

import gc
import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import PreTrainedModel, Qwen3ForSequenceClassification

from proximo.algorithms import DAPO, DISTILL, GRPO, PPO, VAPO, Algorithm
from proximo.cli import main
from proximo.config import toml
from proximo.learner.learner import Learner
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.losses import AdaptiveKl, KlLoss, KlReward
from proximo.models import pick_device, tiny_model, tiny_tokenizer
from proximo.models.scoring import score
from proximo.models.values import HeadOnOwnLayers, OwnLayers, OwnModel, TrunkHead
from proximo.recipes.presets import ARITHMETIC
from proximo.rl.assemble import assemble
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.rl.preflight.estimate import held_models
from proximo.rl.progress import ProgressLines
from proximo.rl.reward_config import RewardMix, RewardModel
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.health import HealthMonitor
from proximo.runs.health.updates import WeakValueModel
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import File
from proximo.tasks.arithmetic import Arithmetic
from proximo.types import Completion, Grade, Group, Problem, Rollout

pytestmark = pytest.mark.usefixtures("ordinary_precision")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("policy")
    tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> str:
    """A reward model with a head that is not 0."""
    folder = tmp_path_factory.mktemp("judge")
    body = tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=2)
    config = body.config
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForSequenceClassification._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def config(model: str, algorithm: Algorithm = PPO, **changes) -> RunConfig:
    small = RunConfig(
        algorithm=algorithm,
        task=Arithmetic(held_out=8),
        model=model,
        device="cpu",
        sampling=SamplingOptions(max_tokens=4),
        training=TrainingOptions(groups=2, group_size=2, minibatches=1, learning_rate=1e-3),
        evaluation=EvaluationOptions(problems=4),
        steps=2,
    )
    return replace(small, **changes)


def rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


WITHOUT_KL = replace(PPO, shape=None)
MEMORY = [
    # algorithm, value, roles of the models in memory
    (replace(GRPO, kl=KlLoss(0.0)), None, ["policy"]),
    (GRPO, None, ["policy", "reference"]),
    (WITHOUT_KL, None, ["policy", "value model's 1 layers"]),
    (PPO, None, ["policy", "reference", "value model's 1 layers"]),
    (PPO, ValueOptions(TrunkHead()), ["policy", "reference"]),
    (WITHOUT_KL, ValueOptions(OwnLayers(1)), ["policy", "value model's 1 layers"]),
    (WITHOUT_KL, ValueOptions(OwnModel()), ["policy", "value model"]),
    (PPO, ValueOptions(OwnModel()), ["policy", "reference", "value model"]),
]


@pytest.mark.slow("trains runs")
@pytest.mark.parametrize(("algorithm", "value", "roles"), MEMORY)
def test_models_in_memory_are_those_that_are_announced(algorithm, value, roles, policy, tmp_path):
    settings = config(policy, algorithm, value=value)
    assert [held.role for held in held_models(settings)] == roles
    gc.collect()
    before = {id(each) for each in gc.get_objects() if issubclass(type(each), PreTrainedModel)}
    run = Run(settings, tmp_path, ProgressLines())
    models = [each for each in gc.get_objects() if issubclass(type(each), PreTrainedModel) and id(each) not in before]
    whole = [each for each in models if hasattr(each, "lm_head")]  # a body is a part of its model
    # Copied layers are no model of their own.
    assert len(whole) == len([role for role in roles if "layers" not in role])
    assert run.model in whole
    parameters = sum(each.numel() for model in whole for each in model.parameters())
    announced = sum(held.parameters for held in held_models(settings) if "layers" not in held.role)
    assert parameters == announced


def test_a_reward_model_is_counted_and_printed(policy, judge, capsys):
    flags = [
        "--model",
        policy,
        "--task.type",
        "Arithmetic",
        "--reward-model",
        judge,
        "--rewards.task",
        "0",
        "--algorithm",
        "ppo",
        "--dry-run",
    ]
    assert main(["train", *flags]) == 0
    printed = capsys.readouterr().out
    assert ": policy (" in printed
    assert f"reward model {judge} (" in " ".join(printed.replace("\n#", " ").split())
    loaded = toml.loads(printed, RunConfig)
    assert loaded.rewards == RewardMix(task=0.0, models=(RewardModel(judge),))
    assert loaded.value == ValueOptions(OwnLayers(1))


@pytest.mark.parametrize("value", [None, ValueOptions()])
def test_ppo_gets_its_own_layer_and_a_rate_that_it_learns_with(value, policy, tmp_path):
    """A head on the policy's states stays worse than the siblings' mean on the demo; an own layer at 1e-3 does not."""
    settings = config(policy, value=value)
    run = Run(settings, tmp_path, ProgressLines())
    assert run.learner.critic is not None
    assert isinstance(run.learner.critic.model, HeadOnOwnLayers)
    assert len(run.learner.critic.model.layers) == 1
    assert run.learner.rates[1] == 50 * settings.training.learning_rate
    assert ValueOptions().rate(ARITHMETIC.training.learning_rate) == pytest.approx(1e-3)


@pytest.mark.parametrize(("form", "pace"), [(TrunkHead(), 10), (OwnLayers(2), 50), (OwnModel(), 10)])
def test_a_value_model_learns_faster_than_the_policy_unless_told_otherwise(form, pace):
    assert ValueOptions(form).rate(2e-6) == pace * 2e-6
    assert ValueOptions(form, learning_rate=3e-4).rate(2e-6) == 3e-4


@pytest.mark.slow("trains a run")
def test_a_run_pretrains_its_values_then_everything(policy, judge, tmp_path):
    mix = RewardMix(task=0.0, models=(RewardModel(judge, device="cpu"),))  # a random model earns no verdict
    settings = config(policy, value=ValueOptions(OwnLayers(1), pretrain_steps=1), rewards=mix, steps=2)
    run = Run(settings, tmp_path, ProgressLines())
    start = [parameter.detach().clone() for parameter in run.model.parameters()]
    train(run)
    first, second = (row for row in rows(tmp_path, "metrics.jsonl") if "value" in row)
    assert "policy_loss" not in first
    assert first["value_loss"] > 0
    assert first["gradient_norm"] == 0.0
    assert first["value_gradient_norm"] > 0
    assert "policy_loss" in second
    wanted = {"explained_variance", "return", "return_std", "advantage", "advantage_std", "advantage_min"}
    wanted |= {"advantage_max", "value_error/quarter_1", "value_error/quarter_4", "baseline_error/value"}
    wanted |= {"baseline_error/group", "value_clip", "reference_kl", "kl_coefficient"}
    assert wanted <= second.keys()
    assert any(not torch.equal(old, new) for old, new in zip(start, run.model.parameters(), strict=True))
    table = pq.read_table(tmp_path / "rollouts" / "step-000002.parquet")
    assert {"values", "returns", "ref_logprobs", "advantages"} <= set(table.column_names)


def test_a_run_on_a_reward_model_shows_learned_and_true_reward(policy, judge, tmp_path):
    mix = RewardMix(task=0.0, models=(RewardModel(judge, weight=2.0, device="cpu"),))
    settings = config(policy, GRPO, rewards=mix, steps=1)
    outcome = train(Run(settings, tmp_path, ProgressLines()))
    before, step, after = rows(tmp_path, "metrics.jsonl")
    assert before["held_out/outcome"] == 0.0  # a random model adds nothing up
    assert before["held_out/parts/reward_model"] == before["held_out/reward"] != 0.0
    assert step["rewards/reward_model"] == pytest.approx(step["reward"])
    assert step["outcome"] == 0.0
    assert step["reference_kl"] == pytest.approx(0.0, abs=1e-5)
    assert after["held_out/parts/reward_model"] == pytest.approx(outcome.after.parts["reward_model"])
    table = pq.read_table(tmp_path / "rollouts" / "step-000001.parquet")
    assert dict(table["parts"][0].as_py())["reward_model"] == pytest.approx(table["reward"][0].as_py())


@pytest.mark.slow("trains a run")
def test_a_value_model_from_a_folder(policy, judge, tmp_path):
    for path in (policy, judge):
        settings = config(policy, value=ValueOptions(OwnModel(path)), steps=1)
        run = Run(settings, tmp_path / Path(path).name, ProgressLines())
        assert run.learner.critic is not None
        head = run.learner.critic.model.head.weight  # pyright: ignore[reportAttributeAccessIssue]
        assert bool(head.any()) == (path == judge)  # a reward model brings its own head
        outcome = train(run)
        assert math.isfinite(outcome.after.accuracy)


def test_a_value_model_of_another_vocabulary_is_refused_before_it_is_loaded(policy, tmp_path):
    other = tiny_tokenizer()
    other.add_tokens(["<more>"])
    folder = tmp_path / "other"
    other.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"value.form.path is .*: its vocabulary is not the policy's"):
        Run(config(policy, value=ValueOptions(OwnModel(str(folder)))), tmp_path / "run", ProgressLines())


def test_a_teacher_is_scored_frozen_and_counted(policy, tmp_path):
    teacher = tmp_path / "teacher"
    tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=32, seed=5).save_pretrained(teacher)
    tiny_tokenizer().save_pretrained(teacher)
    settings = config(policy, DISTILL, teacher=str(teacher))
    run = Run(settings, tmp_path / "run", ProgressLines())
    assert run.teacher is not None
    before = {name: each.clone() for name, each in run.teacher.named_parameters()}
    assert not any(each.requires_grad for each in run.teacher.parameters())
    train(run)
    assert all(torch.equal(before[name], each) for name, each in run.teacher.named_parameters())
    table = pq.read_table(tmp_path / "run/rollouts/step-000001.parquet").to_pylist()
    row = table[0]
    batch = {"tokens": torch.tensor([row["tokens"]]), "lengths": torch.tensor([len(row["tokens"])])}
    prompt = {"prompts": (tuple(row["prompt_tokens"]),), "group": torch.tensor([0]), "temperature": 1.0}
    exact = score(run.teacher, **batch, **prompt).logprobs[0]
    torch.testing.assert_close(torch.tensor(row["teacher_logprobs"]), exact)
    gaps = [
        old - own for each in table for old, own in zip(each["old_logprobs"], each["teacher_logprobs"], strict=True)
    ]
    metrics = next(each for each in rows(tmp_path / "run", "metrics.jsonl") if "teacher_kl" in each)
    assert metrics["teacher_kl"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-5)
    assert metrics["advantage"] == pytest.approx(-metrics["teacher_kl"], rel=1e-5)
    held = {each.role: each for each in held_models(settings)}
    assert held["teacher"].parameters == sum(each.numel() for each in run.teacher.parameters())
    assert not held["teacher"].trained


def test_a_teacher_that_does_not_fit_is_refused_before_it_is_loaded(policy, tmp_path):
    def refused(words: str, algorithm: Algorithm = DISTILL, **changes) -> None:
        with pytest.raises(ValueError, match=words):
            Run(replace(config(policy, algorithm), **changes), tmp_path / "run", ProgressLines())

    refused(r"teacher is None, but algorithm.advantage TeacherKl reads one")
    refused(r"teacher is .*, but algorithm.advantage GroupNormalized reads none", GRPO, teacher=policy)
    other = tiny_tokenizer()
    other.add_tokens(["<more>"])
    other.save_pretrained(tmp_path / "other")
    refused(r"teacher is .*: its vocabulary is not the policy's", teacher=str(tmp_path / "other"))
    wide = tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=32, seed=5)
    wide.resize_token_embeddings(128)
    wide.save_pretrained(tmp_path / "wide")
    tiny_tokenizer().save_pretrained(tmp_path / "wide")
    refused(r"teacher is .*: it has \d+ embeddings, the model 128", model=str(tmp_path / "wide"), teacher=policy)


REFUSED = [
    (lambda: config("m", GRPO, value=ValueOptions()), r"GroupNormalized uses no value model"),
    (lambda: config("m", value=ValueOptions(pretrain_steps=2)), r"pretrain_steps is 2 of 2 steps: no step is left"),
    (lambda: ValueOptions(learning_rate=0.0), r"value.learning_rate is 0.0"),
    (lambda: ValueOptions(pretrain_steps=-1), r"value.pretrain_steps is -1"),
    (
        lambda: config("m", DAPO, rewards=RewardMix(0.0, (RewardModel("r"),))),
        r"KeepMixed, which goes by the task's verdict: reward the verdict too.*KeepAll`$",
    ),
    (
        lambda: config("m", DAPO, task=File("f.jsonl"), rewards=RewardMix(0.0, (RewardModel("r"),))),
        r"KeepAll`, or leave the answers ungraded, .* by the whole reward, `task.reward.type=None`",
    ),
    (lambda: config("m", VAPO, rewards=RewardMix(0.0, (RewardModel("r"),))), r"PositiveNll, which goes by the task"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_contradictions_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# What a review found


def test_a_verdict_that_is_only_watched_decides_nothing():
    grade = Grade(math.nan, {"reward_model": 0.5})
    assert grade.reward == 0.5
    group = Group(
        Problem("a", "a", ""), (5,), tuple(Rollout(Completion((7,), (-1.0,), "", "stop"), grade) for _ in "ab")
    )
    model = tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)
    learner = Learner(PlainPolicy(model), GRPO, LearnerOptions(groups=1, minibatches=1), temperature=1.0, seed=0)
    assert len(assemble([group], [], learner, 8).batch) == 2


def test_dropped_groups_take_part_in_the_values_and_the_whitening():
    """GAE whitened over everything that was sampled: the dropped group's rows are scored, too."""
    model = tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)
    learner = Learner(PlainPolicy(model), PPO, LearnerOptions(groups=1, minibatches=1), temperature=1.0, seed=0)

    def group(name: str, *outcomes: float) -> Group:
        said = Completion((7, 1), (-1.0, -1.0), "", "stop")
        return Group(Problem(name, name, ""), (5, 6), tuple(Rollout(said, Grade(outcome)) for outcome in outcomes))

    batch = assemble([group("a", 1.0, 0.0)], [group("b", 1.0, 1.0)], learner, 8).batch
    # Values start at 0 and γ is 1: returns 1, 0 | 1, 1 by λ = 0.95 before the end; six tokens earn, two do not.
    raw = torch.tensor([[0.95, 1.0], [0.0, 0.0], [0.95, 1.0], [0.95, 1.0]], dtype=torch.float64)
    expected = (raw[:2] - raw.mean()) / raw.std(correction=1)
    torch.testing.assert_close(batch.advantages, expected, rtol=0, atol=1e-5)
    assert len(batch) == 2


@pytest.mark.slow("trains a run")
def test_the_controller_waits_for_the_policy_and_is_bounded(policy, judge, tmp_path):
    shape = KlReward(0.1, controller=AdaptiveKl(target=1.0, horizon=1))  # four completions a step
    mix = RewardMix(task=0.0, models=(RewardModel(judge, device="cpu"),))
    value = ValueOptions(TrunkHead(), pretrain_steps=2)
    settings = config(policy, replace(PPO, shape=shape), value=value, rewards=mix, steps=4)
    train(Run(settings, tmp_path, ProgressLines()))
    found = [row["kl_coefficient"] for row in rows(tmp_path, "metrics.jsonl") if "kl_coefficient" in row]
    assert found == pytest.approx([0.1, 0.1, 0.1, 0.08])


@pytest.mark.slow("trains a run")
def test_values_are_pretrained_on_what_was_earned_and_a_weak_one_is_reported(policy, judge, tmp_path):
    mix = RewardMix(task=0.0, models=(RewardModel(judge, device="cpu"),))
    settings = config(policy, value=ValueOptions(TrunkHead(), pretrain_steps=1), rewards=mix, steps=3)
    run = Run(settings, tmp_path, ProgressLines())
    run.monitor.health = HealthMonitor([WeakValueModel(window=1)])
    seen = []
    updates = run.learner.value_updates
    run.learner.value_updates = lambda batch: seen.append(batch) or updates(batch)
    train(run)
    [batch] = seen
    torch.testing.assert_close(batch.returns[:, 0], batch.rewards, rtol=0, atol=1e-5)  # λ = 0.95 would be less
    [event] = rows(tmp_path, "events.jsonl")
    assert (event["kind"], event["rule"], event["severity"]) == ("finding", "weak-value-model", "warning")
    assert "value.pretrain_steps" in event["remedy"]


def test_a_value_gradient_that_is_not_finite_is_reported(policy, judge, tmp_path):
    mix = RewardMix(task=0.0, models=(RewardModel(judge, weight=1e30, device="cpu"),))
    settings = config(policy, replace(PPO, shape=None), value=ValueOptions(OwnModel()), rewards=mix, steps=1)
    train(Run(settings, tmp_path, ProgressLines()))
    assert "skipped_update" in [row["kind"] for row in rows(tmp_path, "events.jsonl")]


@pytest.mark.parametrize("name", ["nope", "cuda:0"])
def test_a_device_that_is_not_there(name):
    if name == "cuda:0" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=f"device is '{name}'"):
        pick_device(name)


@pytest.mark.slow("trains a run")
def test_prompts_that_do_not_fit_are_named_before_a_model_loads_or_left_out(policy, tmp_path, capsys):
    file = tmp_path / "problems.jsonl"
    lines = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(12)]
    lines[3]["prompt"] = "1" * 5000
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "not json\n")
    flags = ["--model", policy, "--task.type", "File", "--task.path", str(file), "--task.held-out", "0.2"]
    small = ["--steps", "1", "--training.groups", "2", "--training.minibatches", "1", "--evaluation.problems", "2"]
    small += ["--sampling.max-tokens", "8"]
    with pytest.raises(SystemExit) as stopped:
        main(["train", *flags, *small, "--run", str(tmp_path / "a")])
    assert stopped.value.code == 2
    assert f"{file}:13: not JSON" in capsys.readouterr().err
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit):
        main(["train", *flags, *small, "--run", str(tmp_path / "a")])
    assert f"{file}:4: the prompt has 5000 tokens" in capsys.readouterr().err
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "not json\n")
    assert main(["train", *flags, *small, "--skip-bad", "--run", str(tmp_path / "b")]) == 0
    events = rows(tmp_path / "b", "events.jsonl")
    assert [row["kind"] for row in events][:2] == ["skipped_row", "skipped_row"]
    assert f"bad rows left out: 2; {file}:13: not JSON" in capsys.readouterr().err
