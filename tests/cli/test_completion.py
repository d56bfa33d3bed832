"""Completion scripts: they load in their shells and complete commands, flags, algorithms, presets and choices."""

import shutil
import subprocess

import pytest

from proximo.cli import main
from proximo.cli.help_pages import Words, _bash, _fish, words_of

TEXT = """usage: proximo train [PRESET | run.toml] [-h] [OPTIONS]

│ --model STR       the model  │
│ --keep, --no-keep  whether   │
│ --dtype {auto,float32}       │
│ --budget {None}|INT          │
choices, with the fields of each class and their defaults:
  --gate.type
      {Clip,SoftGate} or FILE.py:NAME  (now: Clip)
      SoftGate: --gate.tau 1.0, --gate.flat False
  --rules.add {Rule}  (adds one more)
      Rule, number N from 0: --rules.N.weight 1.0
flags of the command itself:
  --algorithm NAME  one of these
  --dry-run         check

examples:
  proximo train --elsewhere
"""
FLAGS = {
    "--model": (),
    "--keep": None,
    "--no-keep": None,
    "--dtype": ("auto", "float32"),
    "--budget": ("None",),
    "--gate.type": ("Clip", "SoftGate"),
    "--gate.tau": (),
    "--gate.flat": None,
    "--rules.add": ("Rule",),
    "--rules.0.weight": (),
    "--dry-run": None,
}
KNOWN = {
    "train": Words(("arithmetic", "ppo-arithmetic"), FLAGS | {"--algorithm": ("dapo", "grpo")}),
    "view": Words((), {}),
}


def test_words_are_read_from_the_help():
    found = words_of("train", TEXT)
    assert {flag: found.flags[flag] for flag in FLAGS} == FLAGS
    assert set(found.flags) == {*FLAGS, "--algorithm"}
    assert "dapo" in (found.flags["--algorithm"] or ())
    assert found.names[0] == "arithmetic"
    assert "gspo" in words_of("explain", "usage").names
    assert words_of("compare", "[five | PRESET]").names[:2] == ("five", "arithmetic")


CASES = [
    (["tr"], "train"),
    (["--pri"], "--print-completion"),
    (["train", "--algorithm", "d"], "dapo"),
    (["train", "--dry-run", "pp"], "ppo-arithmetic"),
    (["train", "--model", "x", "--gate.type", "S"], "SoftGate"),
    (["train", "--rules.a"], "--rules.add"),
    (["train", "--dtype", "f"], "float32"),
]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_script_completes_in_its_shell(shell: str, tmp_path):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} here")
    lines = list(_bash(KNOWN) if shell == "bash" else _fish(KNOWN))
    for words, _ in CASES:
        if shell == "fish":
            lines.append(f"complete -C 'proximo {' '.join(words)}'")
        else:
            lines += [f"COMP_WORDS=(proximo {' '.join(words)}) COMP_CWORD={len(words)}", "_proximo", "echo $COMPREPLY"]
    (tmp_path / "script").write_text("\n".join(lines))
    done = subprocess.run([program, str(tmp_path / "script")], capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines(), done.stderr) == ([word for _, word in CASES], "")


def test_a_shell_must_be_known(capsys):
    for given in (["tcsh"], [], ["bash", "zsh"]):
        with pytest.raises(SystemExit):
            main(["--print-completion", *given])
        assert capsys.readouterr().err.endswith(": give one of bash, zsh, fish\n")
