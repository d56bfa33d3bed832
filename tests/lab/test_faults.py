"""The fast part of the fault suite, and its report: a pure function of what was seen."""

import ast
import importlib
import json
import os
import re
import signal
import sys

import pytest

from proximo.cli import COMMANDS
from proximo.config import toml
from proximo.rl.config import RunConfig
from proximo.runs.config_changes import differences
from proximo_lab.faults.cases import ENDINGS, Findings, NotRun, totals
from proximo_lab.faults.cost import watched
from proximo_lab.faults.field_runs import trials
from proximo_lab.faults.field_table import LISTED, Trial
from proximo_lab.faults.fields import all_fields, name_of, with_value
from proximo_lab.faults.page import FORMS, TITLES, page
from proximo_lab.faults.processes import TRACEBACK, Child, descendants, orphans
from tests import ROOT
from tests.run_processes import Script

SMALL = """
import json, sys
from pathlib import Path
from proximo_lab.faults.__main__ import prepare
prepare()
from proximo_lab.faults import resume, rewards, signals
folder = Path(sys.argv[1])
found = {"resume": resume.run(folder, kills=2, names=("dapo",)).to_dict()}
found["signals"] = signals.run(folder / "signals", moments=(0.4,), kinds=("SIGTERM",)).to_dict()
found["rewards"] = rewards.run(folder, deeds=("exits",), tables=False).to_dict()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict:
    """A few cases of several families, forked from one process, as `python -m proximo_lab.faults` does it."""
    folder, printed = tmp_path_factory.mktemp("faults"), tmp_path_factory.mktemp("printed")
    script = Script(SMALL, str(folder), stdout=printed / "stdout", stderr=printed / "stderr")
    assert script.wait() == 0, (printed / "stderr").read_text()[-2000:]
    return json.loads((printed / "stdout").read_text().splitlines()[-1])


def counts(family: dict) -> dict[str, int]:
    assert not [detail for kind in family["kinds"].values() for detail in kind["details"]], family["kinds"]
    return {ending: sum(kind[ending] for kind in family["kinds"].values()) for ending in ENDINGS}


@pytest.mark.slow("kills runs")
def test_two_chained_kills_are_bit_equal(small):
    assert counts(small["resume"]) == {"R": 2, "C": 0, "S": 0, "failed": 0, "not run": 0}
    figures = small["resume"]["figures"]
    assert (figures["kills"], figures["bit_equal"]) == (2, 2)
    assert figures["prompts"] > 0
    assert figures["skipped_or_repeated"] == figures["rows_lost"] == 0


@pytest.mark.slow("kills runs")
def test_a_signal_and_a_reward_that_exits(small):
    assert counts(small["signals"])["R"] == 1
    assert counts(small["rewards"])["C"] == 1
    assert small["rewards"]["figures"]["unscored"] > 0
    assert small["rewards"]["figures"]["zeros"] == 0


def test_every_field_of_a_config_is_known_to_the_suite():
    config = RunConfig()
    trial = Trial(config, "algorithm.gate.low", 0.3)
    assert name_of(trial) == "Clip.low"
    changed = with_value(config, trial.path.split("."), trial.value)
    assert differences(toml.dumps(config), toml.dumps(changed)) == {"algorithm.gate.low": "was 0.2, now 0.3"}
    fields = list(all_fields(RunConfig))
    assert len(fields) == len(set(fields)) > 150
    assert {"Clip.low", "RunConfig.seed", "Limits.threads", *LISTED} <= set(fields)


# The harness itself


def test_children_say_how_they_ended(tmp_path):
    assert Child(lambda: 3, tmp_path / "a").wait(60).code == 3
    assert Child(lambda: sys.exit(4), tmp_path / "b").wait(60).code == 4
    broken = Child(lambda: 1 // 0, tmp_path / "c").wait(60)
    assert broken.code == TRACEBACK
    assert "ZeroDivisionError" in (broken.complaint or "")
    others = descendants(os.getpid())  # of other tests, like a sandbox that is kept
    killed = Child(signal.pause, tmp_path / "d")
    assert set(descendants(os.getpid())) - {*others} == {killed.pid}
    assert killed.send(signal.SIGKILL)
    assert killed.wait(60).code == -signal.SIGKILL
    assert not killed.send(signal.SIGKILL)
    with pytest.raises(TimeoutError, match="no end after 0 s"):
        Child(signal.pause, tmp_path / "e").wait(0.1)


def test_what_is_left_behind_is_found(tmp_path):
    """In a process of its own: what other tests keep running is not left behind, and stays."""

    def looks() -> int:
        Child(signal.pause, tmp_path / "left")
        first, second = orphans(patience=0.1), orphans(patience=0.1)
        return 10 * len(first) + len(second)

    assert Child(looks, tmp_path / "a").wait(60).code == 10


def test_endings_by_hand():
    found = Findings()

    def missing() -> str | None:
        raise NotRun("no such thing here")

    found.attempt("a", "1", "R", lambda: None)
    found.attempt("a", "2", "R", lambda: "it differs")
    found.attempt("a", "3", "R", missing)
    found.attempt("b", "4", "S", lambda: 1 / 0)  # pyright: ignore[reportArgumentType]
    known = found.to_dict()
    assert known["kinds"]["a"] | {"details": 0} == {"R": 1, "C": 0, "S": 0, "failed": 1, "not run": 1, "details": 0}
    assert totals({"x": known}) == {"kinds": 2, "cases": 3, "R": 1, "C": 0, "S": 0, "failed": 2, "not run": 1}


# The report


def family(kinds: dict[str, dict[str, int]], figures: dict | None = None) -> dict:
    whole = {name: dict.fromkeys(ENDINGS, 0) | {"details": []} | counts for name, counts in kinds.items()}
    return {
        "kinds": whole,
        "controls": ["it happened"],
        "figures": figures or {},
        "gaps": [],
        "orphans": 0,
        "seconds": 5.0,
        "date": "2026-01-02",
        "versions": "Python 3",
    }


def test_the_report_says_what_the_results_say_and_no_more():
    results = {
        "families": {
            "signals": family({"SIGTERM": {"R": 7, "failed": 1, "details": ["at 3%: exit 1 | odd"]}}),  # pyright: ignore[reportArgumentType]
            "saves": family({"no room": {"S": 4}}, {"saves": 4, "lost": 0}),
        }
    }
    text = page(results)
    assert text == page(json.loads(json.dumps(results)))
    assert "faults tried: 12 cases of 2 kinds; survived 11, failed 1, not run 0" in text
    assert "checkpoints lost or incomplete: 0, of 4 disturbed saves" in text
    assert "failed: SIGTERM (signals, 1): exit 1 \\| odd" in text
    assert "Not run at all: SIGKILL at random moments, resumed;" in text
    results["families"]["signals"]["kinds"]["SIGTERM"]["R"] = 9
    assert "faults tried: 14 cases" in page(results)


def test_the_page_in_docs_is_the_page_of_the_results():
    results = json.loads((ROOT / "lab" / "proximo_lab" / "faults" / "results.json").read_text())
    assert (ROOT / "docs" / "reliability.md").read_text() == page(results)
    assert FORMS.keys() <= TITLES.keys()


def test_nothing_that_a_command_does_is_called_missing():
    [sentence] = re.findall(
        r"Not implemented, so not attacked: ([^.]*)\.", (ROOT / "docs" / "reliability.md").read_text()
    )
    words = re.findall(r"\w+", sentence)
    assert words
    assert [word for word in words if word.removesuffix("er") in COMMANDS] == []


def test_what_was_promised_was_reached():
    families = json.loads((ROOT / "lab" / "proximo_lab" / "faults" / "results.json").read_text())["families"]
    sums = totals(families)
    assert families.keys() == TITLES.keys()
    assert sums["kinds"] >= 45
    assert sums["cases"] >= 300
    assert sums["failed"] == 0
    figures = {name: each["figures"] for name, each in families.items()}
    assert figures["resume"]["kills"] == figures["resume"]["bit_equal"] == 250
    assert figures["resume"]["skipped_or_repeated"] == figures["resume"]["rows_lost"] == 0
    assert sum(each["orphans"] for each in families.values()) == 0
    assert figures["sandbox"]["tried"] == figures["sandbox"]["ran"] == figures["sandbox"]["contained"]
    assert figures["sandbox"]["rewarded"] == 0
    assert figures["inputs"]["tried"] == figures["inputs"]["explained"] >= 60
    assert figures["fields"]["dead"] == 0
    assert figures["cost"]["share"] < 0.02


# What the suite names


def named_tests() -> list[tuple[str, str, str]]:
    """Each test function that a family runs as it is: the family's module, the test's file and its name."""
    found = []
    for source in sorted((ROOT / "lab" / "proximo_lab" / "faults").glob("*.py")):
        for call in ast.walk(ast.parse(source.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "run_tests":
                file, *tables = call.args[:3]
                assert isinstance(file, ast.Constant)
                module = importlib.import_module(f"proximo_lab.faults.{source.stem}")
                for table in tables:
                    names = getattr(module, table.id) if isinstance(table, ast.Name) else {}
                    found += [(source.stem, str(file.value), name) for name in names]
    return found


def test_each_test_that_the_suite_runs_is_there():
    named = named_tests()
    assert len(named) > 80
    gone = [
        (family, file, name)
        for family, file, name in named
        if not (ROOT / "tests" / file).exists() or f"def {name}(" not in (ROOT / "tests" / file).read_text()
    ]
    assert not gone


def test_what_the_cost_of_safety_is_measured_around_is_there():
    missing = [(holder, function) for holder, function, _ in watched() if not callable(getattr(holder, function, None))]
    assert not missing


def test_every_config_field_is_tried_or_listed_with_a_reason(tmp_path):
    known, tried = set(all_fields(RunConfig)), {name_of(trial) for trial in trials(tmp_path)}
    assert not known - tried - LISTED.keys()
    assert not LISTED.keys() - known
