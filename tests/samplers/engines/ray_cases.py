"""Two engines on a Ray cluster of three nodes on this machine; the node of one of them is killed.

`python -m tests.samplers.engines.ray_cases FOLDER` starts the cluster and writes what it saw to result.json
in the folder.
"""

# pyright: reportMissingImports=false
import json
import os
import sys
from pathlib import Path

from proximo.processes import cluster as placing
from proximo.samplers.engines.options import Fleet
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Request
from proximo_lab.faults.engine_server import PLANTED, install
from tests import ROOT
from tests.samplers.engines.conformance import SmallPolicy, nudge
from tests.waiting import is_running, wait_until

OPTIONS = SamplingOptions(max_tokens=4)


class Telling(placing.ServerOnNode):
    """Tells on which node it is."""

    def start(self, command, environment) -> None:
        import ray

        super().start(command, environment)
        note = Path(os.environ[PLANTED]) / f"node-{command[-1]}"
        note.write_text(ray.get_runtime_context().get_node_id())


def main(folder: Path) -> None:
    servers = install(folder / "servers")
    os.environ |= {
        PLANTED: str(folder),
        "PYTHONPATH": os.pathsep.join([str(servers), str(ROOT), str(ROOT / "src")]),
    }
    sys.path.insert(0, str(servers))  # a fleet looks for vLLM in this Python first
    from ray.cluster_utils import Cluster

    placing.ServerOnNode = Telling
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    cluster.wait_for_nodes()
    policy = SmallPolicy()
    fleet = Fleet(
        engines=2, cluster="ray", address=cluster.address, python=sys.executable, probe=8, deadline=300.0
    ).build(policy, policy.tokenizer, slots=4, record_routes=False)
    assert fleet.close is not None
    prompts = [tuple(policy.tokenizer(text)["input_ids"]) for text in ("12+7=", "3+8=", "40-1=")]
    requests = [Request(key, prompt, 4) for key, prompt in enumerate(prompts)]

    def sample(version: int) -> list[int]:
        found = fleet.training.stream(requests, OPTIONS, seed=1, step=version, version=version)
        return sorted({each.version for _, siblings in found for each in siblings})

    def places() -> list[str]:
        return [each.read_text() for each in sorted(folder.glob("node-*"), key=lambda each: each.stat().st_mtime)]

    def pids() -> list[int]:
        return [int(each.name.partition("-")[2]) for each in folder.glob("pid-*")]

    versions = [fleet.training.refresh(policy, 1), *sample(1)]
    first = places()
    [lost] = [node for node in nodes if node.node_id == first[0]]
    cluster.remove_node(lost, allow_graceful=False)
    wait_until(lambda: not all(map(is_running, pids())))  # a server ends with its node
    versions += sample(1)  # on the engine that is left
    nudge(policy.model, 2)
    versions += [fleet.training.refresh(policy, 2), *sample(2)]
    events = [each.kind for each in fleet.take_events()]
    fleet.close()
    wait_until(lambda: not any(map(is_running, pids())))
    found = {"versions": versions, "first": first, "then": places()[2:], "events": events, "servers": len(pids())}
    (folder / "result.json").write_text(json.dumps(found))
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
