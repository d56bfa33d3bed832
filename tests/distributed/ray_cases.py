"""Two ranks on a Ray cluster of three nodes on this machine; the node of one of them is killed.

`python -m tests.distributed.ray_cases FOLDER` starts the cluster; ranks write what they see into the folder.
"""

# pyright: reportMissingImports=false
import json
import os
import sys
import threading
import time
from pathlib import Path

from proximo.distributed import launching, on_ray
from proximo.learner.ranks import Ranks

RANK = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
attempt = len(list(folder.glob(f"rank-{rank}-*")))
note = folder / f"rank-{rank}-{attempt}"
note.with_name("partial-" + note.name).write_text(os.environ["NODE"])
os.rename(note.with_name("partial-" + note.name), note)
if not attempt:
    time.sleep(600)
dist.init_process_group("gloo")
found = torch.tensor([float(rank) + 1])
dist.all_reduce(found)
(folder / f"sum-{rank}").write_text(str(found.item()))
sys.exit(3 if rank == "0" else 0)
"""


class Telling(on_ray.RankProcess):
    """Tells the rank on which node it is."""

    def start(self, command, environment, output, folder) -> None:
        import ray

        super().start(command, environment | {"NODE": ray.get_runtime_context().get_node_id()}, output, folder)


def main(folder: Path) -> None:
    from ray.cluster_utils import Cluster

    launching.GRACE, on_ray.RankProcess = 1.0, Telling
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    cluster.wait_for_nodes()

    def kill_one() -> None:
        first = [folder / f"rank-{rank}-0" for rank in range(2)]
        while not all(each.exists() for each in first):
            time.sleep(0.1)
        [lost] = [node for node in nodes if node.node_id == first[1].read_text()]
        cluster.remove_node(lost, allow_graceful=False)

    threading.Thread(target=kill_one, daemon=True).start()
    said: list[str] = []
    with on_ray.starting(Ranks(processes=2, cluster="ray", address=cluster.address)) as start:
        os.chdir(folder)  # the ranks start where the launcher is
        command = [sys.executable, "-c", RANK, "."]
        status = launching.launch(command, 2, said.append, start=start)
    (folder / "result.json").write_text(json.dumps({"status": status, "said": said}))
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
