"""`proximo report`: the run's own values on one page, in any state of the run, and nothing but text from a model."""

import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from proximo.algorithms import DAPO, GRPO, SAPO, Algorithm, explain
from proximo.cli import main
from proximo.config import toml
from proximo.data import DataFile
from proximo.insight.folder import RunFolder
from proximo.insight.report import gather, render, summary
from proximo.insight.report.head import duration
from proximo.insight.report.problems import extremes, held_out_pairs
from proximo.insight.report.settings import again, files, size
from proximo.insight.report.summary import sign_test
from proximo.losses import Clip, SoftGate
from proximo.runs.rollouts import write_rollouts
from proximo.supervised.dpo import DpoConfig
from tests import ROOT
from tests.insight.page.browser import append, rows, write_run

SMALL = ["--training.groups", "3", "--training.group-size", "4", "--evaluation.problems", "12", "--device", "cpu"]
SMALL += ["--training.minibatches", "1"]
STEPS = 3


pytestmark = pytest.mark.usefixtures("ordinary_precision")


def trained(folder: Path, *flags: str) -> Path:
    """A run of the model that comes with the package."""
    torch.set_default_dtype(torch.float32)
    assert main(["train", "--run", str(folder), "--steps", str(STEPS), *SMALL, *flags]) == 0
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    # PPO has everything that there is: values, a reference, KL in the reward.
    flags = ["--algorithm", "ppo", "--evaluation.every", "2", "--training.learning-rate", "1e-3"]
    return trained(tmp_path_factory.mktemp("runs") / "a run", *flags)


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """One that may be spoiled."""
    return Path(shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints")))


class Page(HTMLParser):
    """What a browser would find: texts by section, classes, addresses, scripts."""

    VOID = ("meta", "br", "img", "link")
    """They are never closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.open: list[str] = []
        self.section = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs).get("id") or "head"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes what it has not opened"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts[self.section] = self.texts.get(self.section, "") + data


def page(folder: Path) -> Page:
    made = Page(render(gather(RunFolder(folder))))
    assert made.open == []
    return made


def charts(folder: Path) -> dict[str, str]:
    """SVG by title."""
    html = render(gather(RunFolder(folder)))
    return {match[1]: match[0] for match in re.finditer(r'<svg [^>]*aria-label="([^"]*)">.*?</svg>', html, re.DOTALL)}


# A finished run


def test_the_page_has_the_runs_own_numbers(run):
    made, metrics = page(run), rows(run, "metrics")
    before, after = (100 * row["held_out/accuracy"] for row in (metrics[0], metrics[-1]))
    assert before != after
    head = made.texts["head"]
    assert f"{before:.1f}% to {after:.1f}% ({after - before:+.1f} points), on 12 problems" in head
    assert "a run" in made.texts[""]
    assert "finished" in made.texts[""]
    assert "PPO · Arithmetic · tiny-arithmetic · seed 0" in made.texts[""]
    tokens = sum(row.get("sampled_tokens", 0) for row in metrics)
    assert f"{tokens:,}" in head
    assert f"{STEPS} of {STEPS}" in head


def test_every_link_leads_to_a_section(run):
    made = page(run)
    targets = {f"#{attributes['id']}" for tag, attributes in made.tags if tag == "section" and "id" in attributes}
    links = [attributes["href"] for tag, attributes in made.tags if tag == "a"]
    assert (
        set(links)
        == targets
        == {
            "#findings",
            "#curves",
            "#completions",
            "#configuration",
            "#how-to-repeat-it",
            "#files",
        }
    )


def test_curves_are_drawn_through_the_rows(run):
    drawn = charts(run)
    values = [row["entropy"] for row in rows(run, "metrics") if "entropy" in row]
    svg = drawn["Entropy"]
    # Read as a person would: from two ticks of the axis.
    ticks = re.findall(r'y="([\d.]+)" text-anchor="end">(-?[\d.]+)<', svg)
    (low, first), (high, last) = ((float(y) - 4, float(label)) for y, label in (ticks[0], ticks[-1]))
    assert len(ticks) >= 3
    read = [first + (float(y) - low) / (high - low) * (last - first) for _, y in _polyline(svg)]
    assert read == [pytest.approx(value, abs=abs(last - first) / 1000) for value in values]
    # And under the pointer.
    said = re.findall(r">step (\d+) · entropy ([^<]*)<", svg)
    assert [(int(step), float(value)) for step, value in said] == [
        (step, pytest.approx(value, rel=0.01)) for step, value in enumerate(values, start=1)
    ]
    wanted = {
        "Task score",
        "Length",
        "Entropy",
        "KL to the reference",
        "Gradient norm",
        "Value model",
        "Seconds by phase",
    }
    assert wanted <= drawn.keys()


def _polyline(svg: str) -> list[tuple[str, str]]:
    (points,) = re.findall(r'<polyline class="line" points="([^"]*)"', svg)
    return [tuple(pair.split(",")) for pair in points.split()]


def test_held_out_values_stand_at_their_steps(run):
    found = [(row["step"], row["held_out/outcome"]) for row in rows(run, "metrics") if "held_out/outcome" in row]
    assert [step for step, _ in found] == [0, 2, STEPS]
    said = dict(re.findall(r">step (-?\d+) · [^<]*held-out ([^< ]*)", charts(run)["Task score"]))
    assert {int(step): float(value) for step, value in said.items()} == {
        step: pytest.approx(value, abs=1e-3) for step, value in found
    }


def test_clips_and_soft_gates_share_an_axis(tmp_path):
    for name, algorithm, gate, shares, expected in [
        (
            "clip",
            GRPO,
            0.75,
            {"clip_high": 0.15, "clip_low": 0.1},
            ["all 0.25", "clipped above 0.15", "clipped below 0.1"],
        ),
        ("soft", SAPO, 0.9, {"clip_high": 0.0, "clip_low": 0.0}, ["0.1"]),
    ]:
        metrics = [{"step": step, "outcome": 0.5, "gate": gate, **shares} for step in range(3)]
        svg = charts(write_run(tmp_path / name, metrics, algorithm=algorithm))["Clipped"]
        assert re.findall(r'<text class="label"[^>]*>([^<]*)<', svg) == expected


def test_entropy_says_whose_it_is(tmp_path):
    """Whatever rows the updates ran: it is of everything that was sampled."""
    for share in (1.0, 0.8):
        metrics = [{"step": step, "entropy": 0.2, "measured": share} for step in range(3)]
        svg = charts(write_run(tmp_path / str(share), metrics))["Entropy"]
        unit = re.search(r'class="unit">([^<]*)<', svg)
        assert unit is not None
        assert unit[1] == "nats a token, of all that was sampled"


def test_what_is_zero_throughout_is_a_word(tmp_path):
    metrics = [{"step": step, "outcome": 0.5, "truncated": 0.0, "wasted_tokens": 0.0} for step in range(3)]
    folder = write_run(tmp_path / "a", metrics)
    assert "Left out" not in charts(folder)
    assert "Zero throughout: truncated, wasted tokens." in page(folder).texts["curves"]


def test_answers_before_and_after_are_those_of_the_result(run):
    result, said = json.loads((run / "result.json").read_text()), page(run).texts["completions"].replace("\n", "")
    outcomes = [(before["outcome"], after["outcome"]) for before, after in result["examples"]]
    assert len(outcomes) == 12
    for title, most, number in [
        ("Became better", 4, sum(after > before for before, after in outcomes)),
        ("Became worse", 4, sum(after < before for before, after in outcomes)),
        ("Not right before, nor after", 2, outcomes.count((0, 0))),
        ("Right before and after", 2, outcomes.count((1, 1))),
    ]:
        assert (f"{title} {min(most, number)} of {number} held-out problems" in said) == (number > 0)
    # Problems are asked of the task again: prompt and answer are in no file of the run.
    before, after = next(pair for pair, both in zip(result["examples"], outcomes, strict=True) if both == (0, 0))
    prompt = before["problem"].removeprefix("arithmetic-") + "="
    wanted = sum(map(int, prompt[:-1].split("+")))
    assert (
        f"{prompt}{wanted}{before['text']} task score 0 · {len(before['tokens'])} tokens{after['text']} task score 0"
        in said
    )


def test_the_best_and_worst_of_the_first_and_last_step(run):
    step = RunFolder(run).step(1)
    best, worst = extremes(step, 3)
    said = page(run).texts["completions"]
    for asked, one in (*best, *worst):
        assert asked.prompt in said
        assert f"{one.tokens} tokens · {one.note}" in said
    assert "Step 1, the best" in said
    assert f"Step {STEPS}, the best" in said


def test_extremes_are_by_reward_and_then_of_different_problems(run):
    step = RunFolder(run).step(1)
    assert [step.problem[row] for row in (0, 4, 8)] == list(dict.fromkeys(step.problem))
    rewards = [1.0, 1.0, 0.5, math.nan, 1.0, 0.0, 0.0, 0.0, 0.0, 0.25, -1.0, 0.0]
    texts = ["a", "a", "b", "c", "d", "e", "e", "f", "g", "h", "i", "j"]
    step = replace(step, text=texts, batch=replace(step.batch, rewards=torch.tensor(rewards)))
    best, worst = extremes(step, 4)
    # By hand: row 1 says what row 0 says, row 3 is unscored; among the zeros one of each problem first.
    assert [(said.text, said.reward) for _, said in best] == [("a", 1.0), ("d", 1.0), ("b", 0.5), ("h", 0.25)]
    assert [(said.text, said.reward) for _, said in worst] == [("i", -1.0), ("e", 0.0), ("g", 0.0), ("f", 0.0)]


def test_a_completion_is_as_long_as_it_was_whatever_takes_part_in_the_loss(run):
    step = RunFolder(run).step(1)
    step = replace(step, batch=replace(step.batch, mask=torch.zeros_like(step.batch.mask)))
    best, worst = extremes(step, 2)
    wanted = {f"row {row}, {step.state[row]}": length for row, length in enumerate(step.batch.lengths.tolist())}
    for _, said in (*best, *worst):
        assert said.tokens == wanted[said.note] > 0


def test_held_out_answers_are_as_long_as_what_was_sampled():
    answer = {"problem": "p", "text": "x", "outcome": 1.0, "tokens": [5, 6, 7]}
    for sampled, length in [({}, 3), ({"sampled": []}, 3), ({"sampled": [True, False, True]}, 2)]:
        [pair] = held_out_pairs({"examples": [[answer | sampled, answer]]}, None)
        assert (pair.before.tokens, pair.after.tokens) == (length, 3)


# Verdicts


def test_the_sign_test_by_hand():
    assert sign_test(0, 0) == 1.0
    assert sign_test(1, 0) == 1.0
    assert sign_test(3, 0) == 0.25
    assert sign_test(5, 1) == sign_test(1, 5) == 2 * (1 + 6) / 64
    assert sign_test(2, 2) == 1.0


def answers(outcomes: Sequence[tuple[float | None, float | None]], texts: Sequence[str] = ()) -> dict[str, Any]:
    """A result with these outcomes before and after."""

    def answer(place: int, outcome: float | None) -> dict[str, Any]:
        said = texts[place % len(texts)] if texts else str(place)
        return {"problem": f"p{place}", "text": said, "outcome": outcome, "tokens": [1], "finish": "stop", "parts": {}}

    return {"examples": [[answer(place, one), answer(place, other)] for place, (one, other) in enumerate(outcomes)]}


def evaluated(step: int, right: int, problems: int = 10) -> dict[str, float]:
    share = right / problems
    return {
        "step": step,
        "held_out/accuracy": share,
        "held_out/outcome": share,
        "held_out/low": max(share - 0.1, 0.0),
        "held_out/high": min(share + 0.1, 1.0),
        "held_out/problems": problems,
    }


def finished(folder: Path, outcomes: Sequence[tuple[float | None, float | None]], **more: Any) -> Path:
    before, after = (sum(pair[side] == 1 for pair in outcomes) for side in (0, 1))
    metrics = [evaluated(0, before, len(outcomes)), {"step": 1, "outcome": 0.5}, evaluated(1, after, len(outcomes))]
    write_run(folder, metrics, state="finished")
    (folder / "result.json").write_text(json.dumps({**answers(outcomes), **more}))
    return folder


def test_a_gain_beyond_chance_and_one_within(tmp_path):
    clear = finished(tmp_path / "clear", [(0, 1)] * 8 + [(1, 1)] * 2)
    said = page(clear).texts["head"]
    assert "rose from 20.0% to 100.0% (+80.0 points), on 10 problems" in said
    assert "8 became better and 0 worse: chance alone hardly does that (sign test, p = 0.0078)" in said
    noise = finished(tmp_path / "noise", [(0, 1)] * 3 + [(1, 0)] * 2 + [(1, 1)] * 5)
    assert "3 became better and 2 worse: chance alone does as much (sign test, p = 1)" in page(noise).texts["head"]
    unscored = finished(tmp_path / "unscored", [(0, None), (None, 1), (1, 1)])
    assert "became better" not in page(unscored).texts["head"]
    same = finished(tmp_path / "same", [(0, 0), (1, 1)])
    assert "accuracy stayed at 50.0%, on 2 problems." in page(same).texts["head"]


# Any state


def test_a_run_that_goes_on_says_so(tmp_path):
    metrics = [evaluated(0, 3), *({"step": step, "outcome": 0.5, "sampled_tokens": 100} for step in range(1, 8))]
    made = page(write_run(tmp_path / "a", metrics, state="running", steps=50))
    assert "Still running on " in made.texts["head"]
    assert "7 of 50 steps are done" in made.texts["head"]
    assert "700" in made.texts["head"]
    assert "Held-out accuracy" not in made.texts["head"]  # nothing was measured after
    append(tmp_path / "a", "metrics", evaluated(7, 6))
    assert "from 30.0% to 60.0% (+30.0 points) after step 7, on 10 problems" in page(tmp_path / "a").texts["head"]


def test_a_run_that_ended_early_says_how(tmp_path):
    folder = write_run(tmp_path / "a", [{"step": 1, "outcome": 0.5}], steps=50)
    record = json.loads((folder / "run.json").read_text())
    record["attempts"][0]["ended"] = "failed: <no> room"
    (folder / "run.json").write_text(json.dumps(record))
    said = page(folder).texts["head"]
    assert "It ended early (failed: <no> room): 1 of 50 steps are done." in said


def test_a_run_without_a_step(tmp_path):
    made = page(write_run(tmp_path / "a", state="running"))
    assert "no step is finished yet" in made.texts["head"]
    assert made.texts.keys() == {"", "head", "configuration", "how-to-repeat-it", "files"}


def test_a_run_without_rollouts_or_result(copy):
    shutil.rmtree(copy / "rollouts")
    assert "Step 1" not in page(copy).texts["completions"]
    (copy / "result.json").unlink()
    made = page(copy)
    assert "completions" not in made.texts
    assert f"{STEPS} of {STEPS}" in made.texts["head"]
    assert "became better" not in made.texts["head"]


def test_damaged_rollouts_are_named_and_the_rest_stands(copy):
    (copy / "rollouts" / "step-000001.parquet").write_bytes(b"PAR1")
    made = page(copy)
    assert "Rollouts of step 1 cannot be shown" in made.texts["completions"]
    assert f"Step {STEPS}, the best" in made.texts["completions"]


@pytest.mark.slow("writes many reports")
@pytest.mark.parametrize("name", ["run.json", "result.json", "config.toml", "metrics.jsonl", "timings.jsonl"])
@pytest.mark.parametrize("content", ["", "7", '{"step": "x", "attempts": 7, "examples": [[1, 2], 3]}\n'])
def test_files_that_make_no_sense_are_no_traceback(copy, name, content):
    (copy / name).write_text(content)
    made = page(copy)
    assert "Files" in made.texts["files"]
    json.dumps(summary(gather(RunFolder(copy))))


def test_values_that_are_no_numbers_are_not_drawn(tmp_path):
    odd = [None, "x", True, [1], {"a": 1}, 1e300, math.inf, 10**400]
    metrics = [{"step": step, "outcome": value, "entropy": 0.5} for step, value in enumerate(odd)]
    drawn = charts(write_run(tmp_path / "a", [*metrics, {"step": "seven", "outcome": 1.0}, {"outcome": 1.0}]))
    assert "Task score" not in drawn
    assert len(_polyline(drawn["Entropy"])) == len(odd)


def test_a_stage_has_a_report_of_its_own_metrics(tmp_path):
    folder = tmp_path / "sft"
    flags = ["--data.task.held-out", "8", "--data.examples", "32", "--fit.batch", "8"]
    assert main(["sft", "--run", str(folder), "--model", "tiny-arithmetic", *flags]) == 0
    assert main(["report", str(folder)]) == 0
    made, drawn = Page((folder / "report.html").read_text()), charts(folder)
    losses = [row["loss"] for row in rows(folder, "metrics") if "loss" in row]
    assert len(losses) == 4
    drawn_loss, held_out = re.findall(r'<polyline class="line" points="([^"]*)"', drawn["loss"])
    assert len(drawn_loss.split()) == 4
    assert len(held_out.split()) == 2  # before and at the end
    assert "sft · tiny-arithmetic" in made.texts[""]
    assert f"proximo sft {folder}/config.toml --run {folder}-again" in made.texts["how-to-repeat-it"]
    assert "[fit]" in made.texts["configuration"]


def test_the_accuracy_of_pairs_has_no_chart_of_answers(tmp_path):
    ends = [{"step": step, "held_out/loss": 0.5, "held_out/accuracy": share} for step, share in ((0, 0.0), (1, 0.75))]
    folder = write_run(tmp_path / "dpo", [ends[0], {"step": 1, "loss": 0.5, "chosen_reward": 1.0}, ends[1]])
    (folder / "config.toml").write_text(toml.dumps(DpoConfig(DataFile("pairs.jsonl"))))
    page = render(gather(RunFolder(folder)))
    assert "Held-out pairs ordered rightly: 0.0% before, 75.0% after." in page
    assert "greedy" not in page
    assert {"accuracy of pairs", "chosen reward"} <= set(charts(folder))


# Configuration and repetition


def test_the_nearest_named_algorithm_and_what_differs():
    def names(algorithm: Algorithm) -> tuple[str, list[tuple[str, str, str]]]:
        card = explain.nearest(algorithm)
        return card.name, explain.differences(card, algorithm)

    assert all(names(card.value) == (card.name, []) for card in explain.CARDS)
    assert names(replace(DAPO, gate=Clip(0.2, 0.2))) == ("dapo", [("gate.high", "0.2", "0.28")])
    assert names(replace(SAPO, gate=SoftGate(1.0, 1.5))) == ("sapo", [("gate.tau_neg", "1.5", "1.05")])
    # GRPO's KL in SAPO is also SAPO's gate in GRPO: of two as near the first of the cards.
    assert names(replace(SAPO, kl=GRPO.kl))[0] == "grpo"


def test_what_differs_from_the_named_algorithm_is_shown(tmp_path):
    folder = write_run(tmp_path / "a", [{"step": 0, "outcome": 0.5}], algorithm=replace(DAPO, gate=Clip(0.2, 0.2)))
    said = page(folder).texts["configuration"]
    assert "but for 1 choice" in said
    assert "gate.high0.20.28" in said.replace("\n", "")
    facts = gather(RunFolder(folder))
    assert facts.algorithm_name == "DAPO with 1 change"
    assert summary(facts)["differences"] == ["gate.high is 0.2, DAPO's is 0.28"]
    same = page(write_run(tmp_path / "b", [{"step": 0, "outcome": 0.5}], algorithm=DAPO))
    assert "The algorithm is DAPO" in same.texts["configuration"]
    assert "in every choice" in same.texts["configuration"]


@pytest.mark.slow("trains runs")
def test_the_command_repeats_the_run(run, tmp_path):
    command = shlex.split(again(gather(RunFolder(run))))
    assert command[:2] == ["proximo", "train"]
    assert command[-1] == f"{run}-again"
    assert main([*command[1:-1], str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


def test_a_run_in_the_current_folder_is_repeated_beside_it(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a")
    (folder / "inside").mkdir()
    for place, given in ((folder, "."), (folder / "inside", "..")):
        monkeypatch.chdir(place)
        command = shlex.split(again(gather(RunFolder(Path(given)))))
        assert command == ["proximo", "train", f"{folder}/config.toml", "--run", f"{folder}-again"]
    monkeypatch.chdir(tmp_path)
    assert shlex.split(again(gather(RunFolder(Path("a")))))[2:] == ["a/config.toml", "--run", "a-again"]


def test_a_checkpoint_that_goes_while_files_are_listed_is_passed_over(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a")
    for step in (1, 2):
        (folder / "checkpoints" / f"step-{step}" / "state").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step}" / "state" / "weights").write_bytes(b"x" * 1500)
    listed, gone = os.scandir, folder / "checkpoints" / "step-1" / "state"

    def rotated(path: Any = ".") -> Any:
        if str(path) == str(gone):
            raise FileNotFoundError(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", rotated)
    said = files(gather(RunFolder(folder)))
    assert "<td>checkpoints/</td>" in said
    assert "1.5 kB" in said


def test_an_unknown_config_is_repeated_as_it_was_started(tmp_path):
    folder = write_run(tmp_path / "a; b")
    (folder / "config.toml").write_text("of = 'another version'\n")
    record = {"argv": ["/usr/bin/proximo", "train", "x y.toml", "--run", "old", "--seed", "1"]}
    (folder / "run.json").write_text(json.dumps(record))
    command = again(gather(RunFolder(folder)))
    assert shlex.split(command) == ["proximo", "train", "x y.toml", "--seed", "1", "--run", f"{folder}-again"]


# Findings and events


def test_findings_have_evidence_remedy_and_a_link(tmp_path):
    metrics = [{"step": step, "outcome": 0.0, "reward": 0.0, "dead_groups": 1.0} for step in range(20)]
    folder = write_run(tmp_path / "a&b", metrics)
    facts = gather(RunFolder(folder))
    assert facts.findings
    said = page(folder).texts["findings"]
    for spell in facts.findings:
        finding = spell.finding
        assert finding.message in said
        assert finding.remedy in said
        assert f"#run=a%26b&step={finding.step}&show={finding.show}" in said
    quiet = page(write_run(tmp_path / "quiet", [{"step": 0, "outcome": 0.5}]))
    assert "No rule of proximo doctor has anything to say" in quiet.texts["findings"]


def test_events_are_counted_with_the_last_of_each(tmp_path):
    events = [{"step": step, "kind": "resumed", "message": f"for the {step}. time"} for step in range(3)]
    folder = write_run(
        tmp_path / "a", [{"step": 0}], events=[*events, {"step": 1, "kind": "<b>", "message": "\x1b[2J"}]
    )
    said = page(folder).texts["events"].replace("\n", "")
    assert "resumed32for the 2. time" in said
    assert "<b>11\\x1b[2J" in said


# Hostile text

HOSTILE = [
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "</pre></article></section></main><style>*{display:none}</style>",
    "\x1b[31mred\x1b[0m and \x00",
    "\u202eevil\u202c \u2067isolated",
    "שלום (abc) مرحبا",
    "x" * 1_000_000,
    "\n" * 500,
    "",
]


@pytest.fixture
def hostile(copy) -> Path:
    """Completions, prompts, ids, names of files and of parts that want to be more than text."""
    folder = copy.rename(copy.parent / "<img src=x> \u202e run")
    result = json.loads((folder / "result.json").read_text())
    for place, (before, after) in enumerate(result["examples"]):
        before["outcome"], after["outcome"] = float(place % 3 == 1), float(place % 3 != 1)
        before["text"] = after["text"] = HOSTILE[place % len(HOSTILE)]
        before["problem"] = after["problem"] = f"<b>{place}\x00"
        after["parts"] = {"<i>part</i>\n": 0.5}
    (folder / "result.json").write_text(json.dumps(result))
    file = folder / "rollouts" / "step-000001.parquet"
    table = pq.read_table(file)
    for name in ("text", "prompt", "problem", "answer"):
        texts = pa.array([HOSTILE[row % len(HOSTILE)] for row in range(len(table))])
        table = table.set_column(table.column_names.index(name), name, texts)
    write_rollouts(table, file)
    (folder / "<script>").touch()
    return folder


def test_names_that_flood_are_cut(tmp_path):
    metrics = [
        {"step": 0, "outcome": 0.5, "rewards/" + "r" * 100_000: 1.0, **{f"rewards/{n}": 1.0 for n in range(999)}}
    ]
    events = [{"step": 0, "kind": "k" * 100_000 + str(n), "message": "m" * 100_000} for n in range(50)]
    folder = write_run(tmp_path / "a", metrics, events=events, model="m" * 100_000)
    record = {"argv": ["proximo", "a" * 1_000_000], "attempts": [{"started": "s" * 100_000, "ended": "e" * 1_000_000}]}
    (folder / "run.json").write_text(json.dumps(record))
    assert len(render(gather(RunFolder(folder)))) < 400_000


def test_hostile_completions_are_text(hostile):
    html = render(gather(RunFolder(hostile)))
    made = Page(html)
    assert made.open == []  # every tag is closed by its own
    assert not {tag for tag, _ in made.tags} & {"script", "img", "link", "iframe", "object", "form", "base"}
    assert sum(tag == "style" for tag, _ in made.tags) == 1
    assert not any(name.startswith("on") for _, attributes in made.tags for name in attributes)
    said = made.texts["completions"]
    assert "<script>alert(1)</script>" in said
    assert "\\x1b[31mred\\x1b[0m and \\x00" in said
    assert "\\u202eevil" in said
    assert "(998000 more characters)" in said
    assert not {"\x1b", "\x00", "\u202e", "\u2067"} & set(html)
    assert len(html) < 400_000


def test_nothing_is_fetched(hostile):
    made = Page(render(gather(RunFolder(hostile))))
    addresses = [
        value
        for _, attributes in made.tags
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data", "srcset", "poster", "xlink:href", "style")
    ]
    assert all((value or "").startswith("#") for value in addresses)
    policy = next(attributes["content"] for tag, attributes in made.tags if attributes.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script-src" not in policy  # none is allowed


# The command


def test_the_command_writes_the_page_and_prints_its_path(copy, tmp_path, capsys):
    assert main(["report", str(copy)]) == 0
    assert capsys.readouterr().out == f"{copy / 'report.html'}\n"
    assert (copy / "report.html").read_text().startswith("<!doctype html>")
    out = tmp_path / "elsewhere.html"
    assert main(["report", str(copy), "--out", str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    metrics = rows(copy, "metrics")
    assert data["report"] == str(out)
    assert out.exists()
    assert data["state"] == "finished"
    assert data["steps"] == data["of_steps"] == STEPS
    assert data["algorithm"] == "PPO"
    assert data["before"]["accuracy"] == metrics[0]["held_out/accuracy"]
    assert data["after"]["accuracy"] == metrics[-1]["held_out/accuracy"]
    assert data["generated_tokens"] == sum(row.get("sampled_tokens", 0) for row in metrics)


BAD = [
    ([], "report takes the folder of one run"),
    (["a", "b"], "report takes the folder of one run, not a b"),
    (["--wide", "a"], "report takes the folder of one run, not --wide a"),
    (["no-such-folder"], "no-such-folder is no run: there is no such folder"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["report", *arguments])
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_page_that_cannot_be_written_is_one_line(copy, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(copy), "--out", str(copy / "none" / "x.html")])
    assert capsys.readouterr().err.count("\n") == 1


def test_times_and_sizes_as_people_read_them():
    assert [duration(each) for each in (0.24, 59.9, 61.0, 3725.4)] == ["0.2 s", "59.9 s", "1 min 1 s", "1 h 2 min"]
    assert [size(each) for each in (0, 999, 1500, 1_500_000, 2_000_000_000)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "1.5 MB",
        "2 GB",
    ]


# In a browser


def test_it_opens_from_disk_and_draws(run, window):
    folder = run / "report.html"
    assert main(["report", str(run)]) == 0
    window.page.goto(folder.as_uri())
    assert window.page.title() == "a run: report"
    assert window.requests == [folder.as_uri()]
    chart = window.page.locator('svg[aria-label="Entropy"]')
    box = chart.bounding_box()
    assert box["width"] > 200
    assert box["height"] > 100
    # The style reaches the drawing: a line is a line, coloured as the first series, and not filled.
    style = "each => [getComputedStyle(each).fill, getComputedStyle(each).stroke]"
    assert chart.locator("polyline").evaluate(style) == ["none", "rgb(30, 85, 129)"]
    readings = chart.locator(".strip text")
    assert not readings.nth(1).is_visible()
    chart.locator(".strip").nth(1).hover()
    assert readings.nth(1).is_visible()
    assert (readings.nth(1).text_content() or "").startswith("step 2 · entropy ")


def test_it_is_legible_on_dark_and_fits_a_phone(run, hostile, window):
    for folder in (run, hostile):
        assert main(["report", str(folder)]) == 0
        window.page.emulate_media(color_scheme="dark")
        window.page.set_viewport_size({"width": 390, "height": 800})
        window.page.goto((folder / "report.html").as_uri())
        assert window.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
        # Nothing sticks out, whatever a completion is made of.
        assert window.page.evaluate("document.documentElement.scrollWidth") == 390
        assert window.page.evaluate("document.querySelectorAll('script, img').length") == 0


# Pictures


def test_pictures_of_pages_are_there_and_small():
    images = ROOT / "docs" / "images"
    pictures = {path.name: path.stat().st_size for path in images.glob("*.png")}
    assert {"report.png", "compare.png", "overview.png", "reader.png"} <= pictures.keys()
    assert all(size < 250_000 for size in pictures.values())
