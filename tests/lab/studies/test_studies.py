"""Studies as values, what they find in given records, and their pages."""

import json
import math
import re
from dataclasses import dataclass, make_dataclass, replace

import pytest
import torch

from proximo.algorithms import PPO
from proximo.cli import main
from proximo.config import toml
from proximo.insight.charts.drawing import COLOURS
from proximo.insight.compare import workers
from proximo.recipes.presets import ARITHMETIC
from proximo.rl.config import ValueOptions, loads_run
from proximo.system.locks import FolderLock
from proximo.types import Completion, Problem
from proximo_lab.studies import command, measures, running
from proximo_lab.studies.__main__ import main as module
from proximo_lab.studies.command import conclude, conduct, listed, named
from proximo_lab.studies.designs import STUDIES
from proximo_lab.studies.figure import figure
from proximo_lab.studies.finding import findings
from proximo_lab.studies.folder import Laboratory
from proximo_lab.studies.noise import NoisyVerdict
from proximo_lab.studies.page import headline, page
from proximo_lab.studies.record import SECONDS, Record, essence, job, read, write
from proximo_lab.studies.running import arm_jobs, chosen_rate, tuning_jobs, with_rate
from proximo_lab.studies.study import Arm, Contrast, Measure, Study, Tuning, design_hash
from proximo_lab.studies.verdicts import stored_verdicts
from proximo_lab.studies.wording import label
from tests import ROOT
from tests.run_processes import RunStarter

SMALL = replace(
    ARITHMETIC,
    device="cpu",
    steps=1,
    training=replace(ARITHMETIC.training, groups=2, minibatches=1, learning_rate=1e-5),
    evaluation=replace(ARITHMETIC.evaluation, problems=4),
)


def contrast(what: str, arm: str, counts: float = 0.1) -> Contrast:
    return Contrast(what, arm, "base", measures.ACCURACY, counts, (19,))


STUDY = Study(
    name="small",
    title="A small study",
    claim="It helps.",
    source="somewhere",
    question="Does it help?",
    arms=tuple(
        Arm(name, with_rate(SMALL, rate), tuned=name == "helped")
        for name, rate in {"base": 1e-5, "helped": 2e-5, "must": 3e-5, "same": 4e-5}.items()
    ),
    seeds=(0, 1, 2, 3),
    contrasts=(contrast("it helps", "helped"),),
    positive=(contrast("this must help", "must"),),
    negative=(contrast("this must not", "same"),),
    measures=(measures.ACCURACY, measures.ENTROPY),
    curve="entropy",
    caveats=("small",),
    change="more seeds",
    run_seconds=1,
)


def record(outcome: float, entropy: float = 0.5) -> Record:
    return Record({"entropy": [1.0, entropy]}, {"step": [0.0, 2.0], "outcome": [0.0, outcome]}, 1.0)


def runs(**means: float) -> dict[tuple[str, int], Record]:
    """Four seeds around each mean."""
    ends = (0.01, -0.01, 0.02, -0.02)
    of = {"base": 0.0, "helped": 0.0, "must": 0.3, "same": 0.0} | means
    return {
        (arm, seed): record(0.5 + mean + (ends[seed] if arm == "helped" else 0.0))
        for arm, mean in of.items()
        for seed in STUDY.seeds
    }


@pytest.mark.parametrize(
    ("helped", "stored", "said"),
    [
        (0.2, "holds here", "reproduced"),
        (-0.2, "contrary", "opposite effect"),
        (0.0, "does not hold here", "not reproduced"),
        (
            0.09,
            "not detectable at this size",
            "not detectable at this size: there is a difference, which may be less than what counts; the smallest "
            "effect we could have seen is 0.029 share",
        ),
    ],
)
def test_a_study_says_what_it_found(helped, stored, said):
    found = findings(STUDY, runs(helped=helped))
    assert headline(found, found.contrasts[0]) == said
    assert found.to_dict()["contrasts"][0]["verdict"] == stored


def test_where_nothing_is_seen_the_smallest_visible_effect_is_named():
    study = replace(STUDY, contrasts=(contrast("it helps", "helped", counts=0.02),))
    found = findings(study, runs(helped=0.0))
    said = "not detectable at this size: the smallest effect we could have seen is 0.029 share"
    assert headline(found, found.contrasts[0]) == said


