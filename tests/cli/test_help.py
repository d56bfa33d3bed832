"""Help: every command has it, it lists every flag that the command takes, and `proximo --help` needs no torch."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import proximo
from proximo.algorithms import Algorithm
from proximo.api.evaluating import EvalConfig
from proximo.cli import COMMANDS, LABORATORY, STAGES, main
from proximo.cli.help_pages import PAGED, WIDTH, help_of, page, page_of
from proximo.config.unions import classes, given_fields
from proximo.recipes.presets import PRESETS
from proximo.rl.config import RunConfig
from proximo.samplers.sampler import SamplingOptions
from proximo.supervised.dpo import DpoConfig
from proximo.supervised.pairs import PairsConfig
from proximo.supervised.reward_model import RewardModelConfig
from proximo.supervised.sft import SftConfig
from proximo_lab.studies.verdicts import gathered_verdicts, stored_verdicts
from tests import ROOT

CONFIGS = {
    **dict.fromkeys(("train", "init", "plan", "selfcheck", "compare"), RunConfig),
    "eval": EvalConfig,
    "sft": SftConfig,
    "reward-model": RewardModelConfig,
    "dpo": DpoConfig,
    "pairs": PairsConfig,
    "chat": SamplingOptions,
    "explain": Algorithm,
}


@pytest.fixture(scope="module")
def helps() -> Iterator[dict[str, str]]:
    """The help of every command, unwrapped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "1000")
        yield {command: help_of(command) for command in COMMANDS}


def helped(arguments: list[str], capsys) -> str:
    try:
        status = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    return printed.out


def flags_of(kind: type, path: str = "--") -> Iterator[str]:
    """Every flag of a config, whatever classes its fields hold: fields, choices, and entries of lists."""
    for field, its_kind in given_fields(kind):
        here = f"{path}{field.name.replace('_', '-')}"
        held = classes(its_kind)
        listed = [each for each in get_args(its_kind)[:1] if classes(each)] if get_args(its_kind)[1:] == (...,) else []
        yield from [here] if not held and not listed else []
        yield from [f"{here}.type"] if len(held) > 1 else []
        yield from [f"{here}.add"] if listed else []
        for each in held:
            yield from flags_of(each, f"{here}.")
        for each in listed:
            yield from flags_of(each, f"{here}.N.")


@pytest.mark.slow("renders every page of help")
@pytest.mark.parametrize("command", CONFIGS)
def test_help_lists_every_field_of_the_config(command: str, helps):
    flags = set(flags_of(CONFIGS[command])) - {
        "--schedules",
        "--metrics",
    }  # --schedule and --metrics of runs are our own
    assert len(flags) >= 5
    listed = set(re.findall(r"--[a-zN][\w.-]*\w", helps[command]))
    # Of an entry of a list, .add names the class.
    assert [each for each in flags - listed if not re.search(r"\.N\.\w+\.type$", each)] == []


@pytest.mark.slow("renders every page of help")
@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_the_flags_that_the_command_reads_itself(command: str, helps):
    assert helps[command].startswith("usage: proximo ")
    place = ROOT / "src" / "proximo" / "cli"
    name = "stages" if command in STAGES else command
    files = [file for file in [place / "commands" / f"{name}.py"] if file.is_file()]
    assert files or command in LABORATORY
    read = set(re.findall(r"(?:take|_whole|_number)\w*\(\s*arguments,\s*\"(--[\w-]+)\"", "".join(map(_text, files))))
    assert read - {"--max_generated_tokens"} <= set(re.findall(r"--[a-z][\w.-]*\w", helps[command]))


@pytest.mark.slow("renders every page of help")
@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "tasks"])
def test_help_has_examples_and_says_what_each_option_is(command: str, helps):
    assert "\nexamples:\n  proximo " in helps[command]
    assert re.search(r"│ --\S+ \S+ +(│\n│ +)?\(default", helps[command]) is None  # nothing but a default


@pytest.mark.parametrize("command", ["train", "tasks", "view", "explain"])
def test_a_short_flag_asks_for_help_too(command: str, capsys):
    assert helped([command, "-h"], capsys).startswith(f"usage: proximo {command}")


def test_help_stands_behind_other_flags_too(capsys):
    assert helped(["explain", "--all", "--help"], capsys).startswith("usage: proximo explain ")
    assert helped(["eval", "--problems", "3", "--help"], capsys).startswith("usage: proximo eval")


@pytest.mark.slow("renders every page of help")
def test_train_names_its_own_flags_presets_and_pieces(helps):
    text = helps["train"]
    for flag in ("--algorithm NAME", "--run DIR", "--dry-run", "--json", "--skip-bad", "--allow-change FIELD"):
        assert f"\n  {flag} " in text, flag
    for preset in PRESETS:
        assert f"  {preset.name} " in text
    assert "--algorithm NAME      one of ppo, grpo" in text
    assert "  --algorithm.gate.type {" in text
    assert "(now: Clip)" in text
    assert "      SoftGate: --algorithm.gate.tau-pos 1.0, " in text


def test_a_piece_shows_its_fields_before_it_is_complete(capsys):
    text = helped(["train", "--task.type", "File", "--help"], capsys)
    assert "--task.path" in text
    assert "--task.answer-columns" in text
    assert "  --task.reward.type {" in text


@pytest.fixture
def warm(tmp_path_factory, monkeypatch) -> None:
    """A cache with pages in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    page("train")


def test_kept_pages_are_what_is_rendered(warm, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    rendered = {command: help_of(command) for command in PAGED}
    monkeypatch.delenv("COLUMNS")
    for command in PAGED:
        assert helped([command, "--help"], capsys) == rendered[command]


@pytest.mark.slow("renders every page of help")
@pytest.mark.parametrize(
    ("command", "arguments", "columns"),
    [
        ("train", ["--help"], "200"),
        ("train", ["--help"], "40"),
        ("train", ["--algorithm", "dapo", "--help"], None),
        ("view", ["-h"], None),
    ],
)
def test_other_help_is_rendered(command: str, arguments: list[str], columns: str | None, warm, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert page_of("train", ["-h"]) is not None
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert page_of(command, arguments) is None


def _text(path: Path) -> str:
    return path.read_text()


LIGHT = """
import sys
from proximo.cli import main
for arguments in (["--help"], ["--version"], ["tasks", "--help"], ["train", "--help"], ["dpo", "-h"]):
    assert main(arguments) == 0
try:
    main(["trian"])
except SystemExit as stopped:
    assert stopped.code == 2
print([name for name in ("torch", "transformers", "tyro") if name in sys.modules])
"""


def without_width() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "COLUMNS"}


def test_help_imports_no_torch(warm):
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True, env=without_width()
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_package_gives_its_names_when_asked():
    for name in proximo.__all__:
        assert getattr(proximo, name) is not None
        assert name in dir(proximo)
    from proximo import DAPO, policy_loss
    from proximo.algorithms import DAPO as defined
    from proximo.losses.objective import policy_loss as loss

    assert DAPO is defined
    assert policy_loss is loss
    with pytest.raises(AttributeError, match="module 'proximo' has no attribute 'DAP'"):
        proximo.DAP  # noqa: B018


def test_the_stored_verdicts_are_those_of_the_studies():
    """`make pages` writes them."""
    assert stored_verdicts() == gathered_verdicts()
