"""Reward functions and environments in processes of another node, reached through a relay. The node is this machine,
with a listener started as one of a cluster is."""

import math
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import pytest

from proximo import train
from proximo.environments.episode_pool import ActingJob, ProcessHost
from proximo.processes import failures
from proximo.processes.cluster import Nodes, NoPlace
from proximo.processes.server import ServerLost, ServerProcess, start_here
from proximo.rewards import PythonFunction
from proximo.rewards.grading import Grading
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.samplers.engines.options import Workers
from proximo.types import Completion, Problem
from tests.api.settings import small
from tests.ray_clusters import run_cases
from tests.waiting import is_running, wait_until

FUNCTIONS = """
import os, sys, time
from pathlib import Path

def length(completions, **columns):
    return [float(len(each)) for each in completions]

def who(completions, **columns):
    Path(os.environ["SEEN"], f"{os.getpid()}").touch()
    time.sleep(0.5)
    return [float(os.getpid())] * len(completions)

def burn(completions, **columns):
    Path(os.environ["SEEN"], f"{os.getpid()}").touch()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    return [1.0] * len(completions)

def loud(completions, **columns):
    print("x" * 300_000)
    print("and the end")
    raise RuntimeError("no")

def leaves(completions, **columns):
    os._exit(7)

def forks(completions, **columns):
    if os.fork() == 0:
        os.setsid()
        Path(os.environ["SEEN"], f"{os.getpid()}").touch()
        time.sleep(600)
    time.sleep(600)

def large(completions, **columns):
    return [float(sum(map(len, columns["blob"])))] * len(completions)
"""


@dataclass
class Machine:
    """Listeners that were started here."""

    seen: Path
    servers: list[ServerProcess] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    room: int = 99

    def __call__(self, command, environment, deadline):
        if not self.room:
            raise ServerLost("no node is free")
        self.room -= 1
        server, address = start_here(command, environment | {"SEEN": str(self.seen)}, deadline)
        assert isinstance(server, ServerProcess)
        self.servers.append(server)
        self.addresses.append(address)
        return server, address

    def pids(self) -> list[int]:
        return [int(each.name) for each in self.seen.iterdir()]


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "seen").mkdir()
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return Machine(tmp_path / "seen")


@pytest.fixture
def grading(machine, request):
    places = Nodes(machine, getattr(request, "param", 2))
    made = Grading(places=places)
    with made.active():
        yield made
    made.close()
    assert not any(server.is_running for server in machine.servers)
    wait_until(lambda: not any(map(is_running, machine.pids())))


def graded(machine, name, groups=1, **options):
    """Scores of groups of two completions."""
    reward = PythonFunction(f"{machine.seen.parent / 'functions.py'}:{name}", **options)
    asked = [Problem(str(group), "p", "1", data={"blob": "b" * 200_000}) for group in range(groups)]
    said = [Completion((1,), (0.0,), text, "stop") for text in ("a", "bcd")]
    return reward([each for each in asked for _ in said], said * groups)


def test_a_function_on_a_node_says_what_it_says_here(machine, grading):
    assert graded(machine, "length") == [1.0, 3.0]
    assert graded(machine, "large") == [400_000.0] * 2
    assert len(machine.servers) == 2


@pytest.mark.slow("starts functions that compute")
def test_functions_that_compute_use_all_places(machine, grading):
    """On one machine a function that computes keeps a single process."""
    assert graded(machine, "burn", groups=6) == [1.0] * 12
    assert len(machine.pids()) == 2


@pytest.mark.slow("waits for functions that hang")
def test_what_it_prints_is_shown_and_how_it_ends_is_said(machine, grading):
    assert all(map(math.isnan, [*graded(machine, "loud"), *graded(machine, "leaves")]))
    loud, left = grading.failures.take()
    assert loud.kind == "RuntimeError"
    assert "; it printed: xxx" in loud.example
    assert "xxx and the end; the completion: 'a'" in loud.example
    assert "its process exited with code 7" in left.example


@pytest.mark.slow("waits for calls to be given up")
def test_a_call_that_takes_too_long_leaves_nothing_on_the_node(machine, grading):
    assert all(map(math.isnan, graded(machine, "forks", seconds=1.0)))
    wait_until(lambda: machine.pids() != [] and not any(map(is_running, machine.pids())))
    [failure] = grading.failures.take()
    assert failure.kind == "time"


@pytest.mark.slow("waits for a node to be lost")
@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_of_a_lost_node_is_made_on_another(machine, grading, ends):
    found = []
    asking = _thread(lambda: found.append(graded(machine, "who", siblings=True, seconds=30.0)))
    wait_until(lambda: machine.pids() or not asking.is_alive())
    [first] = machine.pids()
    _kill_node(machine.servers[0], ends)
    asking.join(30)
    [[one, other]] = found
    assert one == other != float(first)
    assert not grading.failures.take()
    wait_until(lambda: not is_running(first))


def _thread(work) -> threading.Thread:
    """That grades for the same run."""
    thread = threading.Thread(target=copy_context().run, args=(work,))
    thread.start()
    return thread


def _kill_node(server: ServerProcess, number: int) -> None:
    """The listener, as a node that is gone would take it along."""
    keeper = server._keeper.pid
    [child] = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    [listener] = Path(f"/proc/{child}/task/{child}/children").read_text().split()
    os.kill(int(listener), number)
    wait_until(lambda: not server.is_running)