def test_a_failing_control_leaves_no_verdict():
    blind = findings(STUDY, runs(helped=0.2, must=0.0))
    assert headline(blind, blind.contrasts[0]).startswith(
        "no verdict: a control did not come out as it must (this must"
    )
    seeing = findings(STUDY, runs(helped=0.2, same=-0.3))
    assert [each.contrast.what for each in seeing.failed] == ["this must not"]
    assert seeing.verdict(seeing.contrasts[0]) == "no verdict"
    # An interval from −0.13 to 0.13 has shown neither an effect nor that there is none.
    unsure = runs(helped=0.2) | {("same", seed): record(0.5 + (0.08, -0.08)[seed % 2]) for seed in STUDY.seeds}
    wide = findings(STUDY, unsure)
    assert [each.contrast.what for each in wide.failed] == ["this must not"]


def test_no_verdict_before_the_last_run():
    some = runs(helped=0.2)
    del some["same", 3]
    found = findings(STUDY, some)
    assert headline(found, found.contrasts[0]) == "no verdict yet: 15 of 16 runs are done"


def test_the_page_has_what_a_reader_needs_and_the_same_bytes_again():
    found = findings(STUDY, runs(helped=0.2))
    text = page(found, {"base": 1e-5})
    assert text == page(findings(STUDY, runs(helped=0.2)), {"base": 1e-5})
    for wanted in (
        "> It helps.",
        "**Verdict: reproduced**",
        "+0.2 share (+0.171 to +0.229)",
        "4 seeds",
        design_hash(STUDY),
        "this must help",
        "more seeds",
        "proximo study small\n",
        "16 runs on one thread each, 16 seconds together",
    ):
        assert wanted in text, wanted
    drawn = figure(found)
    assert drawn.startswith("<svg xmlns=")
    assert "4 seeds" in drawn
    palette = re.findall(r"--(s\d): (#\w+);", (ROOT / "src/proximo/insight/charts/style.css").read_text())[:COLOURS]
    for name, colour in palette:  # or a seventh arm would be as black as an eighth
        assert f".{name} {{ color: {colour} }}" in drawn


def test_a_figure_shows_the_arms_that_are_named_and_no_share_beyond_1():
    records = {
        (arm, seed): replace(each, steps={"outcome": [0.0, 1.0] if seed % 2 else [1.0, 0.0]})
        for (arm, seed), each in runs(helped=0.2).items()
    }
    found = findings(replace(STUDY, curve="outcome", drawn=("helped",)), records)
    drawn = figure(found)
    assert "helped" in drawn
    assert "base" not in drawn
    assert not {"1.5", "-0.5"} & set(re.findall(r">([-0-9.]+)</text>", drawn)), "the axis ends where shares do"
    assert f" 1 of {len(STUDY.arms)} arms; a table below has all." in page(found, {"base": 1e-5})
    assert design_hash(found.study) == design_hash(replace(STUDY, curve="outcome"))


def test_a_figure_of_evaluations_has_their_steps_and_says_so():
    """Training's own samples mislead where an algorithm picks among them, as dynamic sampling does."""
    tested = {"step": [0.0, 10.0, 25.0], "mean_at_k": [0.2, 0.5, 0.75], "outcome": [0.0, 0.0, 0.0]}
    records = {place: replace(each, held_out=tested) for place, each in runs(helped=0.2).items()}
    found = findings(replace(STUDY, curve="mean_at_k", held_out=True), records)
    drawn = figure(found)
    assert "held-out mean_at_k, 4 seeds" in drawn
    assert "step 10 · base 0.5 · " in drawn
    assert "helped 0.75</text>" in drawn
    assert "\n\nHeld-out `mean_at_k` over the steps: " in page(found, {"base": 1e-5})


def test_what_counts_is_part_of_the_hash():
    other = replace(STUDY, contrasts=(contrast("it helps", "helped", counts=0.01),))
    assert design_hash(other) != design_hash(STUDY)
    assert design_hash(replace(STUDY, run_seconds=5)) == design_hash(STUDY)


