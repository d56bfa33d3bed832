"""Processes forked from one that has imported everything end, save and die as those that are started anew."""

import os
import signal
import sys
from pathlib import Path

import pytest

from proximo.processes import forkserver
from proximo.processes.forkserver import Forked, ForkServer, Fresh, StartedProcess, starter
from tests.waiting import is_running, wait_until

WORKER = """
import os, signal, sys, time
from pathlib import Path
from proximo.processes import tree

if __name__ != "__main__":
    print("null")

def main(arguments):
    kind, folder, parent = arguments
    tree.end_with(int(parent))
    place = Path(folder, str(os.getpid()))
    signal.signal(signal.SIGTERM, lambda *_: (place.with_suffix(".saved").touch(), sys.exit(143)))
    print(f"input {sys.stdin.read()!r}", file=sys.stderr, flush=True)
    print(os.getsid(0) == os.getpid(), parent == str(os.getppid()), flush=True)
    if kind == "raise":
        raise RuntimeError("no room")
    if kind == "kill":
        os.kill(os.getpid(), 9)
    place.with_suffix(".ready").touch()
    while kind == "wait":
        time.sleep(60)
    return int(kind)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    (folder / "small_worker.py").write_text(WORKER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield "small_worker"


@pytest.fixture(scope="module", params=[ForkServer, Fresh])
def way(request, worker):
    made = request.param(worker)
    yield made
    made.close()


def waiting(way: forkserver.Starter, folder: Path) -> StartedProcess:
    """A process that has begun and goes on until it is told to end."""
    process = way.start(["wait", folder], folder / "wait.log")
    wait_until((folder / f"{process.pid}.ready").exists)
    return process


def test_each_has_a_session_and_a_log_of_its_own_and_no_input(way, tmp_path):
    logs = [tmp_path / f"{name}.log" for name in "ab"]
    logs[1].write_text("earlier\n")
    processes = [way.start([status, tmp_path], log) for status, log in enumerate(logs)]
    assert [process.wait() for process in processes] == [0, 1]
    assert [process.returncode for process in processes] == [0, 1]
    assert logs[0].read_text().removeprefix("null\n") == "input ''\nTrue True\n"  # the server's begins with its own
    assert logs[1].read_text() == "earlier\ninput ''\nTrue True\n"


def test_what_fails_says_why_and_with_which_signal(way, tmp_path):
    log = tmp_path / "log"
    assert way.start(["raise", tmp_path], log).wait() == 1
    assert log.read_text().endswith("RuntimeError: no room\n")
    assert way.start(["kill", tmp_path], log).wait() == -signal.SIGKILL


def test_one_that_is_told_to_end_saves(way, tmp_path):
    process = waiting(way, tmp_path)
    assert process.poll() is None
    process.terminate()
    assert process.wait() == 143
    assert (tmp_path / f"{process.pid}.saved").exists()
    process.terminate()  # of one that has ended: nothing


@pytest.mark.skipif(sys.platform != "linux", reason="there is no fork server")
@pytest.mark.parametrize("way", [ForkServer], indirect=True)
def test_without_its_server_a_process_dies_and_the_next_has_a_new_one(way, tmp_path):
    first = waiting(way, tmp_path)
    assert isinstance(first, Forked)
    os.kill(first._server.pid, signal.SIGKILL)
    wait_until(lambda: first.poll() is not None)
    assert first.wait() == -signal.SIGKILL
    wait_until(lambda: not is_running(first.pid))
    first.terminate()
    second = waiting(way, tmp_path)
    assert second.poll() is None
    assert (first.poll(), first.returncode) == (-signal.SIGKILL, -signal.SIGKILL)
    way.close()  # as if the one that starts processes had ended
    wait_until(lambda: not is_running(second.pid))


def test_a_server_that_cannot_start_says_why(tmp_path):
    way, log = ForkServer("there_is_no_such_worker"), tmp_path / "log"
    process = way.start([], log)
    way.close()
    assert process.poll() == process.returncode == 1
    assert "No module named 'there_is_no_such_worker'" in log.read_text()


def test_a_fork_is_made_where_it_is_safe(monkeypatch):
    assert isinstance(starter("worker", on_cpu=False), Fresh)
    for platform, kind in (("linux", ForkServer), ("darwin", Fresh)):
        monkeypatch.setattr(forkserver.sys, "platform", platform)
        assert isinstance(starter("worker", on_cpu=True), kind)
