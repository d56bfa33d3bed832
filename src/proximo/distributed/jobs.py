"""Job files for clusters: the same command on every node, which torchrun turns into one group of ranks.

A job that is started again resumes the run, because it names the run folder. The files are templates in job_files/.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from proximo.distributed.launching import RESTARTS

PORT = 29500
"""Port by which the processes find each other, on the first node."""
NOTICE = 120
"""Seconds before its time limit at which SLURM asks the job to save and end, and that Kubernetes gives a pod."""
RAY = "2.50.0"
"""Version of Ray in an image, if nothing else is said."""
CORES = 8
"""Cores of a node for each of its GPUs, if nothing else is said."""
SAVING = 110
"""Seconds after which torchrun kills a process that it asked to end; its own 30 are less than a step may take."""
HOLE = re.compile(r"\{\{(\w+)\}\}")
"""Pattern of a hole, where a template takes a value."""


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
        """Command that each node runs. `meeting` is the first node's address, and `number` the job's own."""
        flags = [f"--nnodes={self.nodes}", f"--nproc-per-node={self.gpus}", f"--max-restarts={RESTARTS}"]
        # The static rendezvous does not survive a restart: addresses of dead processes stay in its store.
        flags += ["--rdzv-backend=c10d", f"--rdzv-id={number}", f"--rdzv-endpoint={meeting}:{PORT}"]
        # Without "--" torchrun would take --run for one of its own flags.
        return ["torchrun", *flags, "-m", "--", "proximo.cli", *self.training]

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
    command = [shlex.quote(each) if "$" not in each else f'"{each}"' for each in job.command("$first", "$SLURM_JOB_ID")]
    values = {"name": job.name, "nodes": job.nodes, "gpus": job.gpus, "cores": cores, "clock": _clock(job.hours)}
    return _filled("slurm.sh", values | {"partition": partition, "account": account, "command": " ".join(command)})


def kubernetes(job: Job, *, image: str, claim: str, folder: str = "/work") -> str:
    """A manifest for kubectl apply: an indexed job with a pod for each node, and a name for the first of them.

    `claim` is a volume that all pods can write (ReadWriteMany), in which config and run folder are.
    """
    command = job.command(f"{job.name}-0.{job.name}", job.name)
    return _manifest(
        "kubernetes.yaml", job, RESTARTS * job.nodes, image=image, claim=claim, folder=folder, command=command
    )


def kuberay(job: Job, *, image: str, claim: str, folder: str = "/work", ray: str = RAY) -> str:
    """A manifest for kubectl apply where KubeRay runs: a RayJob with a worker for each node, whose head starts the run
    and has no GPU.

    `ray` is the image's version of Ray; the rest is as for `kubernetes`.
    """
    # One command without a shell's operators: KubeRay puts it behind `ray job submit --`, for a shell to read.
    entry = shlex.join(["env", "-C", folder, "OMP_NUM_THREADS=1", "proximo", *job.training, "--ranks.cluster", "ray"])
    return _manifest("kuberay.yaml", job, RESTARTS, image=image, claim=claim, folder=folder, ray=ray, command=entry)


def _manifest(template: str, job: Job, restarts: int, **texts: str | list[str]) -> str:
    """A template of YAML with a job in it; JSON's texts and lists are YAML's."""
    values = {"nodes": job.nodes, "gpus": job.gpus, "restarts": restarts, "seconds": int(3600 * job.hours)}
    quoted = {name: json.dumps(text) for name, text in {"name": job.name, **texts}.items()}
    return _filled(template, values | quoted)


def _filled(template: str, values: Mapping[str, str | int | None]) -> str:
    """A template with values where it has {{name}}. A line is left out where its value is None, and where it begins
    with "#:", a remark for those who read the template."""
    known = {"notice": NOTICE, "saving": SAVING, **values}
    text = (Path(__file__).with_name("job_files") / template).read_text(encoding="utf-8")
    lines = [
        HOLE.sub(lambda hole: str(known[hole[1]]), line)
        for line in text.splitlines()
        if not line.startswith("#:") and all(known[name] is not None for name in HOLE.findall(line))
    ]
    return "\n".join([*lines, ""])


def _clock(hours: float) -> str:
    minutes = max(1, round(60 * hours))
    return f"{minutes // 60:02}:{minutes % 60:02}:00"