@dataclass(frozen=True)
class Before:
    rate: float = 0.1
    inner: tuple[int, ...] = (1, 2)


Later = make_dataclass(
    "Before", [("rate", float, 0.1), ("inner", tuple[int, ...], (1, 2)), ("added", int, 7)], frozen=True
)


def test_a_field_that_is_added_later_changes_no_name():
    assert essence(Before(0.2)) == essence(Later(0.2)) == {"type": "Before", "rate": 0.2}
    assert essence(Later(added=8)) == {"type": "Before", "added": 8}
    assert essence(Before(inner=(3,))) == {"type": "Before", "inner": [3]}
    assert job(SMALL, 0).contender == job(SMALL, 5).contender
    assert job(SMALL, 0).contender != job(with_rate(SMALL, 7e-5), 0).contender


def test_a_design_changed_after_the_runs_is_refused(tmp_path):
    lab = Laboratory(tmp_path)
    lab.settle(STUDY)
    lab.settle(STUDY)
    other = replace(STUDY, contrasts=(contrast("it helps", "helped", counts=0.01),))
    with pytest.raises(ValueError, match="with the hash .*give another folder with --out"):
        lab.settle(other)


def test_a_pilot_has_other_files_fewer_seeds_and_says_so():
    pilot = STUDY.quick()
    assert (pilot.label, len(pilot.seeds), pilot.tuning) == ("small-quick", 3, None)
    assert design_hash(pilot) != design_hash(STUDY)
    assert "**A pilot" in page(findings(pilot, {}), {})
    found = findings(pilot, {key: each for key, each in runs(helped=0.2).items() if key[1] in pilot.seeds})
    assert headline(found, found.contrasts[0]) == "only a pilot: reproduced"
    assert "**Verdict: only a pilot: reproduced**" in page(found, {})


def test_a_record_is_read_as_it_was_written_and_a_damaged_one_is_none(tmp_path):
    path = tmp_path / "results/a.json"
    kept = Record({"entropy": [0.123456789, math.nan]}, {"step": [0.0], "outcome": [0.5]}, 2.34)
    write(path, kept)
    found = read(path)
    assert found is not None
    assert found.steps["entropy"][0] == 0.123457
    assert found.known("entropy") == [0.123457]
    assert (found.held_out, found.seconds) == ({"step": [0.0], "outcome": [0.5]}, 2.3)
    path.write_text(path.read_text()[:20])
    assert read(path) is None


def test_tuning_takes_the_best_rate_on_other_seeds(tmp_path):
    study = replace(STUDY, tuning=Tuning((1e-5, 2e-5, 4e-5), (10, 11), measures.ACCURACY))
    lab, [arm] = Laboratory(tmp_path), [arm for arm in study.arms if arm.tuned]
    assert len(tuning_jobs(study)) == 6
    assert chosen_rate(study, arm, lab) is None
    assert ("helped", 0) not in arm_jobs(study, lab)
    for rate, outcomes in {1e-5: (0.2, 0.3), 2e-5: (0.4, 0.3), 4e-5: (0.3, 0.4)}.items():
        for seed, outcome in zip(study.tuning.seeds if study.tuning else (), outcomes, strict=True):
            write(lab.result(job(with_rate(arm.config, rate), seed).name), record(outcome))
    assert chosen_rate(study, arm, lab) == 2e-5  # the smaller of two that are equal
    assert arm_jobs(study, lab)["helped", 0].config.training.learning_rate == 2e-5
    # Without a number at any rate the study goes on, rather than waiting for a tuning that is done.
    for each in tuning_jobs(study):
        write(lab.result(each.name), record(math.nan))
    assert chosen_rate(study, arm, lab) == 1e-5


