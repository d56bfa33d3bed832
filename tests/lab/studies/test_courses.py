"""Runs of studies that are more than training by one config."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proximo.algorithms import GRPO, GSPO, SAPO
from proximo.insight.folder import RunFolder
from proximo.insight.lens.gradients import parameter_gradients
from proximo.insight.lens.replay import compared
from proximo.models import load_model
from proximo.runs.forking import checkpoint_at
from proximo.system.machine import Machine
from proximo_lab.studies.designs.drift_warning import alarm, lead, quiet
from proximo_lab.studies.designs.pass_at_k import RECOVERY, _departs, _stays_down
from proximo_lab.studies.folder import Laboratory
from proximo_lab.studies.protocols import recovery_forks
from proximo_lab.studies.protocols.dpo import Preferred
from proximo_lab.studies.protocols.from_disk import read_course
from proximo_lab.studies.protocols.gradient_noise import Halved, Replayed, halves_curve
from proximo_lab.studies.protocols.recovery_forks import Change, Forked, fall, fork_curve
from proximo_lab.studies.record import Record, job
from proximo_lab.studies.study import Arm, design_hash
from tests.lab.studies.test_studies import SMALL, STUDY

ONE = Machine(threads=1, onednn=False)
HALVED = Halved((Replayed("same", replace(GRPO, kl=None)), Replayed("soft", SAPO)), every=2)
TWO_CHANGES = Forked((Change("same"), Change("slower", rate=0.1, algorithm=replace(GSPO, kl=None))), (-1,), steps=2)


def test_the_fall_is_half_of_the_best_so_far():
    assert fall([0.2, 0.2, 0.2, 0.8, 0.8, 0.8, 0.3, 0.3, 0.3]) == 9
    assert fall([0.8, 0.8, 0.8, 0.1, 0.1, 0.1]) == 5
    assert fall([0.4, 0.5, 0.6, 0.5, 0.4, 0.4]) is None
    assert fall([0.9]) is None


def test_a_course_travels_to_its_process_and_has_a_name_of_its_own(tmp_path):
    lab = Laboratory(tmp_path)
    jobs = [job(SMALL, 0), job(SMALL, 0, TWO_CHANGES), job(SMALL, 0, Preferred(2)), job(SMALL, 0, Preferred(3))]
    jobs.append(job(SMALL, 0, HALVED))
    assert len({each.name for each in jobs}) == 5
    lab.prepare(jobs)
    assert [read_course(lab.layout.config(each.contender)) for each in jobs] == [each.course for each in jobs]


def test_a_course_is_part_of_the_hash():
    one, other = (replace(STUDY, arms=(*STUDY.arms, Arm("more", SMALL, course=Preferred(n)))) for n in (1, 2))
    assert design_hash(one) != design_hash(other)


@pytest.mark.slow("trains runs of a study")
def test_forks_begin_around_the_fall_and_one_with_nothing_changed_is_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery_forks, "fall", lambda _: 2)
    config = replace(SMALL, steps=3)
    found = TWO_CHANGES.run(config, tmp_path, ONE)
    same, slower = (found.steps[fork_curve(name, -1)] for name in ("same", "slower"))
    assert same == found.steps["outcome"][1:]
    assert len(slower) == 2
    assert "fork/same -1/outcome" in found.steps
    assert (tmp_path / "slower--1/config.toml").read_text().count("SequenceRatio") == 1


@pytest.mark.slow("trains runs of a study")
def test_halves_are_those_of_the_steps_that_were_asked_for(tmp_path):
    config = replace(SMALL, algorithm=replace(GRPO, kl=None), steps=4)
    config = replace(config, training=replace(config.training, groups=8, minibatches=1))
    found = HALVED.run(config, tmp_path, ONE)
    same, soft = (found.steps[halves_curve(name)] for name in ("same", "soft"))
    assert [math.isnan(value) for value in same] == [True, True, False, True]
    assert -1 <= same[2] <= 1
    assert same[2] == pytest.approx(soft[2], abs=1e-4), "with one update every gate is open"
    assert found.seconds > 0


@pytest.mark.slow("trains runs of a study")
def test_halves_of_a_step_by_hand(tmp_path):
    """The cosine is that of the two gradients that training on either half of the groups would have."""
    config = replace(SMALL, algorithm=replace(GRPO, kl=None), steps=3)
    config = replace(config, training=replace(config.training, groups=4, minibatches=1))
    found = HALVED.run(config, tmp_path, ONE)
    run = RunFolder(tmp_path / "base")
    step = run.step(3)
    [view, *_] = compared(step, run.config, {})
    model = load_model(str(checkpoint_at(tmp_path / "base", 2)))
    alive = step.batch.group[step.layout.any(view.seen.gradient != 0)].unique()
    halves = []
    for groups in (alive[::2], alive[1::2]):
        inside = torch.isin(step.batch.group, groups)[step.layout.row]
        half = replace(view, name="half", seen=replace(view.seen, gradient=view.seen.gradient * inside))
        halves.append(parameter_gradients(model, step, run.config, [half, view]))
    # |a + b|² = |a|² + |b|² + 2 a·b, and the whole step's gradient is the sum of its halves'.
    first, second, whole = halves[0].norms["half"], halves[1].norms["half"], halves[0].norms[view.name]
    cosine = (whole**2 - first**2 - second**2) / (2 * first * second)
    assert found.steps[halves_curve("same")][2] == pytest.approx(cosine, abs=1e-3)


@pytest.mark.slow("trains runs of a study")
def test_preferences_use_as_many_samples_as_training_would(tmp_path):
    config = replace(SMALL, steps=4, training=replace(SMALL.training, groups=4, learning_rate=1e-3))
    found = Preferred(rounds=2, batch=2).run(config, tmp_path, ONE)
    assert len(found.steps["outcome"]) == 4
    assert list(found.held_out["step"]) == [0.0, 2.0, 4.0]
    assert found.seconds > 0
    models = {path.read_text().count("dpo-1") for path in Path(tmp_path).glob("samples-*/config.toml")}
    assert models == {0, 1}, "the second round samples with the first one's model"


def test_measures_of_a_fork():
    outcomes = [0.8, 0.8, 0.8, 0.8, 0.8, 0.1, 0.1, 0.1, 0.1]  # has fallen after 7 steps
    up, down = [0.1, 0.5, 0.8, 0.8, 0.8, 0.8, 0.8], [0.1] * 7

    def of(name, place, forked_outcomes):
        return Record({"outcome": outcomes, fork_curve(name, place): forked_outcomes}, {}, 1.0)

    assert _stays_down("a tenth of the rate", 3)(of("a tenth of the rate", 3, up)) == 0
    assert _stays_down("a tenth of the rate", 3)(of("a tenth of the rate", 3, down)) == 1
    assert math.isnan(_stays_down("a tenth of the rate", 3)(Record({"outcome": [0.8] * 9}, {}, 1.0)))
    assert _departs(of("as it was", -4, outcomes[3:])) == 0
    assert _departs(of("as it was", -4, [0.7, *outcomes[4:]])) == pytest.approx(0.1)
    assert all(contrast.against is None for contrast in RECOVERY.contrasts)


def test_the_lead_of_a_warning_over_the_fall():
    usual = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9]  # median 1, median absolute deviation 0.1
    assert alarm([*usual, 1.3, 1.5]) == 7
    assert alarm([*usual, 1.3, 0.5], falls=True) == 7
    assert alarm([*usual, 1.5], falls=True) is None
    assert alarm([0.0] * 8) is None
    assert alarm([]) is None
    outcome = [*usual, 1.0, 1.0, 1.0, 0.2]
    assert lead("entropy").of(Record({"outcome": outcome, "entropy": [*usual, 1.0, 2.0, 2.0, 2.0]}, {}, 1.0)) == 2
    assert lead("entropy").of(Record({"outcome": outcome, "entropy": [1.0] * 10}, {}, 1.0)) == -1
    assert math.isnan(lead("entropy").of(Record({"outcome": [1.0] * 10, "entropy": [1.0] * 10}, {}, 1.0)))
    assert quiet("entropy").of(Record({"entropy": [1.0] * 10}, {}, 1.0)) == 1
