"""Help: every command has it, it names every flag, and it needs no torch."""

import re
import subprocess
import sys

import pytest

import proximo
from proximo.cli import COMMANDS, main
from proximo.presets import PRESETS


def helped(arguments: list[str], capsys) -> str:
    try:
        status = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    return printed.out


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, flag, capsys):
    assert helped([command, flag], capsys).startswith("usage: proximo ")


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "tasks"])
def test_help_has_examples_and_says_what_each_option_is(command, capsys):
    text = helped([command, "--help"], capsys)
    assert "\nexamples:\n  proximo " in text
    assert re.search(r"│ --\S+ \S+ +(│\n│ +)?\(default", text) is None  # nothing but a default


def test_help_stands_behind_other_flags_too(capsys):
    assert helped(["explain", "--all", "--help"], capsys).startswith("usage: proximo explain NAME")
    assert helped(["eval", "--problems", "3", "--help"], capsys).startswith("usage: proximo eval")


def test_train_names_its_own_flags_presets_and_pieces(capsys):
    text = helped(["train", "--help"], capsys)
    for flag in ("--algorithm NAME", "--run DIR", "--dry-run", "--json", "--skip-bad", "--allow-change FIELD"):
        assert f"\n  {flag} " in text, flag
    for preset in PRESETS:
        assert f"  {preset.name} " in text
    assert "--algorithm NAME      one of ppo, grpo" in text
    assert "  --task.type {Arithmetic,Countdown," in text
    assert "  --algorithm.gate.type {" in text
    assert "(now: Clip)" in text


def test_a_piece_shows_its_fields_before_it_is_complete(capsys):
    text = helped(["train", "--task.type", "File", "--help"], capsys)
    assert "--task.path" in text
    assert "--task.answer-columns" in text
    assert "  --task.reward.type {" in text


LIGHT = """
import sys
from proximo.cli import main
for arguments in (["--help"], ["explain", "--help"], ["tasks", "--help"]):
    assert main(arguments) == 0
try:
    main(["trian"])
except SystemExit as stopped:
    assert stopped.code == 2
print([name for name in ("torch", "transformers", "tyro") if name in sys.modules])
"""


def test_help_imports_no_torch():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_package_gives_its_names_when_asked():
    for name in proximo.__all__:
        assert getattr(proximo, name) is not None
        assert name in dir(proximo)
    from proximo import DAPO, policy_loss
    from proximo.algorithms import DAPO as defined
    from proximo.maths.objective import policy_loss as loss

    assert DAPO is defined
    assert policy_loss is loss
    with pytest.raises(AttributeError, match="module 'proximo' has no attribute 'DAP'"):
        proximo.DAP  # noqa: B018
