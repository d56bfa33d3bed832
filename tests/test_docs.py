"""Documentation that cannot rot: its code is run, its excerpts are in the source, its commands exist."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch

from proximo.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
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


@pytest.mark.parametrize(("info", "body"), blocks(r"python"))
def test_code_runs(info: str, body: str):
    torch.set_default_dtype(torch.float32)  # as a reader has it
    try:
        exec(compile(body, "documentation", "exec"), {"__name__": "documentation"})
    finally:
        torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize(("info", "body"), blocks(r"python src=.*"))
def test_excerpt_stands_in_the_source(info: str, body: str):
    source = (ROOT / info.removeprefix("python src=")).read_text().splitlines()
    wanted = body.rstrip("\n").splitlines()
    for start in range(len(source) - len(wanted) + 1):
        found = textwrap.dedent("\n".join(source[start : start + len(wanted)])).splitlines()
        if [line.rstrip() for line in found] == [line.rstrip() for line in wanted]:
            return
    pytest.fail(f"not in {info}:\n{body}")


SMALLER = {
    "train": ["--training.groups", "4", "--evaluation.problems", "8"],
    "eval": ["--problems", "8"],
}
"""The documented command, with less to do: one step instead of many."""


@pytest.mark.parametrize(("info", "body"), blocks(r"sh"))
def test_command_works(info: str, body: str, capsys, tmp_path, monkeypatch):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    try:
        for line in re.sub(r"--steps \d+", "--steps 1", re.sub(r"step-\d+", "step-000001", body)).splitlines():
            program, *arguments = shlex.split(line, comments=True)
            if program == "make":
                assert arguments[0] in targets
            else:
                assert program == "proximo"
                assert main([*arguments, *SMALLER.get(arguments[0], [])]) == 0, line
    finally:
        torch.set_default_dtype(torch.float64)


def test_links_lead_somewhere():
    for page in PAGES:
        text = BLOCK.sub("", page.read_text())
        for target in re.findall(r"\]\((?!https?:)([^)#]*)#?[^)]*\)", text):
            assert not target or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_there_is_something_to_test():
    assert len(blocks(r"python")) >= 6
    assert len(blocks(r"python src=.*")) >= 50
    assert len(blocks(r"sh")) >= 2
