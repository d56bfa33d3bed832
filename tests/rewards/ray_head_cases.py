"""A run whose reward function is on a Ray cluster of this machine. The cluster's head is killed in the middle of it;
the same command on a new cluster goes on from the newest checkpoint.

`python -m tests.rewards.ray_head_cases FOLDER` does it and writes what it saw to result.json in the folder.
"""

# pyright: reportMissingImports=false
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from proximo.config import toml
from proximo.rewards import PythonFunction
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.runs.ledger import check_ledger
from proximo.runs.options import CheckpointOptions
from tests.api.settings import small
from tests.waiting import is_running, wait_until

FUNCTION = """
import os, time
from pathlib import Path

def slow(completions, **columns):
    Path(os.environ["SEEN"], f"{os.getpid()}").touch()
    time.sleep(0.05)
    return [float(len(each)) for each in completions]
"""
STEPS = 100
"""More than are done before Ray ends the program."""


def main(folder: Path) -> None:
    from ray.cluster_utils import Cluster

    (folder / "slow.py").write_text(FUNCTION)
    (folder / "seen").mkdir()
    # A program that has lost its head ends after seconds, not after a minute.
    os.environ |= {"SEEN": str(folder / "seen"), "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    reward = RewardMix(rules=(WeightedRule(PythonFunction(f"{folder / 'slow.py'}:slow"), 0.1),))
    config = small(steps=STEPS, rewards=reward, checkpoints=CheckpointOptions(every=2))
    run, path = folder / "run", folder / "run.toml"

    def start(cluster: Cluster) -> subprocess.Popen[bytes]:
        path.write_text(toml.dumps(config) + f'\n[workers]\nprocesses = 2\naddress = "{cluster.address}"\n')
        command = [sys.executable, "-m", "proximo.cli", "train", str(path), "--run", str(run)]
        with (folder / "printed.txt").open("ab") as printed:
            return subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)

    def steps() -> int:
        rows = run / "metrics.jsonl"
        return sum('"step"' in line for line in rows.read_text().splitlines()) if rows.exists() else 0

    def cluster_of_two() -> Cluster:
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        for _ in range(2):
            made.add_node(num_cpus=1)
        made.wait_for_nodes()
        return made

    cluster = cluster_of_two()
    first = start(cluster)
    wait_until(lambda: steps() >= 6 or first.poll() is not None)
    os.kill(cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
    first_status, after_head = first.wait(180), steps()
    wait_until(lambda: not any(is_running(int(each.name)) for each in (folder / "seen").iterdir()))
    workers = len(list((folder / "seen").iterdir()))
    cluster.shutdown()
    again = cluster_of_two()
    second_status = start(again).wait(300)
    wait_until(lambda: not any(is_running(int(each.name)) for each in (folder / "seen").iterdir()))
    found = {
        "first": first_status,
        "steps after the head was lost": after_head,
        "second": second_status,
        "steps": steps(),
        "workers": [workers, len(list((folder / "seen").iterdir()))],
        "wrong": list(check_ledger(run).wrong),
        "result": (run / "result.json").exists(),
    }
    (folder / "result.json").write_text(json.dumps(found))
    again.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
