"""Without a /proc, as on a Mac: workers, episodes, servers and runs start, and end with all that they started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.waiting import SOON, is_running, wait_until

HIDDEN = """
import os, sys
import psutil  # asks the system, whatever system it is

def hide(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc"):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("psutil"):
                return
            frame = frame.f_back
        raise FileNotFoundError(2, "there is no /proc", arguments[0])

sys.addaudithook(hide)
del os.pidfd_open, os.sched_getaffinity, os.waitid
"""
"""What every process imports when it starts."""

SCORES = """
import json, sys
from proximo.rewards import PythonFunction
from proximo.types import Completion, Problem

def scores(text, seconds):
    reward = PythonFunction("tests/rewards/hostile_rewards.py:act", seconds=seconds)
    problem = Problem("p", "?", None, {"folder": sys.argv[1]})
    return reward([problem], [Completion((1,), (-0.1,), text, "stop")])

print(json.dumps([scores("1", 60.0), scores("starts and sleeps", 5.0), scores("2", 60.0)]))
"""

EPISODES = """
import json
from proximo.environments.episode_pool import ActingJob, ProcessHost

host = ProcessHost(ActingJob("tests.environments.worlds:Picky", "{}", (), 2.0, 1024, 100))
[(numbers, started)] = host.start([2], [{"do": "reset", "problem": {"prompt": "a"}, "seed": 1}])
steps = [(number, {"do": "step", "reply": reply, "seed": 1}) for number, reply in zip(numbers, "ab")]
print(json.dumps([started, [getattr(each, "kind", each) for each in host.ask(steps)]]))
host.close()
"""

SERVERS = """
import json, os, sys, time
from pathlib import Path
from proximo.processes import tree
from proximo.processes.server import ServerProcess

FAMILY = '''
import os, subprocess, sys, time
away = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(os.getpid(), away.pid, flush=True)
time.sleep(600)
'''
server = ServerProcess([sys.executable, "-c", FAMILY], {})
while len(numbers := server.last_lines().split()) < 2:
    time.sleep(0.01)
tree.signal_kept(server._keeper.pid, 18)
print(json.dumps([server.is_running, *map(int, numbers)]), flush=True)
server.kill()
"""

RUN = """
import json, sys
from dataclasses import replace
from proximo import train
from proximo.rewards import PythonFunction
from proximo.rl.reward_config import RewardMix, WeightedRule
from tests.api.settings import small

rule = WeightedRule(PythonFunction("tests/rewards/hostile_rewards.py:act"), 0.1)
train(replace(small(steps=1), rewards=RewardMix(rules=(rule,))), sys.argv[1] + "/run", quiet=True)
print(json.dumps(True))
"""

WORKER = """
import sys
from proximo.processes import tree

def main(arguments):
    status, parent = map(int, arguments)
    return status if tree.end_with(parent) else 1

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""

STARTS = """
import json, sys
from pathlib import Path
from proximo.processes.forkserver import ForkServer, Fresh

statuses = []
for way in (ForkServer("hidden_worker"), Fresh("hidden_worker")):
    statuses.append(way.start([3], Path(sys.argv[1], "log")).wait())
    way.close()
print(json.dumps(statuses))
"""


@pytest.fixture
def hidden(tmp_path: Path):
    """What a program prints in processes that see no /proc."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    (tmp_path / "hidden_worker.py").write_text(WORKER)
    paths = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "src")))

    def shown(program: str):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            timeout=SOON,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])

    return shown


def test_it_is_hidden(hidden):
    look = "import json, os, pathlib, psutil\ntry: os.listdir('/proc')\nexcept OSError as error: print(json.dumps(str("
    assert "there is no /proc" in hidden(f"{look}error) + psutil.Process().name()))")


@pytest.mark.slow("waits for processes to be killed")
def test_a_worker_that_takes_too_long_is_killed_with_all_that_it_started(hidden, tmp_path):
    first, [guilty], last = hidden(SCORES)
    assert (first, last) == ([1.0], [2.0])
    assert guilty != guilty
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 5
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.slow("waits for processes to be killed")
def test_episodes_are_played_and_one_that_hangs_is_ended(hidden):
    assert hidden(EPISODES) == [[{"started": True}] * 2, [{"done": True, "reward": 1.0}, "time"]]


def test_a_server_ends_with_its_children(hidden):
    was_running, *numbers = hidden(SERVERS)
    assert was_running
    wait_until(lambda: not any(map(is_running, numbers)))


def test_processes_are_forked_and_started(hidden):
    assert hidden(STARTS) == [3, 3]


@pytest.mark.slow("waits for processes to be killed")
def test_a_run_is_trained(hidden):
    assert hidden(RUN)