@pytest.mark.parametrize(("rate", "said"), [(1e-5, "the lowest"), (2e-5, None), (4e-5, "the highest")])
def test_a_best_rate_at_the_end_of_those_that_were_tried_is_said(rate, said):
    tuned = tuple(replace(arm, tuned=arm.name in ("base", "helped")) for arm in STUDY.arms)
    study = replace(STUDY, arms=tuned, tuning=Tuning((1e-5, 2e-5, 4e-5), (10,), measures.ACCURACY))
    found = findings(study, runs(helped=0.2))
    text = page(found, {"base": 2e-5, "helped": rate, "must": 4e-5, "same": 1e-5})
    assert ("One beyond it may be better." in text) == (said is not None)
    assert said is None or f"the best was {said} for `helped`." in text
    assert "for all tuned arms" in page(found, {"base": 1e-5, "helped": 1e-5})


def test_a_study_is_finished_before_the_next_begins(tmp_path, monkeypatch):
    tuned = replace(STUDY, name="tuned", tuning=Tuning((1e-5, 2e-5), (10, 11), measures.ACCURACY))
    started = list[list[str]]()
    monkeypatch.setattr(running, "_run", lambda jobs, *_: started.append([each.name for each in jobs]) or [])
    running.run((STUDY, tuned), tmp_path, 1, print)
    ours = [each.name for each in arm_jobs(STUDY, Laboratory(tmp_path)).values()]
    assert started[:2] == [[], [*ours, *(each.name for each in tuning_jobs(tuned))]]
    assert set(started[2]) < set(ours)  # those that need no tuning


def test_entropy_is_compared_when_both_are_equally_accurate():
    """Both go from 0.2 to 0.6, one in 10 steps and one in 20; entropy falls by 0.01 a step from 1."""
    fast, slow = (
        Record(
            {"entropy": [1 - 0.01 * step for step in range(25)]},
            {"step": [0.0, float(steps)], "outcome": [0.2, 0.6]},
            1.0,
        )
        for steps in (10, 20)
    )
    # At accuracy 0.6 − 0.02·i the steps are 10 − i/2 and 20 − i, so 0.1 − 0.005·i apart: 0.0775 on average.
    gap = measures.EQUAL_ENTROPY.difference(fast, slow)
    assert gap == pytest.approx(0.0775, abs=0.005)
    assert measures.EQUAL_ENTROPY.difference(fast, fast) == 0
    assert measures.AREA.of(fast) == pytest.approx(0.4)


@pytest.mark.slow("trains runs of a study")
@pytest.mark.filterwarnings("ignore::proximo.algorithms.UnusualChoice")
@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_study_is_whole(study):
    assert named(study.name) is study
    assert study.positive, "a control that must show an effect"
    assert study.negative, "a control that must show none"
    assert study.caveats
    assert len({design_hash(study), design_hash(study.quick())}) == 2
    assert {arm.config.device for arm in study.arms} == {"cpu"}
    for arm in study.arms:  # a process of its own reads it
        assert loads_run(toml.dumps(arm.config), arm.name) == arm.config


def test_a_noisy_grader_turns_the_same_verdicts_round_each_time():
    problems = [Problem(id=str(index), prompt="1+1=", answer="2") for index in range(2000)]
    right, wrong = (
        [Completion(tokens=(5, 1), text=said, finish="stop", logprobs=(0.0, 0.0)) for _ in problems]
        for said in ("2\n", "3\n")
    )
    grader = NoisyVerdict(missed=0.2, let_through=0.1)
    assert sum(grader(problems, right)) / 2000 == pytest.approx(0.8, abs=0.03)
    assert sum(grader(problems, wrong)) / 2000 == pytest.approx(0.1, abs=0.03)
    assert grader(problems, right) == grader(problems, right)
    assert set(NoisyVerdict(0.5, 0.5, graders=3)(problems, right)) == {0.0, 1 / 3, 2 / 3, 1.0}
    assert NoisyVerdict()(problems[:1], right[:1]) == [1.0]


def test_a_collapse_is_half_of_the_best_ten_in_a_row():
    def of(outcomes):
        return measures.COLLAPSED.of(Record({"outcome": outcomes}, {}, 1.0))

    assert of([0.8] * 10 + [0.3] * 10) == 1
    assert of([0.8] * 10 + [0.5] * 10) == 0
    assert of([0.8] * 10 + [0.1] * 5 + [0.8] * 5) == 0


