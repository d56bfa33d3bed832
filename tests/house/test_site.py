"""The documentation site, without building it: its navigation, the links between pages, and the names of flags."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import yaml

from proximo import PPO, Lora, RunConfig, ValueOptions, WeightedRule
from proximo.cli import COMMANDS
from proximo.cli.help_pages import help_of
from proximo.config.vocabulary import WORDS
from proximo.data import DataFile
from proximo.models.values import OwnModel
from proximo.rewards import PythonFunction
from proximo.samplers.engines.options import Fleet
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.fitting import FitOptions
from proximo.supervised.sft import SftConfig
from proximo.tasks import File
from proximo_lab.studies.designs import STUDIES
from tests import ROOT

MADE = {"index.md", "agents.md", "contributing.md", "changelog.md", "reference/python.md", "reference/command-line.md"}
"""Pages that docs/site_hooks.py makes."""
LOG = "log.md"
"""A diary of the project: a page of the site, but not in its navigation."""
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)#]*)#(?P<anchor>[^)]+)\)")


def leaves(entry: Any) -> Iterator[str]:
    """The pages of a navigation, in order."""
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from leaves(each)


def test_every_page_is_in_the_navigation_once():
    navigation = sorted(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    studies = {f"studies/{study.name}.md" for study in STUDIES}  # found through the page of replication results
    assert navigation == sorted((pages - studies - {LOG}) | MADE)


def test_every_command_has_a_page_with_its_help(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    reference = import_module("command_reference")
    assert list(reference.summaries()) == list(COMMANDS)
    assert "measure rollout" in reference.summaries()["bench"]
    drawn = reference.page("view", help_of("view"))
    assert drawn.startswith("# proximo view\n")
    assert [line for line in drawn.splitlines() if line.startswith("## ")] == ["## examples"]
    assert "--port N " in re.findall(r"```text\n(.*?)```", drawn, re.DOTALL)[1]
    tables = " options\n ------------------------------\n  --seed INT\n        Random seed.\n"
    assert list(reference.sections(f"A command.\n\n{tables}"))[1] == (
        "options",
        ["  --seed INT", "        Random seed."],
    )


def test_anchors_are_headings_or_rows_with_an_id():
    """Paths are checked by test_docs.py; here, what stands behind the #."""
    found = 0
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for match in LINK.finditer(CODE.sub("", page.read_text())):
            target = page.parent / match["target"] if match["target"] else page
            headings = re.findall(r"^#+ (.*)$", CODE.sub("", target.read_text()), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
            slugs |= set(re.findall(r'<a id="([^"]+)"></a>', target.read_text()))
            assert match["anchor"] in slugs, f"{page.name} links to {match['target']}#{match['anchor']}"
            found += 1
    assert found


def names(config: Any, path: str = "-") -> Iterator[str]:
    """The flags of a config: its fields, those of its parts too."""
    for field in fields(config):
        flag = f"{path}{'-' if path == '-' else '.'}{field.name.replace('_', '-')}"
        yield flag
        yield f"{flag}.type"
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from names(value, flag)


def test_flags_that_settings_of_other_libraries_map_to_exist():
    task = File("a.jsonl", reward=PythonFunction("a.py:f"))
    rule = WeightedRule(PythonFunction("a.py:f"))
    known = {
        *names(RunConfig(task=task, adapter=Lora(), algorithm=PPO)),
        *names(Lora(), "--adapter"),
        *names(FitOptions(), "--fit"),
        *names(ValueOptions(form=OwnModel()), "--value"),
        *names(Fleet(), "--sampler"),
        *names(SftConfig()),
        *names(DpoConfig(DataFile(""))),
    }
    known |= {f"--rewards.rules.N.{each.name}" for each in fields(rule)}
    known |= {"--data", "--eval-data", "--run", "--track", "--reward", "--skip-bad"}  # flags of the command itself
    known |= {"--out", "--to"}  # and of export
    known |= {flag for word in WORDS for flag in word.flags} | {"--no-chat"}
    for page, at_least in (("from-trl", 20), ("from-verl", 20), ("from-unsloth", 10)):
        text = CODE.sub("", (ROOT / f"docs/tutorials/{page}.md").read_text())
        named = set(re.findall(r"(?<=`)--[a-zA-Z0-9.-]+", text))
        assert len(named) >= at_least
        assert named - known == set(), page
