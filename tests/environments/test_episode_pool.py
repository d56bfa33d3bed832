"""Processes of episodes: their limits and their end."""

import json
import re
import resource
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from proximo.environments import episode_pool
from proximo.environments.episode_pool import ActingJob, LocalHost, ProcessHost
from proximo.environments.worker import Episodes
from proximo.processes import channel
from proximo.processes.failures import Failure

PICKY = ActingJob("tests.environments.worlds:Picky", "{}", (), 5.0, 1024, 100)
RESET = {"do": "reset", "problem": {"prompt": "a"}, "seed": 1}


def test_a_call_after_the_end_of_the_run_is_answered():
    host = ProcessHost(PICKY)
    assert host.start([1], [RESET]) == [([0], [{"started": True}])]
    host.close()
    late: list[object] = []
    thread = threading.Thread(target=lambda: late.extend(host.start([1], [RESET])), daemon=True)
    thread.start()
    thread.join(10.0)
    assert late == [([1], [Failure("died", "the run has ended")])]


def test_more_episodes_than_open_files():
    host = ProcessHost(PICKY)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = len(list(Path("/proc/self/fd").iterdir())) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    try:
        [(numbers, answers)] = host.start([soft], [RESET])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert answers == [{"started": True}] * soft
    runner = host._slot._process and host._slot._process._runner
    assert runner is not None
    resource.prlimit(runner, resource.RLIMIT_NOFILE, (soft, soft))
    [(_, [refused])] = host.start([1], [RESET])
    assert re.search(f"open files with {soft} .*: the limit of open files is {soft}, raise it", str(refused))
    host.end(numbers[:5])
    assert host.start([1], [RESET])[0][1] == [{"started": True}]
    host.close()


def test_tools_of_our_own_run_at_the_same_time(monkeypatch):
    """Each waits for the other."""
    monkeypatch.setattr(episode_pool, "cores", lambda: 2)
    both = threading.Barrier(2)
    host = LocalHost(None, {"meet": lambda: both.wait(20.0)}, 100)
    [(numbers, _)] = host.start([2], [RESET])
    call = {"do": "call", "name": "meet", "arguments": {}, "seed": 1}
    found = host.ask([(number, call) for number in numbers])
    host.close()
    assert sorted(str(dict(each)["text"]) for each in found if not isinstance(each, Failure)) == ["0", "1"]


def test_an_episode_that_dies_before_it_reads_what_it_was_asked_takes_no_other_along():
    """The socket of one that dies with a message unread is reset, which is an error where others are at their end."""
    episodes = Episodes(None, {}, 100, ())
    pairs = [socket.socketpair() for _ in range(2)]
    episodes._sockets.update(enumerate(ours for ours, _ in pairs))
    pairs[0][0].sendall(b"asked")
    pairs[0][1].close()
    answer = json.dumps({"text": "fine"}).encode()
    pairs[1][1].sendall(len(answer).to_bytes(channel.LENGTH) + answer)
    try:
        assert episodes._answers([0, 1], 5.0, 1.0) == {0: None, 1: {"text": "fine"}}
    finally:
        for each in (pairs[0][0], *pairs[1]):
            each.close()


@pytest.mark.slow("waits for environments that hang")
def test_an_environment_that_stops_its_parent_holds_nobody_up():
    """Under a limit of two seconds each step took half a minute more."""
    host = ProcessHost(replace(PICKY, environment="tests.environments.worlds:Stopping", seconds=2.0))
    [([number, other], _)] = host.start([2], [RESET])
    for replies in (("a", "a"), ("a", "b")):
        steps = [
            (each, {"do": "step", "reply": reply, "seed": 1})
            for each, reply in zip((number, other), replies, strict=True)
        ]
        assert host.ask(steps) == [{"done": True, "reward": 1.0}] * 2
    host.close()