def test_shares_of_the_seeds_stay_within_0_and_1_on_the_page():
    """All of the wrecked arm's seeds collapse, and none of the others."""
    study = replace(
        STUDY,
        contrasts=(Contrast("it collapses", "must", "base", measures.COLLAPSED, 5 / 8),),
        measures=(measures.COLLAPSED,),
    )
    fell, held = ([0.8] * 10 + [end] * 10 for end in (0.1, 0.8))
    ends = {arm.name: fell if arm.name == "must" else held for arm in study.arms}
    kept = {
        (arm, seed): Record({"outcome": outcomes}, {"step": [0.0], "outcome": [0.5]}, 1.0)
        for arm, outcomes in ends.items()
        for seed in study.seeds
    }
    found = findings(study, kept)
    [first] = found.to_dict()["contrasts"]
    assert (first["mean"], first["high"]) == (1, 1)
    assert 0 < first["low"] < 1
    text = page(found, {})
    assert "+1 | +0.307 to +1 |" in text
    assert "| must | – | 1 (0.51 to 1) | 4 |" in text
    assert "| base | – | 0 (0 to 0.49) | 4 |" in text
    assert "Newcombe's for paired shares" in text
    assert "Newcombe" not in page(findings(STUDY, runs()), {})


def test_names_that_are_none():
    with pytest.raises(ValueError, match="no study is called 'clip'; there are: clip-higher"):
        named("clip")


@pytest.mark.slow("trains runs of a study")
def test_a_study_runs_resumes_and_concludes(tmp_path, monkeypatch):
    """Two arms, one seed, the arms' runs in processes; the second time nothing is left to do."""
    monkeypatch.setattr(workers, "starter", RunStarter)
    lines: list[str] = []
    study = replace(
        STUDY,
        arms=(STUDY.arms[0], Arm("helped", with_rate(SMALL, 2e-5)), Arm("must", SMALL), Arm("same", SMALL)),
        seeds=(0,),
    )
    assert conduct([study], tmp_path, processes=2, say=lines.append)
    assert lines[0] == "small: 2 runs, 2 left: about 1 min with 2 processes"  # equal configs are one run
    assert not list((tmp_path / "runs").iterdir())
    first = (tmp_path / "small.md").read_bytes()
    assert b"\n2 runs on one thread each, " in first
    assert b"SHA-256 of the design, stored before the first run: " in first
    assert b"proximo study small" not in first  # there is no such command
    assert lines[1].startswith(("small, same, seed 0: finished (1 of 2, ", "small, helped, seed 0: finished (1 of 2, "))
    spent = [json.loads(path.read_text())["steps"][SECONDS] for path in (tmp_path / "results").iterdir()]
    assert all(len(seconds) == 1 and 0 < seconds[0] < 600 for seconds in spent)
    lines.clear()
    assert conduct([study], tmp_path, processes=2, say=lines.append)
    assert lines[0] == "small: 2 runs, 0 left"
    assert (tmp_path / "small.md").read_bytes() == first
    assert json.loads((tmp_path / "small.json").read_text())["hash"] == design_hash(study)
    assert conclude(study, Laboratory(tmp_path)).is_complete
    assert "not started" in listed(tmp_path)[0]


