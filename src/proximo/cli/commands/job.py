"""`proximo job`: write the job file of a run on a cluster."""

from typing import Any

from proximo.cli.arguments import refuse, refusing, take, take_number, write_out
from proximo.cli.configs import base_config
from proximo.cli.run_folders import with_ranks

USAGE = """usage: proximo job slurm run.toml --run DIR [--nodes N] [--gpus N] [--hours X] [--out FILE]
                         [--cores N] [--partition NAME] [--account NAME]
       proximo job kubernetes run.toml --run DIR --image IMAGE --claim NAME [--folder DIR] [--nodes N] [--gpus N]
                         [--hours X] [--out FILE]
       proximo job kuberay run.toml --run DIR --image IMAGE --claim NAME [--folder DIR] [--ray VERSION] [--nodes N]
                         [--gpus N] [--hours X] [--out FILE]

Write a job file that trains a run on the GPUs of several nodes, with a process for each. The config is checked first.
A job that ends early resumes the run when it is started again. With Kubernetes it is an indexed Job, with one pod for
each node; with KubeRay a RayJob, with one worker for each node, on which Ray places the processes.

--run DIR         run folder, on a disk that all nodes see
--nodes N         nodes (default: 1)
--gpus N          GPUs of a node (default: 8)
--hours X         time limit (default: 24)
--out FILE        file to write (default: print it)
--cores N         cores of a node, which SLURM is asked for (default: 8 for each GPU)
--partition NAME  SLURM's partition
--account NAME    SLURM's account
--image IMAGE     container image with proximo and its dependencies
--claim NAME      PersistentVolumeClaim that all pods can write (ReadWriteMany), with the config and the run folder
--folder DIR      folder at which pods see it, from which paths are relative (default: /work)
--ray VERSION     version of Ray in the image (default: 2.50.0)

examples:
  proximo job slurm run.toml --run runs/mine --nodes 4 --out mine.sbatch       then: sbatch mine.sbatch
  proximo job kubernetes run.toml --run runs/mine --nodes 2 --image registry/proximo --claim data
"""
KINDS = {
    "slurm": ("partition", "account"),
    "kubernetes": ("image", "claim", "folder"),
    "kuberay": ("image", "claim", "folder", "ray"),
}
"""Flags of each kind of cluster, besides those of all."""
NEEDED = ("image", "claim")


def run(arguments: list[str]) -> int:
    """Exit status: 0 written, 2 refused."""
    from proximo.distributed.jobs import Job, kuberay, kubernetes, slurm

    kind = arguments.pop(0) if arguments else None
    if kind not in KINDS:
        refuse(f"job takes {', '.join(KINDS)} first: proximo job slurm run.toml --run DIR")
    out, folder = take(arguments, "--out"), take(arguments, "--run")
    if folder is None:
        refuse("--run is missing: a job that is started again finds its run by it")
    numbers = {
        "nodes": take_number(arguments, "--nodes", int),
        "gpus": take_number(arguments, "--gpus", int),
        "hours": take_number(arguments, "--hours", float),
    }
    flags = KINDS[kind]
    chosen: dict[str, Any] = {name: given for name in flags if (given := take(arguments, f"--{name}")) is not None}
    if kind == "slurm" and (cores := take_number(arguments, "--cores", int)) is not None:
        chosen["cores"] = cores
    if missing := [f"--{name}" for name in NEEDED if name in flags and name not in chosen]:
        refuse(f"{' and '.join(missing)} missing: proximo job --help says what they are")
    if len(arguments) != 1 or not arguments[0].endswith(".toml"):
        refuse(f"job takes one .toml file, not {' '.join(arguments) or 'none'}: proximo init writes one")
    with refusing():
        job = Job(arguments[0], folder, **{name: given for name, given in numbers.items() if given is not None})
        config = with_ranks(base_config([job.config]), job.nodes * job.gpus)  # refuses what cannot run so
        if kind != "kuberay" and config.ranks is not None and config.ranks.cluster == "ray":
            refuse(
                f'ranks.cluster is "ray", and a job of {kind} starts its processes itself: use kuberay, or leave it out'
            )
        text = {"slurm": slurm, "kubernetes": kubernetes, "kuberay": kuberay}[kind](job, **chosen)
    if out is None:
        print(text, end="")
        return 0
    write_out(out, text)
    start = f"sbatch {out}" if kind == "slurm" else f"kubectl apply -f {out}"
    print(f"written to {out}\nstart it     {start}")
    return 0
