"""Weights as bytes, and a server that ends with whoever started it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proximo.processes.server import KEEPER, ServerProcess
from proximo.samplers.engines.buckets import Layout, packed, unpacked
from proximo.samplers.engines.sync import in_parallel, write_weights
from proximo.system.locks import FolderLock
from proximo.system.scratch import Scratch
from tests.waiting import is_running, wait_until

NAMED = [
    ("a", torch.arange(3, dtype=torch.bfloat16)),
    ("b", torch.arange(10, dtype=torch.float32).view(2, 5).t()),  # its memory is in another order
    ("c", torch.tensor(2.5)),
    ("d", torch.arange(7, dtype=torch.float64)),
]


@pytest.mark.parametrize(("limit", "count"), [(1 << 20, 1), (46, 3), (1, 4)])
def test_weights_come_out_of_buckets_as_they_went_in(limit, count):
    buckets = list(packed(iter(NAMED), limit))
    assert len(buckets) == count
    found = [pair for layout, bucket in buckets for pair in unpacked(Layout(**layout.info()), bucket)]
    assert [name for name, _ in found] == [name for name, _ in NAMED]
    for (_, before), (_, after) in zip(NAMED, found, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)


def test_weights_are_files_of_safetensors(tmp_path: Path):
    write_weights(tmp_path, iter(NAMED))
    [file] = tmp_path.iterdir()
    assert load_file(file).keys() == {"a", "b", "c", "d"}


def test_a_signal_stops_engines_that_are_waited_for():
    stopped = threading.Event()

    class Waiting:
        name = "engine-0"
        stop = staticmethod(stopped.set)

    def do(engine) -> None:
        if engine is not first:
            raise KeyboardInterrupt  # what a signal raises
        stopped.wait(60)

    first, second = Waiting(), Waiting()
    with pytest.raises(KeyboardInterrupt):
        in_parallel([second, first], do)  # pyright: ignore[reportArgumentType]
    assert stopped.is_set()


FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_end_of_the_pipe_ends_the_whole_group(is_killed):
    keeper = subprocess.Popen(
        [*KEEPER, sys.executable, "-c", FAMILY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    assert keeper.stdin is not None
    numbers = [int(each) for each in keeper.stdout.readline().split()]
    assert all(map(is_running, numbers))
    if is_killed:  # as Ray does with the children of a process that is gone
        keeper.kill()
    keeper.stdin.close()  # as it is when the run is killed
    keeper.wait()
    keeper.stdout.close()
    wait_until(lambda: not any(map(is_running, numbers)))


def test_another_python_finds_the_plugin_and_nothing_else_of_ours(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    code = (
        "from importlib.metadata import entry_points; import os, sys; "
        "print([each.value for each in entry_points(group='vllm.general_plugins')], os.environ['MORE'], sys.path[1]); "
        "import proximo.samplers.engines.plugin"
    )
    server = ServerProcess([sys.executable, "-S", "-c", code], {"MORE": "more"})
    wait_until(lambda: not server.is_running)
    first, more, path = server.last_lines().rsplit(" ", 2)
    assert (first, more) == ("['proximo.samplers.engines.plugin:register']", "more")
    assert sorted(os.listdir(path)) == ["proximo", "proximo-0.1.0.dist-info"]
    server.kill()
    assert not server.log.exists()


DRIVER = """
import os, signal, sys
from pathlib import Path
from proximo.processes.server import ServerProcess
from proximo.system.scratch import Scratch
scratch = Scratch("proximo-fleet-")
(scratch.path / "model").mkdir()
server = ServerProcess([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], {})
while "up" not in server.last_lines():
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_nothing_that_the_next_does_not_remove(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    driver = subprocess.run([sys.executable, "-c", DRIVER], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert driver.returncode == -signal.SIGKILL
    [scratch] = tmp_path.glob("proximo-fleet-*")
    wait_until(lambda: not list(tmp_path.glob("proximo-engine-*")))  # the keeper's work
    (young := tmp_path / "proximo-fleet-young").mkdir()  # another process is about to lock it
    (far := tmp_path / "proximo-fleet-far").mkdir()  # of another machine, on a disk that does not know its locks
    (far / "lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with FolderLock(tmp_path / "proximo-fleet-held") as held:
        new = Scratch("proximo-fleet-")
        assert sorted(tmp_path.iterdir()) == sorted([young, far, held.path.parent, new.path])
        assert not scratch.exists()
    new.remove()
    assert not new.path.exists()