@pytest.mark.slow("trains runs of a study")
def test_the_command_lists_says_how_much_and_refuses(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "cores", lambda: 2)
    assert main(["study"]) == 0
    said = capsys.readouterr().out
    assert said.count("not started") == len(STUDIES)
    assert f"clip-higher         not started; published: {label(stored_verdicts()['clip-higher'])}  (" in said
    hours = float(re.findall(r"left: about ([0-9.]+) h with 2 processes", said)[0])
    assert hours < 12, "the whole laboratory on two cores"
    assert main(["study", "clip-higher", "--quick", "--dry-run", "--processes", "2"]) == 0
    assert capsys.readouterr().err.startswith("clip-higher-quick: 15 runs, 15 left: about ")
    assert not (tmp_path / "runs").exists()
    for wrong, message in (
        (["clip"], "no study is called 'clip'"),
        (["clip-higher", "--processes", "0"], "--processes 0: give a whole number"),
        (["clip-higher", "sapo"], "study takes one name"),
        (["--quick"], "--quick, --processes, --device, --minutes and --dry-run need the NAME of a study"),
        (["--device", "cpu"], "--quick, --processes, --device, --minutes and --dry-run need the NAME of a study"),
        (["clip-higher", "--device", "tpu-9"], "--device tpu-9: runs of a study are computed on cpu or cuda"),
        (["clip-higher", "--device", "meta"], "--device meta: runs of a study are computed on cpu or cuda"),
        (["clip-higher", "--device="], "--device : runs of a study are computed on cpu or cuda"),
        (["clip-higher", "--device", "cuda:x"], "device is 'cuda:x': torch knows no such device"),
        (["clip-higher", "--minutes", "0"], "--minutes 0: give a number above 0"),
        (["clip-higher", "--minutes", "soon"], "--minutes soon: give a number"),
        (["clip-higher", "--out", __file__], "test_studies.py is no folder: give one with --out"),
        (["--out", __file__], "test_studies.py is no folder: give one with --out"),
        (["--out", f"{__file__}/below"], "below is no folder: give one with --out"),
        (["clip-higher", "--out", ""], "--out is empty: give a folder"),
    ):
        with pytest.raises(SystemExit):
            main(["study", *wrong])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [["--quick"], ["--processes", "3", "--dry-run"], ["--device", "bogus"], ["--out", ""]]
)
def test_the_module_ignores_no_flag(given, capsys):
    with pytest.raises(SystemExit):
        module(given)
    assert re.search("need the NAME of a study|--out is empty", capsys.readouterr().err)


def test_two_commands_do_not_share_a_folder(tmp_path):
    with FolderLock(tmp_path), pytest.raises(ValueError, match="is in use by another study command: wait for it"):
        conduct([STUDY], tmp_path, processes=1, say=print)
    assert not (tmp_path / "small.json").exists()


def test_a_design_that_was_changed_by_hand_is_refused(tmp_path):
    lab = Laboratory(tmp_path)
    lab.settle(STUDY, 0)
    path = tmp_path / "small.json"
    path.write_text(path.read_text().replace('"counts": 0.1', '"counts": 0.01'))
    with pytest.raises(ValueError, match="its design is not the one that was hashed"):
        lab.stored(STUDY)


def test_a_page_says_when_its_design_was_stored_and_what_its_verdict_leaves_open(tmp_path):
    lab = Laboratory(tmp_path)
    lab.settle(STUDY, 3)
    lab.conclude(STUDY, {"complete": True})
    lab.conclude(STUDY, {"complete": True})
    assert lab.known(STUDY) == 3
    found = findings(STUDY, runs())
    assert "SHA-256 of the design, stored when 3 of its runs were done: " in page(found, {}, known=lab.known(STUDY))
    later = replace(STUDY, later="a control", limits="in the morning")
    text = page(findings(later, runs()), {})
    assert "What counts was fixed before the runs, except for a control." in text
    assert "SHA-256 of the design, in which a control came when results were known: " in text
    assert "before the first run" not in text
    assert f"**Verdict: {headline(found, found.contrasts[0])}, in the morning**" in text
    assert design_hash(later) == design_hash(STUDY)


def test_a_figure_with_gaps_says_so():
    said = "At some steps fewer seeds have a number."
    kept = runs()
    assert said not in page(findings(STUDY, kept), {})
    first = next(iter(kept))
    steps = {name: [math.nan, *values[1:]] for name, values in kept[first].steps.items()}
    assert said in page(findings(STUDY, kept | {first: replace(kept[first], steps=steps)}), {})


def test_what_is_measured_between_two_runs_is_no_number_of_each():
    between = replace(STUDY.contrasts[0].measure, name="paired", between=lambda ours, theirs: 1.5)
    study = replace(STUDY, contrasts=(replace(STUDY.contrasts[0], measure=between),))
    assert "| paired, share | – | – | +1.5 | " in page(findings(study, runs()), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a/b"}, "name is 'a/b': its files are called so"),
        ({"arms": (*STUDY.arms, STUDY.arms[0])}, "study small: arms are called base, .*: give each a name of its own"),
        ({"contrasts": (replace(STUDY.contrasts[0], arm="mine"),)}, "has the arm 'mine': give one of base"),
        ({"contrasts": (replace(STUDY.contrasts[0], counts=0.0),)}, "is 0: give what counts as an effect"),
        ({"drawn": ("mine",)}, "drawn has 'mine': give some of base"),
    ],
)
def test_a_study_of_ones_own_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        replace(STUDY, **change)


