"""A reward function on a Ray cluster of three nodes on this machine; the node of one of its two processes is killed in
the middle of its calls.

`python -m tests.rewards.ray_cases FOLDER` starts the cluster and writes what it saw to result.json in the folder.
"""

# pyright: reportMissingImports=false
import json
import sys
import threading
from contextvars import copy_context
from pathlib import Path

from proximo.rewards import PythonFunction
from proximo.rewards.grading import Grading
from proximo.samplers.engines.options import Workers
from proximo.types import Completion, Problem
from tests.waiting import is_running, wait_until

FUNCTION = """
import os, time
from pathlib import Path

def slow(completions, folder, **columns):
    Path(folder[0], f"pid-{os.getpid()}").write_text(os.environ["RAY_RAYLET_PID"])
    end = time.process_time() + 1.0
    while time.process_time() < end:  # a function that waits would get further processes
        pass
    return [float(len(each)) for each in completions]
"""


def main(folder: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    cluster.wait_for_nodes()
    (folder / "slow.py").write_text(FUNCTION)
    reward = PythonFunction(f"{folder / 'slow.py'}:slow", seconds=60.0, siblings=True)
    asked = [Problem(str(number), "p", "1", data={"folder": str(folder)}) for number in range(6)]
    said = [Completion((1,), (0.0,), text, "stop") for text in ("a", "bcd")]
    grading = Grading(places=Workers(2, address=cluster.address).open())
    scores: list[list[float | None]] = []

    def pids() -> dict[int, str]:
        return {int(each.name.partition("-")[2]): each.read_text() for each in folder.glob("pid-*")}

    with grading.active():
        context = copy_context()
    asking = threading.Thread(
        target=context.run,
        args=(lambda: scores.append(reward([each for each in asked for _ in said], said * len(asked))),),
    )
    asking.start()
    wait_until(lambda: len(pids()) == 2)
    first = pids()
    lost_pid, lost_node = next(iter(first.items()))
    [lost] = [node for node in nodes if str(node.all_processes["raylet"][0].process.pid) == lost_node]
    cluster.remove_node(lost, allow_graceful=False)
    wait_until(lambda: not is_running(lost_pid))
    asking.join(120)
    found = {
        "scores": scores,
        "first": sorted(first.values()),
        "lost": lost_node,
        "then": [node for pid, node in pids().items() if pid not in first],
        "unscored": [str(each) for each in grading.failures.take()],
    }
    grading.close()
    wait_until(lambda: not any(map(is_running, pids())))
    (folder / "result.json").write_text(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