def test_places_without_a_node_are_left_out_and_none_is_an_error(machine):
    machine.room = 2
    places = Nodes(machine, 2)
    first, second = places.take(), places.take()
    assert first.address != second.address
    assert places.take() == first
    _kill_node(machine.servers[1], signal.SIGKILL)
    assert [places.take(), places.take()] == [first, first]
    _kill_node(machine.servers[0], signal.SIGKILL)
    with pytest.raises(NoPlace, match="workers.processes is 2.*no node is free"):
        places.take()
    places.close()


def test_places_are_not_closed_by_a_fork_and_none_is_given_after_the_end(machine):
    places = Nodes(machine, 1)
    places.take()
    if (child := os.fork()) == 0:
        places.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert machine.servers[0].is_running
    places.close()
    assert not machine.servers[0].is_running
    with pytest.raises(NoPlace):
        places.take()


def test_who_does_not_know_the_token_is_not_let_in(machine):
    places = Nodes(machine, 1)
    place = places.take()
    host, _, port = place.address.rpartition(":")
    for said in (b"\n", b"guess 0\n", f"{place.token} 7\n".encode(), f"{place.token} ../x\n".encode(), b"x" * 1000):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(said)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    # Connections that say nothing keep nobody out.
    silent = [socket.create_connection((host, int(port)), timeout=20) for _ in range(50)]
    with Grading(places=places).active() as grading:
        assert graded(machine, "length") == [1.0, 3.0]
    grading.close()
    for each in silent:
        each.close()


def test_the_token_is_no_argument_of_a_process(machine, grading):
    asking = _thread(lambda: graded(machine, "who"))
    wait_until(lambda: machine.pids())
    token = grading.places._token
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert token.encode() not in entry.read_bytes()
        except OSError:
            continue
    asking.join(30)


def test_workers_end_when_the_trainer_is_killed(machine, tmp_path):
    """The relay sees that its parent is gone, the listener that the relay is."""
    places = Nodes(machine, 1)
    places.take()
    child = os.fork()
    if child == 0:
        with Grading(places=places).active():
            graded(machine, "forks", seconds=60.0)
        os._exit(0)
    wait_until(lambda: machine.pids())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until(lambda: not any(map(is_running, machine.pids())))
    places.close()


@pytest.mark.slow("waits for functions that hang")
def test_episodes_are_played_on_a_node(machine):
    """And one whose node is lost has failed, while the next one starts elsewhere."""
    places = Nodes(machine, 1)
    host = ProcessHost(ActingJob("tests.environments.worlds:Lucky", "{}", (), 5.0, 1024, 100), places=places)
    reset, step = {"do": "reset", "problem": {"prompt": "a"}, "seed": 1}, {"do": "step", "reply": "a", "seed": 2}
    [(numbers, started)] = host.start([3], [reset])
    assert started == [{"started": True}] * 3
    here = ProcessHost(ActingJob("tests.environments.worlds:Lucky", "{}", (), 5.0, 1024, 100))
    [([other], _)] = here.start([1], [reset])
    said = [str(dict(each)["text"]).split() for each in host.ask([(number, step) for number in numbers])]  # type: ignore
    [same] = [str(dict(each)["text"]).split() for each in here.ask([(other, step)])]  # type: ignore
    assert {tuple(each[:2]) for each in said} == {tuple(same[:2])}, "seeded alike, wherever it is"
    played = [int(each[2]) for each in said]
    assert len(set(played)) == 3
    _kill_node(machine.servers[0], signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, played)))
    [lost] = host.ask([(numbers[0], step)])
    assert isinstance(lost, failures.Failure)
    assert host.start([1], [reset])[0][1] == [{"started": True}]
    assert len(machine.servers) == 2
    for each in (host, here, places):
        each.close()


@pytest.mark.slow("trains two runs")
def test_a_run_with_workers_on_nodes_is_the_run_without(machine, tmp_path, monkeypatch):
    path = f"{machine.seen.parent / 'functions.py'}:length"
    opened = []

    def at_nodes(workers):
        opened.append(Nodes(machine, workers.processes))
        return opened[0]

    monkeypatch.setattr(Workers, "open", at_nodes)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    config = small(steps=2, rewards=RewardMix(rules=(WeightedRule(PythonFunction(path), 0.1),)))
    for name, workers in (("here", None), ("there", Workers(2))):
        train(replace(config, workers=workers), tmp_path / name, quiet=True)
    rows = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("here", "there")]
    assert rows[0] == rows[1]
    assert len(opened) == 1
    assert machine.servers
    assert not any(server.is_running for server in machine.servers)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match='workers.cluster is "ray".* pip install "proximo\\[ray\\]"'):
        Workers(2).open()
    with pytest.raises(ValueError, match="workers.processes is 0: give at least 1"):
        Workers(0)


@pytest.mark.scale
def test_calls_of_a_node_that_ray_lost_are_made_on_another(tmp_path):
    found = run_cases("tests.rewards.ray_cases", tmp_path, seconds=300)
    assert found["scores"] == [[1.0, 3.0] * 6]
    assert found["unscored"] == []
    assert len(set(found["first"])) == 2
    assert found["then"]
    assert found["lost"] not in found["then"]


@pytest.mark.scale
def test_a_run_that_ray_ends_with_its_head_goes_on_with_the_same_command(tmp_path):
    found = run_cases("tests.rewards.ray_head_cases", tmp_path, seconds=600)
    assert found["first"] != 0
    assert 6 <= found["steps after the head was lost"] < 100
    assert (found["second"], found["wrong"], found["result"]) == (0, [], True)
    before, after = found["workers"]
    assert 0 < before < after