def test_on_another_device_a_study_is_another_design(monkeypatch, capsys, tmp_path):
    study = named("clip-higher")
    assert study.on("cpu") == study
    there = study.quick().on("cuda:1")
    assert {(arm.config.device, arm.config.dtype) for arm in there.arms} == {("cuda:1", "float32")}
    assert named("sapo").afterwards
    assert not named("sapo").on("cuda").afterwards
    assert (there.label, there.command) == (
        "clip-higher-quick-cuda-1",
        "proximo study clip-higher --quick --device cuda:1",
    )
    assert design_hash(there) != design_hash(study.quick())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for way in (lambda *given: main(["study", *given]), lambda *given: module([*given])):
        assert way("kl", "--device", "cuda", "--dry-run", "--out", str(tmp_path)) == 0
        said = "".join(capsys.readouterr())
        assert said.startswith("kl-cuda: 87 runs, 87 left")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module(["kl", "--device", "cuda", "--dry-run", "--out", str(tmp_path)]) == 2
    assert "there is no GPU here" in capsys.readouterr().err


@pytest.mark.slow("trains runs of a study")
def test_the_module_refuses_in_a_line_and_publishes_all_or_nothing(tmp_path, capsys):
    lab, published = tmp_path / "lab", tmp_path / "new" / "pages"
    for wrong, message in (
        (["clip-higher", "--dry-run", "--processes", "0"], "--processes 0: give a whole number, at least 1"),
        (["clip-higher", "--dry-run", "--minutes", "-1"], "--minutes -1: give more than 0"),
    ):
        with pytest.raises(SystemExit):
            module(wrong)
        assert message in capsys.readouterr().err
    lab.mkdir()
    (lab / "sapo.json").write_text("{")
    assert module(["--publish", str(published), "--out", str(lab)]) == 2
    assert "sapo.json is damaged" in capsys.readouterr().err
    assert not published.exists()
    assert module(["--out", str(lab)]) == 0
    assert "its stored design is damaged" in capsys.readouterr().out
    (lab / "sapo.json").write_text(json.dumps({"hash": "other"}))
    assert module(["--out", str(lab)]) == 0
    assert "sapo                stored with another design" in capsys.readouterr().out
    (lab / "sapo.json").unlink()
    assert module(["--publish", str(published), "--out", str(lab)]) == 0
    assert [each.name for each in published.iterdir()] == ["index.md"]
    (published / "index.md").unlink()
    capsys.readouterr()
    assert module(["kl", "--dry-run", "--publish", str(published), "--out", str(lab)]) == 0
    assert capsys.readouterr().out.startswith("kl: 87 runs, 87 left")  # a study that is named is not passed over
    assert [each.name for each in published.iterdir()] == ["index.md"]


def curve(outcomes, tokens):
    evaluated = {"step": [0.0, 1.0, 2.0], "outcome": outcomes, "mean_at_k": outcomes}
    return Record({"sampled_tokens": tokens}, evaluated, 1.0)


def test_areas_by_steps_and_by_tokens():
    """One learns more in a step and samples four times as much for it."""
    costly, cheap = curve([0.0, 0.4, 0.8], [400.0, 400.0]), curve([0.0, 0.2, 0.4], [100.0, 100.0])
    assert measures.SAMPLED_AREA.difference(costly, cheap) == pytest.approx(0.4 - 0.2)
    # Up to 200 tokens the costly one is at 0.2: a mean of 0.1 against 0.2.
    assert measures.AREA_BY_TOKENS.difference(costly, cheap) == pytest.approx(-0.1)
    assert measures.AREA_BY_TOKENS.difference(cheap, costly) == pytest.approx(0.1)


