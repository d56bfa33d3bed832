"""What a run asks of its rollouts: groups one by one, others in the place of dropped ones, samples of several rows."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Lock

import pyarrow.parquet as parquet
import pytest
import torch

from proximo.algorithms import DAPO, GRPO, Algorithm
from proximo.losses import TokenMean
from proximo.losses.pieces.advantages import GroupNormalized
from proximo.losses.records import Feedback
from proximo.rl.assemble import credited
from proximo.rl.config import RunConfig, TrainingOptions
from proximo.rl.progress import ProgressLines
from proximo.rl.rollouts import Collector, Rollouts, is_dropped
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.checkpoints import CHECKPOINTS, saved, step_of
from proximo.runs.ledger import check_ledger
from proximo.runs.records import Collected, DataCursor, num_tokens
from proximo.runs.rollout_json import plain_group, read_group
from proximo.types import Completion, Grade, Group, Problem, Rollout
from tests.runs.test_resume import config as small_run

pytestmark = pytest.mark.usefixtures("small_shipped_model", "ordinary_precision")


class OneByOne(Rollouts):
    """Samples a group when it is asked for, and another for each that is dropped, at once."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.happened: list[str] = []

    def begin_step(self, policy, version, cursor, step):
        self.version = self.collector.sampler.refresh(policy, version)
        self.cursor, self.step, self.next = cursor, step, cursor.next_problem
        self.wanted, self.kept, self.dropped = self.collector.training.groups, list[Group](), list[Group]()
        return self.version

    def groups(self) -> Iterator[Group]:
        while self.wanted:
            [(ordinal, problem)], _ = self.collector.chosen(self.next, 1, {})
            group = self.collector.group(ordinal, problem, step=self.step, version=self.version, grading=Lock())
            self.wanted, self.next = self.wanted - 1, self.next + 1
            self.kept.append(group)
            self.happened.append("came")
            yield group

    def drop(self, group, *, refill):
        self.kept = [each for each in self.kept if each is not group]
        self.dropped.append(group)
        self.wanted += refill and len(self.dropped) < 20
        self.happened.append("dropped")

    def collected(self) -> Collected:
        tokens = sum(num_tokens(group) for group in (*self.kept, *self.dropped))
        cursor = DataCursor(self.next)
        return Collected(tuple(self.kept), tuple(self.dropped), cursor, rounds=1, sampled_tokens=tokens)

    def evaluate(self, sampler, policy, version, work):
        return work(sampler.refresh(policy, version))


class Forked(OneByOne):
    """Gives every other sample as two rows: its first half, and its second half behind a first that is not trained."""

    def collected(self) -> Collected:
        whole = super().collected()
        return replace(whole, groups=tuple(map(forked, whole.groups)), dropped=tuple(map(forked, whole.dropped)))


def forked(group: Group) -> Group:
    rows = [row for number, rollout in enumerate(group.rollouts) for row in rows_of(number, rollout)]
    return replace(group, rollouts=tuple(rows))


def rows_of(number: int, rollout: Rollout) -> list[Rollout]:
    whole, half = rollout.completion, len(rollout.completion.tokens) // 2
    if number % 2 or not half:
        return [replace(rollout, sample=number)]
    first = replace(whole, tokens=whole.tokens[:half], logprobs=whole.logprobs[:half], entropies=whole.entropies[:half])
    second = replace(whole, sampled=tuple(place >= half for place in range(len(whole.tokens))))
    return [Rollout(each, rollout.grade, sample=number) for each in (first, second)]


def config(algorithm: Algorithm = GRPO, **changes) -> RunConfig:
    training = TrainingOptions(groups=3, group_size=4, minibatches=1, learning_rate=1e-3, warmup_steps=0)
    return small_run(algorithm, **{"training": training, "steps": 3, **changes})


def trained(settings: RunConfig, folder: Path, kind: type[OneByOne]) -> tuple[Run, OneByOne]:
    run = Run(settings, folder, ProgressLines())
    run.rollouts = rollouts = kind(run.collector)
    train(run)
    return run, rollouts


