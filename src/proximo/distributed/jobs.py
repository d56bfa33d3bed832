"""Job files for clusters: the same command on every node, which torchrun turns into one group of ranks.

A job that is started again resumes the run, because it names the run folder.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from proximo.distributed.launching import RESTARTS

PORT = 29500
"""Where the processes find each other, on the first node."""
NOTICE = 120
"""Seconds before its time limit at which SLURM asks the job to save and end, and that Kubernetes gives a pod."""
RAY = "2.50.0"
"""Version of Ray in an image, if nothing else is said."""
CORES = 8
"""Cores of a node for each of its GPUs, if nothing else is said."""
SHUTDOWN, SAVING = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 110
"""Seconds after which torchrun kills a process that it asked to end; its own 30 are less than a step may take."""


@dataclass(frozen=True)
class Job:
    """A run on several nodes of one kind."""

    config: str
    """Path of the run's .toml file, as the nodes see it."""
    run: str
    """Run folder, which all nodes see; the first one writes it."""
    nodes: int = 1
    """Number of nodes."""
    gpus: int = 8
    """GPUs of a node, with a process each."""
    hours: float = 24.0
    """Time limit of the job."""

    def __post_init__(self) -> None:
        for field in ("nodes", "gpus", "hours"):
            if not getattr(self, field) > 0:
                raise ValueError(f"--{field} {getattr(self, field):g}: give a number above 0")
        if 3600 * self.hours < 2 * NOTICE:
            raise ValueError(f"--hours {self.hours:g}: the run is asked to end {NOTICE} s before, give at least 0.1")

    @property
    def name(self) -> str:
        """A name that clusters accept: of lower-case letters, digits and hyphens."""
        plain = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(self.run).name.lower()).strip("-")
        return f"proximo-{plain}"[:50].rstrip("-")

    def command(self, meeting: str, number: str) -> list[str]:
        """What each node runs. `meeting` is the first node's address, and `number` the job's own."""
        found = [f"--nnodes={self.nodes}", f"--nproc-per-node={self.gpus}", f"--max-restarts={RESTARTS}"]
        # The static rendezvous does not survive a restart: addresses of dead processes stay in its store.
        found += ["--rdzv-backend=c10d", f"--rdzv-id={number}", f"--rdzv-endpoint={meeting}:{PORT}"]
        # Without "--" torchrun would take --run for one of its own flags.
        return ["torchrun", *found, "-m", "--", "proximo.cli", *self.training]

    @property
    def training(self) -> list[str]:
        """Our own command, without its name."""
        return ["train", self.config, "--ranks", str(self.nodes * self.gpus), "--run", self.run]


def slurm(job: Job, *, partition: str | None = None, account: str | None = None, cores: int | None = None) -> str:
    """A script for sbatch, which asks for whole nodes: all their memory, and nobody else on them. After a preemption or
    the loss of a node SLURM queues it again, and the run resumes; out of time, it has saved the run and ends.

    `cores` are those of a node; a task gets one if none are asked for.
    """
    cores = CORES * job.gpus if cores is None else cores
    if cores < 1:
        raise ValueError(f"--cores {cores}: give at least 1")
    asked = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus,
        "cpus-per-task": cores,
        "mem": 0,
        "time": _clock(job.hours),
        "partition": partition,
        "account": account,
        "signal": f"TERM@{NOTICE}",
        "open-mode": "append",
        "output": f"{job.name}-%j.log",
    }
    lines = [f"#SBATCH --{flag}={value}" for flag, value in asked.items() if value is not None]
    torchrun = [
        shlex.quote(each) if "$" not in each else f'"{each}"' for each in job.command("$first", "$SLURM_JOB_ID")
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --exclusive",
            "#SBATCH --requeue",
            "",
            "set -euo pipefail",
            'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "first=${nodes%%$'\\n'*}",  # not by head, which would end scontrol by SIGPIPE, and the job with it
            "export OMP_NUM_THREADS=1",
            f"export {SHUTDOWN}={SAVING}",
            # Since SLURM 22.05 srun does not take it from the job.
            f"srun --cpus-per-task={cores} {' '.join(torchrun)}",
            "",
        ]
    )


def kubernetes(job: Job, *, image: str, claim: str, folder: str = "/work") -> str:
    """A manifest for kubectl apply: an indexed job with a pod for each node, and a name for the first of them.

    `claim` is a volume that all pods can write (ReadWriteMany), in which config and run folder are.
    """
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        # Pods find each other before they are ready.
        "spec": {"clusterIP": "None", "selector": {"job-name": job.name}, "publishNotReadyAddresses": True},
    }
    command = job.command(f"{job.name}-0.{job.name}", job.name)
    env = [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": SHUTDOWN, "value": str(SAVING)}]
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        **_pod(image, claim, folder, {"nvidia.com/gpu": job.gpus}, command=command, env=env),
    }
    work = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "completions": job.nodes,
            "parallelism": job.nodes,
            "completionMode": "Indexed",
            "backoffLimit": RESTARTS * job.nodes,
            "activeDeadlineSeconds": int(3600 * job.hours),
            "template": {"spec": pod},
        },
    }
    return _yaml(service, work)


def kuberay(job: Job, *, image: str, claim: str, folder: str = "/work", ray: str = RAY) -> str:
    """A manifest for kubectl apply where KubeRay runs: a RayJob with a worker for each node, whose head starts the run
    and has no GPU.

    `ray` is the image's version of Ray; the rest is as for `kubernetes`.
    """
    # One command without a shell's operators: KubeRay puts it behind `ray job submit --`, for a shell to read.
    entry = ["env", "-C", folder, "OMP_NUM_THREADS=1", "proximo", *job.training, "--ranks.cluster", "ray"]
    head = {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
        "template": {"spec": _pod(image, claim, folder, {"cpu": "2", "memory": "8Gi"})},
    }
    workers = {
        "groupName": "nodes",
        **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), job.nodes),
        "rayStartParams": {},
        "template": {"spec": _pod(image, claim, folder, {"nvidia.com/gpu": job.gpus})},
    }
    work = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name},
        "spec": {
            "entrypoint": shlex.join(entry),
            "shutdownAfterJobFinishes": True,
            "backoffLimit": RESTARTS,
            "activeDeadlineSeconds": int(3600 * job.hours),
            "rayClusterSpec": {"rayVersion": ray, "headGroupSpec": head, "workerGroupSpecs": [workers]},
        },
    }
    return _yaml(work)


def _pod(image: str, claim: str, folder: str, limits: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A pod's spec: one container, which has `more` and sees the volume."""
    container = {
        "name": "proximo",
        "image": image,
        "workingDir": folder,
        **more,
        "resources": {"limits": limits},
        # NCCL needs more shared memory than the 64 MiB that a container gets.
        "volumeMounts": [{"name": "work", "mountPath": folder}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [
        {"name": "work", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    return {"terminationGracePeriodSeconds": NOTICE, "containers": [container], "volumes": volumes}


def _yaml(*objects: dict[str, Any]) -> str:
    """JSON is YAML, and needs no package to be written."""
    return "".join(f"---\n{json.dumps(each, indent=2)}\n" for each in objects)


def _clock(hours: float) -> str:
    minutes = max(1, round(60 * hours))
    return f"{minutes // 60:02}:{minutes % 60:02}:00"