def test_areas_by_seconds():
    """One learns more in a step, which takes it four times as long."""
    evaluated = {"step": [0.0, 1.0, 2.0]}
    slow = Record({SECONDS: [4.0, 4.0]}, evaluated | {"mean_at_k": [0.0, 0.4, 0.8]}, 1.0)
    fast = Record({SECONDS: [1.0, 1.0]}, evaluated | {"mean_at_k": [0.0, 0.2, 0.4]}, 1.0)
    assert measures.AREA_BY_SECONDS.difference(slow, fast) == pytest.approx(-0.1)
    untimed = replace(fast, steps={SECONDS: [1.0, math.nan]})  # a row of timings that could not be written
    for pair in ((untimed, fast), (fast, untimed), (untimed, slow)):
        assert math.isnan(measures.AREA_BY_SECONDS.difference(*pair))
    # Records from before seconds were kept have none.
    assert math.isnan(measures.AREA_BY_SECONDS.difference(slow, curve([0.0, 0.2, 0.4], [1.0, 1.0])))


def test_contrasts_by_seconds_stand_apart_and_decide_nothing():
    timed = replace(STUDY, timed=(contrast("it is faster", "must"),))
    found, plain = findings(timed, runs(helped=0.2)), findings(STUDY, runs(helped=0.2))
    text = page(found, {})
    before, _, after = text.partition("## By seconds")
    assert "it is faster" in after
    assert "it is faster" not in before
    assert "| verdict |" not in after.partition("## What")[0]
    assert design_hash(timed) != design_hash(STUDY)
    assert found.to_dict() == plain.to_dict()
    assert "By seconds" not in page(plain, {})
    assert timed.quick().timed == ()


@pytest.mark.parametrize("bare", [Record({}, {}, 1.0), Record({}, {"step": [], "outcome": [], "mean_at_k": []}, 1.0)])
def test_a_run_without_evaluations_has_no_number_rather_than_an_error(bare):
    """Which is found out after the runs, when all of a study's time is spent."""
    whole = curve([0.1, 0.2, 0.3], [5.0, 5.0])
    for measure in (
        *(measures.ACCURACY, measures.BEFORE, measures.GAIN, measures.AREA, measures.SAMPLED_AREA),
        *(
            measures.AREA_BY_TOKENS,
            measures.AREA_BY_SECONDS,
            measures.EQUAL_ENTROPY,
            measures.COLLAPSED,
            measures.UNSTEADY,
        ),
    ):
        for one, other in ((bare, None), (bare, bare), (bare, whole), (whole, bare)):
            assert math.isnan(measure.difference(one, other)), measure.name


def test_growth_and_unsteadiness():
    grown = Record({"length": [10.0] * 5 + [15.0] * 5, "gradient_norm": [1.0, 3.0]}, {}, 1.0)
    assert measures.growth("length", "").of(grown) == pytest.approx(0.5)
    assert measures.rise("length", "", "").of(grown) == pytest.approx(5)
    assert measures.UNSTEADY.of(grown) == pytest.approx(2**0.5 / 2)


def test_a_pilot_of_a_value_model_leaves_a_step_for_the_policy():
    config = replace(SMALL, algorithm=PPO, steps=60, value=ValueOptions(pretrain_steps=59))
    pilot = replace(STUDY, arms=(Arm("base", config), *STUDY.arms[1:])).quick()
    assert pilot.arms[0].config.value == ValueOptions(pretrain_steps=14)


@pytest.mark.parametrize(("counts", "others", "room"), [(-0.5, 0.25, 0.25), (0.5, 0.25, 0.75), (0.5, 0.75, 0.25)])
def test_the_room_for_an_effect_is_what_the_other_arm_leaves(counts, others, room):
    measure = Measure("fell", "share of the seeds", "1 if it fell", lambda run: run.steps["fell"][0], grain=1.0)
    asked = Contrast("it falls", "helped", "base", measure, counts)
    records = {
        (arm, seed): Record({"fell": [float(arm == "base" and seed < 4 * others)]}, {}, 1.0)
        for arm in ("base", "helped")
        for seed in range(4)
    }
    found = findings(replace(STUDY, contrasts=(asked,)), records).contrasts[0]
    assert found.room == room
    assert found.has_room == (room >= 0.5)
