"""Documentation that cannot rot: its code is run, its excerpts are in the source, its commands exist."""

import io
import re
import runpy
import shlex
import sys
import textwrap
from dataclasses import fields, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from proximo import presets
from proximo.cli import main
from proximo.cli.commands import compare, plan
from proximo.data import Mistakes, read_examples, read_rankings
from proximo.insight.compare import workers
from proximo.losses.pieces.protocols import Traits
from proximo.runs.tracking import processes
from proximo_lab.studies import designs
from tests import ROOT
from tests.processes.sandbox.captivity import needs_sandbox
from tests.run_processes import RunStarter

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FILE = re.compile(r"\w+ file=(?P<name>[\w.]+)")
"""A block that is a file: its name stands behind the language."""
BLOCK = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list:
    """Fenced blocks whose info string matches, as (page, info, body)."""
    found = []
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text())):
            if re.fullmatch(kind, match["info"].strip()):
                name = f"{page.relative_to(ROOT)}:{number}"
                found.append(pytest.param(match["info"].strip(), match["body"], id=name))
    return found


@pytest.mark.parametrize(("info", "body"), blocks(r"python src=.*"))
def test_excerpt_stands_in_the_source(info: str, body: str):
    source = (ROOT / info.removeprefix("python src=")).read_text().splitlines()
    wanted = body.rstrip("\n").splitlines()
    for start in range(len(source) - len(wanted) + 1):
        found = textwrap.dedent("\n".join(source[start : start + len(wanted)])).splitlines()
        if [line.rstrip() for line in found] == [line.rstrip() for line in wanted]:
            return
    pytest.fail(f"not in {info}:\n{body}")


FEW = ["--training.groups", "2", "--training.minibatches", "1", "--evaluation.problems", "4"]
SMALLER = {
    "train": FEW,
    "iterate": FEW,
    "eval": ["--problems", "4"],
    "fork": ["--steps", "2"],
    "sft": ["--fit.epochs", "0.1"],
    # Pairs come from runs that were made smaller, and are too few to hold any out.
    **{stage: ["--data.held-out", "0", "--fit.epochs", "0.1"] for stage in ("reward-model", "dpo")},
}
"""The documented command, with less to do: one step instead of many."""
FEWER = replace(
    presets.ARITHMETIC,
    training=replace(presets.ARITHMETIC.training, groups=2, minibatches=1),
    evaluation=replace(presets.ARITHMETIC.evaluation, problems=4),
)
"""The same for documented code, in the preset that it trains."""
IMPORTED = (compare, plan, designs)
"""Modules that take the preset when they are imported, which must not be while it is replaced."""


@pytest.mark.slow("runs the code and the commands of a page")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_works_from_top_to_bottom(page: Path, tmp_path, monkeypatch):
    """Code, commands, data and named files in order and in one folder, as a reader would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as a script's own folder is
    monkeypatch.setattr(workers, "starter", RunStarter)
    monkeypatch.setattr(presets, "ARITHMETIC", FEWER)
    monkeypatch.setattr(processes, "PATIENCE", 300.0)  # trackers are idle processes, which a busy machine lets wait
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n"))  # the reader's keyboard
    torch.set_default_dtype(torch.float32)  # as a reader has it
    text = page.read_text()
    if "import Job, Limits, Sandbox" in text:
        needs_sandbox()
    try:
        for match in BLOCK.finditer(text):
            place = f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}"
            match match["info"].strip(), match["body"]:
                case "python", body:
                    exec(compile(body, place, "exec"), {"__name__": "documentation"})
                case info, body if named := FILE.fullmatch(info):
                    Path(named["name"]).write_text(body)
                case "sh", body:
                    run_commands(body, place)
                case ("jsonl examples" | "jsonl rankings") as kind, body:
                    check_data(body, read_examples if kind.endswith("examples") else read_rankings, place)
    finally:
        torch.set_default_dtype(torch.float64)
        for file in tmp_path.glob("*.py"):
            sys.modules.pop(file.stem, None)


def run_commands(body: str, place: str) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    body = body.replace("\\\n", " ")
    fewer = re.sub(r"--at \d+", "--at 1", re.sub(r"step-\d+", "step-000001", body))
    for line in re.sub(r"--steps \d+", "--steps 1", fewer).splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "make":
            assert arguments[0] in targets, place
        else:
            assert program == "proximo", place
            assert main([*arguments, *SMALLER.get(arguments[0], [])]) == 0, f"{place}: {line}"


def check_data(body: str, read, place: str) -> None:
    Path("documented.jsonl").write_text(body)
    mistakes = Mistakes()
    assert len(read("documented.jsonl", mistakes)) >= body.count("\n"), place
    assert not mistakes, f"{place}: {mistakes}"


@pytest.mark.parametrize("kind", Traits.__subclasses__(), ids=lambda kind: kind.__name__)
def test_the_guide_names_what_a_piece_may_have(kind: type[Traits]):
    text = (ROOT / "docs/guides/extending.md").read_text()
    assert [each.name for each in fields(kind) if f"`{each.name}" not in text] == []


@pytest.mark.slow("plans a model on four cards")
def test_the_table_of_hardware_is_what_the_plan_says():
    page = (ROOT / "docs/guides/memory.md").read_text()
    rows = list(runpy.run_path(str(ROOT / "docs/hardware_table.py"))["hardware"]("1.7B"))
    assert len(rows) == 3
    assert [row for row in rows if f"{row}\n" not in page] == []


def test_links_lead_somewhere():
    for page in PAGES:
        text = BLOCK.sub("", page.read_text())
        for target in re.findall(r"\]\((?!https?:)([^)#]*)#?[^)]*\)", text):
            assert not target or (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_is_left_unfinished(page: Path):
    assert "TODO" not in page.read_text()


def test_there_is_something_to_test():
    assert len(blocks(r"python")) >= 6
    assert len(blocks(r"python src=.*")) >= 50
    assert len(blocks(r"sh")) >= 2
    assert len(blocks(FILE.pattern)) >= 9


def test_the_animation_is_a_picture_and_nothing_else():
    """README's picture is shown by sites that strip what could run or be loaded: it needs none of it."""
    drawn = ElementTree.fromstring((ROOT / "docs/images/demo.svg").read_text())
    names = {each.tag.rpartition("}")[2] for each in drawn.iter()}
    assert names == {"svg", "title", "style", "g", "rect", "line", "text", "polyline", "circle"}
    assert not [key for each in drawn.iter() for key in each.attrib if "href" in key or key.startswith("on")]
    assert "url(" not in "".join(drawn.itertext())