@pytest.mark.slow("trains a run")
def test_a_run_takes_groups_one_by_one_and_asks_for_others_while_they_come(tmp_path: Path):
    settings = config(DAPO)
    _, rollouts = trained(settings, tmp_path / "whole", OneByOne)
    assert "dropped came" in " ".join(rollouts.happened)
    assert rollouts.happened.count("came") - rollouts.happened.count("dropped") == 3 * 3
    assert check_ledger(tmp_path / "whole").wrong == ()
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert [row["groups"] for row in rows if "groups" in row] == [3] * 3
    ignore = [each.name for each in saved(tmp_path / "whole" / CHECKPOINTS) if step_of(each) != 1]
    ignored = shutil.ignore_patterns(*ignore, "result.json")
    shutil.copytree(tmp_path / "whole", tmp_path / "run", ignore=ignored)
    trained(settings, tmp_path / "run", OneByOne)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_sample_of_several_rows_trains_as_the_sample_that_it_is(tmp_path: Path):
    """Each sampled token is in the loss once, and siblings are compared by samples: loss and gradient are those of a
    run whose samples are one row each, up to rounding."""
    settings = config(replace(GRPO, weights=TokenMean()), steps=1)
    for name, kind in (("whole", OneByOne), ("split", Forked)):
        trained(settings, tmp_path / name, kind)
    whole, split = (parquet.read_table(tmp_path / name / "rollouts/step-000001.parquet") for name in ("whole", "split"))
    assert split.num_rows > whole.num_rows
    assert _last_advantages(split) == _last_advantages(whole)
    one, other = (_updated(tmp_path / name) for name in ("whole", "split"))
    assert one["gradient_norm"] > 0.1
    assert other == pytest.approx(one, rel=1e-4, abs=1e-7)
    assert check_ledger(tmp_path / "split").wrong == ()


def _last_advantages(table) -> set[tuple[int, float]]:
    return {(row["group"], round(row["advantages"][-1], 6)) for row in table.to_pylist()}


def _updated(folder: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    [row] = [row for row in rows if "gradient_norm" in row]
    return {name: row[name] for name in ("gradient_norm", "policy_loss", "ratio_spread", "sampled_tokens")}


def rows(*samples: tuple[int | None, float]) -> Group:
    completion = Completion((1, 2), (-0.5, -0.5), "a", "stop")
    rollouts = tuple(Rollout(completion, Grade(outcome), sample) for sample, outcome in samples)
    return Group(Problem("p", "?", ""), (0,), rollouts, ordinal=0)


def test_siblings_are_compared_by_samples():
    """Rewards 1, 0, 0, and the first in three rows: the mean is 1/3, and the standard deviation that of three."""
    group = rows((0, 1.0), (0, 1.0), (1, 0.0), (0, 1.0), (None, 0.0))
    assert [sample.grade.outcome for sample in group.samples] == [1.0, 0.0, 0.0]
    mask = torch.ones(5, 2, dtype=torch.bool)
    mask[1, 0] = False
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    credit = credited(GroupNormalized(epsilon=0.0), Feedback(rewards, torch.zeros(5, dtype=torch.long), mask), (group,))
    right, wrong = (2 / 3) / (1 / 3) ** 0.5, -(1 / 3) / (1 / 3) ** 0.5
    expected = [[right, right], [0.0, right], [wrong, wrong], [right, right], [wrong, wrong]]
    torch.testing.assert_close(credit.advantages, torch.tensor(expected, dtype=torch.float64))


def test_rows_of_a_sample_that_a_grader_could_not_score_do_not_train():
    group = rows((0, float("nan")), (0, float("nan")), (1, 0.0), (2, 1.0))
    rewards = torch.tensor([torch.nan, torch.nan, 0.0, 1.0], dtype=torch.float64)
    feedback = Feedback(rewards, torch.zeros(4, dtype=torch.long), torch.ones(4, 2, dtype=torch.bool))
    credit = credited(GroupNormalized(epsilon=0.0), feedback, (group,))
    assert credit.advantages.isnan().all(dim=1).tolist() == [True, True, False, False]
    assert credit.advantages[2, 0] == -credit.advantages[3, 0]


def test_a_group_is_dropped_by_its_samples():
    assert is_dropped(DAPO.keep, rows((0, 1.0), (0, 1.0)))
    assert not is_dropped(DAPO.keep, rows((0, 1.0), (0, 1.0), (1, 0.0)))


def test_rows_of_a_sample_survive_a_resume():
    group = rows((0, 1.0), (0, 1.0), (None, 0.0))
    stored = json.loads(json.dumps(plain_group(group, {})))
    assert "sample" not in stored["rollouts"][2]
    again = read_group(stored, lambda *_: group.problem, {})  # pyright: ignore[reportArgumentType]
    assert again == group
