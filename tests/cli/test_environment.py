"""Odd surroundings: no terminal, a dumb or narrow one, no UTF-8, no reader, no home, a missing extra."""

import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from proximo.cli import main
from proximo.config import toml
from proximo.rl.config import RunConfig
from tests.run_processes import Script

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SECONDS = 120
RUN = """model = "tiny-arithmetic"
steps = 1
[task]
type = "Echo"
alphabet = "éab"
held_out = 4
[evaluation]
problems = 2
[training]
groups = 1
group_size = 2
minibatches = 1
"""


def proximo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "proximo.cli", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=False, timeout=SECONDS)


@pytest.mark.slow("starts commands")
def test_a_reader_that_has_seen_enough():
    command = [sys.executable, "-m", "proximo.cli", "tasks"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(SECONDS) == 141
    assert error == b""


@pytest.mark.slow("starts commands")
@pytest.mark.parametrize("closed", ["1", "2"])
def test_streams_that_were_never_open(closed):
    script = f'exec "{sys.executable}" -m proximo.cli explain grpo {closed}>&-'
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=False, timeout=SECONDS)
    assert done.returncode == 0
    assert done.stderr == b""
    assert (b"GRPO" in done.stdout) == (closed == "2")


@pytest.mark.slow("starts commands")
def test_a_narrow_dumb_terminal_without_colours_or_utf8():
    done = proximo("explain", "grpo", **ASCII, TERM="dumb", NO_COLOR="1", COLUMNS="40")
    assert done.returncode == 0
    assert done.stderr == b""
    assert done.stdout.isascii()
    assert b"\x1b" not in done.stdout
    assert b"GRPO" in done.stdout


BOTH = """
import functools, sys
from proximo.system import machine
from proximo.cli import main
machine.readings = functools.cache(machine.readings)  # where nothing can be kept, each command would measure
status = main(["train", "--dry-run"])
sys.stdout.flush()
print(MARK)
print(MARK, file=sys.stderr)
sys.exit(status or main(sys.argv[1:]))
""".replace("MARK", repr(MARK := "-- and a run --"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> tuple[int, list[tuple[bytes, bytes]], Path]:
    """A dry run and a run in one process, since each start takes seconds, without UTF-8 and without a home that can be
    written to: its exit status, what each of the two printed, and their folder."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "run.toml").write_text(RUN, encoding="utf-8")
    arguments = ["train", str(folder / "run.toml"), "--run", str(folder / "run"), "--json"]
    nowhere = {"HOME": "/proc/nobody", "XDG_CACHE_HOME": "", "HF_HOME": str(folder / "none")}
    done = subprocess.run(
        [sys.executable, "-c", BOTH, *arguments],
        env={**os.environ, **ASCII, **nowhere},
        capture_output=True,
        check=False,
        timeout=2 * SECONDS,
    )
    mark = f"{MARK}\n".encode()
    assert mark in done.stdout, done.stderr.decode()
    printed = list(zip(done.stdout.split(mark), done.stderr.split(mark), strict=True))
    return done.returncode, printed, folder


@pytest.mark.slow("starts commands")
def test_a_home_where_nothing_can_be_written(bare):
    """What is measured of the machine cannot be kept; the command works all the same."""
    status, [(output, error), _], folder = bare
    assert status == 0
    assert error.startswith(b"the demo: ")
    assert error.count(b"\n") == 1
    assert b"# machine: " in output
    assert not (folder / "none").exists()


@pytest.mark.slow("starts commands")
def test_a_run_without_utf8_writes_utf8(bare):
    status, [_, (output, error)], folder = bare
    assert status == 0, error.decode()
    assert output.isascii()
    assert error.isascii()
    assert json.loads(output)["steps"] == 1
    written = toml.load(str(folder / "run" / "config.toml"), RunConfig)
    assert written == toml.load(str(folder / "run.toml"), RunConfig)


NARROW = """
os.environ |= {"COLUMNS": "40", "LINES": "10", "TERM": "xterm"}
from proximo.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow("starts commands")
def test_a_run_on_a_narrow_terminal(tmp_path):
    """The live view, on a terminal of 40 columns."""
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    leader, follower = pty.openpty()
    arguments = ["train", str(tmp_path / "run.toml"), "--run", str(tmp_path / "run")]
    process = Script(NARROW, *arguments, stderr=Path(os.ttyname(follower)))
    shown = b""
    while (is_running := process.poll() is None) or select.select([leader], [], [], 0)[0]:
        if select.select([leader], [], [], 0.05 if is_running else 0)[0]:
            shown += os.read(leader, 1 << 16)
    assert process.wait() == 0, shown.decode(errors="replace")
    os.close(follower)
    os.close(leader)
    lines = re.sub("\x1b\\[[0-9;?]*[A-Za-z]|\r", "\n", shown.decode()).splitlines()
    assert any("step 1/1" in line for line in lines)
    assert max(len(line) for line in lines if not line.startswith("grpo on ")) <= 40  # that line is before the view
    assert "Traceback" not in shown.decode()


def test_a_missing_extra_names_the_install_command(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--model", "tiny-arithmetic", "--task.type", "Gym", "--task.name", "chain_sum"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert 'pip install "proximo[gym]"' in error
    assert len(error.splitlines()) == 1
