"""Job files: what a cluster reads, and the command that torchrun gets."""

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from proximo.cli import main
from proximo.distributed.jobs import Job, kuberay, kubernetes, slurm

JOB = Job("run with space.toml", "/data/runs/My run_7", nodes=4, gpus=8, hours=1.5)


def torchruns(command: list[str]):
    """As torchrun itself reads it."""
    assert command[0] == "torchrun"
    found = get_args_parser().parse_args(command[1:])
    return found, [found.training_script, *found.training_script_args]


def test_torchrun_understands_the_command():
    found, ours = torchruns(JOB.command("node-1", "7"))
    assert (found.nnodes, found.nproc_per_node, found.max_restarts) == ("4", "8", 3)
    assert (found.rdzv_backend, found.rdzv_id, found.rdzv_endpoint) == ("c10d", "7", "node-1:29500")
    assert found.module
    assert ours == ["proximo.cli", "train", JOB.config, "--ranks", "32", "--run", JOB.run]


def test_a_script_for_slurm_is_bash_and_runs_that_command(tmp_path):
    """In a shell with stand-ins for SLURM's commands."""
    script = tmp_path / "job.sbatch"
    script.write_text(slurm(JOB, partition="gpu"))
    (tmp_path / "scontrol").write_text('#!/bin/bash\n[ "$*" = "show hostnames n[1-4]" ] && seq -f "n%.0f" 100000\n')
    (tmp_path / "srun").write_text('#!/bin/bash\nfor each in "$@"; do echo "$each"; done\n')
    for each in ("scontrol", "srun"):
        (tmp_path / each).chmod(0o755)
    found = subprocess.run(
        ["/bin/bash", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_ID": "42"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == ["--cpus-per-task=64", *JOB.command("n1", "42")]
    asked = [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=01:30:00", "--requeue"} <= set(asked)
    assert {"--cpus-per-task=64", "--mem=0", "--exclusive"} <= set(asked)  # whole nodes, not one core of each
    assert "--partition=gpu" in asked
    assert not any(each.startswith("--account") for each in asked)
    assert "--job-name=proximo-my-run-7" in asked
    assert "--signal=TERM@120" in asked
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110" in script.read_text()  # torchrun's own 30 s are less than a step


def test_a_manifest_for_kubernetes_is_whole():
    service, job = yaml.safe_load_all(kubernetes(JOB, image="registry/proximo", claim="data", folder="/data"))
    name = JOB.name
    assert (service["kind"], service["metadata"]["name"], service["spec"]["clusterIP"]) == ("Service", name, "None")
    assert service["spec"]["selector"] == {"job-name": name}
    spec = job["spec"]
    assert (job["kind"], spec["completionMode"]) == ("Job", "Indexed")
    assert (spec["completions"], spec["parallelism"], spec["activeDeadlineSeconds"]) == (4, 4, 5400)
    pod = spec["template"]["spec"]
    # A pod of an indexed job is called after the job and its number, in the service's domain.
    assert pod["subdomain"] == name
    [container] = pod["containers"]
    found, _ = torchruns(container["command"])
    assert found.rdzv_endpoint == f"{name}-0.{name}:29500"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "110"} in container["env"]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "data"


def test_a_manifest_for_kuberay_is_whole():
    """By the names that KubeRay's v1 has for its fields."""
    [job] = yaml.safe_load_all(kuberay(JOB, image="registry/proximo", claim="data", folder="/my data", ray="2.55.0"))
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("ray.io/v1", "RayJob", JOB.name)
    spec = job["spec"]
    assert (spec["shutdownAfterJobFinishes"], spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (True, 3, 5400)
    # As KubeRay has a shell submit it, with a stand-in for Ray, which quotes what it is given and has a shell run it.
    entry = ["env", "-C", "/my data", "OMP_NUM_THREADS=1", "proximo", "train", JOB.config, "--ranks", "32", "--run"]
    submit = f"python3 -c 'import subprocess, sys; print(subprocess.list2cmdline(sys.argv[1:]))' {spec['entrypoint']} ;"
    submitted = subprocess.run(["/bin/bash", "-c", submit], capture_output=True, text=True, check=True).stdout
    assert shlex.split(submitted) == [*entry, JOB.run, "--ranks.cluster", "ray"]
    cluster = spec["rayClusterSpec"]
    assert cluster["rayVersion"] == "2.55.0"
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"  # ranks are placed on workers
    assert {workers[name] for name in ("replicas", "minReplicas", "maxReplicas")} == {4}
    for each, gpus in ((head, None), (workers, 8)):
        pod = each["template"]["spec"]
        [container] = pod["containers"]
        assert "command" not in container  # KubeRay's own
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["workingDir"] == "/my data"


@pytest.mark.parametrize(
    ("folder", "name"), [("runs/A__b", "proximo-a-b"), ("x" * 80, "proximo-" + "x" * 42), ("r/-1.", "proximo-1")]
)
def test_names_that_clusters_accept(folder, name):
    assert Job("run.toml", folder).name == name


def test_it_is_written_to_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("steps = 3\n[ranks]\nshard = 8\n")
    assert main(["job", "slurm", "run.toml", "--run", "runs/x", "--nodes", "2", "--out", "x.sbatch"]) == 0
    assert capsys.readouterr().out == "written to x.sbatch\nstart it     sbatch x.sbatch\n"
    assert "#SBATCH --cpus-per-task=64\n" in Path("x.sbatch").read_text()
    last = Path("x.sbatch").read_text().splitlines()[-1]
    assert shlex.split(last)[-5:] == ["run.toml", "--ranks", "16", "--run", "runs/x"]
    assert main(["job", "slurm", "run.toml", "--run", "runs/x", "--cores", "96"]) == 0
    assert "srun --cpus-per-task=96 torchrun" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["slurm", "run.toml"], "--run is missing"),
        (["pbs", "run.toml", "--run", "x"], "job takes slurm, kubernetes, kuberay first"),
        (["slurm", "--run", "x"], "one .toml file, not none"),
        (["slurm", "run.toml", "--run", "x", "--nodes", "0"], "--nodes 0: give a number above 0"),
        (
            ["slurm", "run.toml", "--run", "x", "--hours", "0.001"],
            "--hours 0.001: the run is asked to end 120 s before",
        ),
        (["slurm", "run.toml", "--run", "x", "--gpus", "3"], "ranks.shard is 8"),
        (["slurm", "run.toml", "--run", "x", "--cores", "0"], "--cores 0: give at least 1"),
        (["kubernetes", "run.toml", "--run", "x", "--image", "y", "--claim", "z", "--cores", "4"], "one .toml file"),
        (["slurm", "run.toml", "--run", "x", "--image", "y"], "one .toml file, not run.toml --image y"),
        (["kubernetes", "run.toml", "--run", "x"], "--image and --claim missing"),
        (["kuberay", "run.toml", "--run", "x", "--image", "y"], "--claim missing"),
        (["slurm", "ray.toml", "--run", "x"], 'ranks.cluster is "ray", and a job of slurm starts its processes itself'),
        (["slurm", "8bit.toml", "--run", "x"], "training.adam_moments is '8bit': with ranks they are float32"),
        (["slurm", "none.toml", "--run", "x"], "none.toml"),
    ],
)
def test_what_cannot_run_is_refused(flags, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[ranks]\nshard = 8\n")
    Path("ray.toml").write_text('[ranks]\ncluster = "ray"\n')
    Path("8bit.toml").write_text('[training]\nadam_moments = "8bit"\n')
    with pytest.raises(SystemExit) as stopped:
        main(["job", *flags])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
