"""Small runs to disturb, and the comparison of what two of them have left."""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from proximo.algorithms import DAPO, GRPO, GSPO, PPO, SAPO, Algorithm
from proximo.config import toml
from proximo.models.values import OwnLayers
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions, ValueOptions
from proximo.runs.checkpoints import CHECKPOINTS, saved, step_of
from proximo.runs.ledger import check_ledger
from proximo.runs.options import CheckpointOptions
from proximo.samplers.sampler import SamplingOptions
from proximo.tasks import File
from proximo.tasks.arithmetic import Arithmetic
from proximo_lab.faults.processes import Child, Ended, command

ROWS = 13
"""Rows of the file that one of the runs reads: few, so that it goes through it several times."""


def small(algorithm: Algorithm, **changes: Any) -> RunConfig:
    config = RunConfig(
        algorithm=algorithm,
        task=Arithmetic(operations=("+",), digits=2, terms=2, held_out=8),
        device="cpu",
        sampling=SamplingOptions(max_tokens=5),
        training=TrainingOptions(groups=3, group_size=4, minibatches=1, learning_rate=1e-4, warmup_steps=2),
        evaluation=EvaluationOptions(problems=4, every=3),
        checkpoints=CheckpointOptions(every=1, keep=2),
        steps=7,
        seed=11,
    )
    return replace(config, **changes)


def rows_file(folder: Path) -> Path:
    """Sums of two numbers, in the format of the shipped model."""
    path = folder / "sums.jsonl"
    sums = [(7 * number % 41 + 3, 11 * number % 37 + 2) for number in range(ROWS)]
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in sums))
    return path


def five(folder: Path) -> dict[str, RunConfig]:
    """Configs, one for each algorithm; what each adds is something that a resume can lose."""
    two = replace(small(GRPO).training, minibatches=2, epochs=2)
    return {
        "ppo": small(PPO, value=ValueOptions(OwnLayers(1), pretrain_steps=1), checkpoints=CheckpointOptions(every=2)),
        "grpo": small(GRPO, training=replace(small(GRPO).training, reset_reference_every=3)),
        "dapo": small(DAPO, checkpoints=CheckpointOptions(every=2, keep=1)),
        "gspo": small(GSPO, task=File(str(rows_file(folder)), held_out=0.3), checkpoints=CheckpointOptions(every=3)),
        "sapo": small(SAPO, training=two, evaluation=EvaluationOptions(problems=4, every=2, samples=2)),
    }


class RunSet:
    """A config in a file, and runs of it beside that file."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.config = folder, config
        self.file = folder / "run.toml"
        self.file.write_text(toml.dumps(config))
        self.seconds = self.start_up = self.step = 0.0
        """Seconds of the run that nobody disturbed: all of it, until its first step has ended, and one step."""

    def arguments(self, name: str, *more: str) -> list[str]:
        return ["train", str(self.file), "--run", str(self.folder / name), *more]

    def start(self, name: str, *more: str) -> Child:
        return Child(command(*self.arguments(name, *more)), self.folder / f"{name}.txt")

    def finish(self, name: str, *more: str) -> Ended:
        return self.start(name, *more).wait()

    def golden(self) -> "RunSet":
        """The run that nobody disturbs."""
        return self.timed("golden")

    def timed(self, name: str) -> "RunSet":
        child = self.start(name)
        child.wait_for(lambda: "step 1/" in child.printed)
        self.start_up = time.monotonic() - child.began
        ended = child.wait()
        if ended.code != 0:
            raise AssertionError(f"an undisturbed run failed, {ended.code}: {ended.printed[-500:]}")
        self.seconds = ended.seconds
        self.step = (self.seconds - self.start_up) / self.config.steps
        return self

    def moment(self, share: float) -> float:
        """Seconds after the start: the first quarter is start-up with the first step, the rest the other steps."""
        if share < 0.25:
            return 4 * share * self.start_up
        return self.start_up + (share - 0.25) / 0.75 * (self.seconds - self.start_up)

    def difference(self, name: str) -> str | None:
        """The first thing in which a finished run is not the undisturbed one."""
        try:
            return difference(left_by(self.folder / name), left_by(self.folder / "golden"))
        except (OSError, ValueError, IndexError, KeyError) as error:
            return f"it cannot be read: {type(error).__name__} {error}"

    def interrupted(self, name: str, step: int) -> Path:
        """A copy of the undisturbed run as it would be, had it died after this step's checkpoint: rows go on behind."""
        folder = self.folder / name
        others = [path.name for path in saved(self.folder / "golden" / CHECKPOINTS) if step_of(path) > step]
        ignore = shutil.ignore_patterns("result.json", *others)
        shutil.copytree(self.folder / "golden", folder, ignore=ignore, symlinks=True)
        return folder


def left_by(folder: Path) -> Mapping[str, object]:
    """Contents that must be the same in both runs."""
    last = saved(folder / CHECKPOINTS)[0]
    files = [folder / "metrics.jsonl", folder / "ledger.jsonl", *sorted(folder.glob("rollouts/*.parquet"))]
    files += [*sorted(last.glob("*.safetensors")), *sorted(last.glob("state/**/*.safetensors"))]
    contents: dict[str, object] = {str(file.relative_to(folder)): _content(file) for file in files}
    for file in (last / "state" / "run_state.json", folder / "result.json"):
        content = json.loads(file.read_text())
        del content["seconds"]
        contents[file.name] = content
    contents["config.toml"] = (folder / "config.toml").read_text()
    return contents


def _content(file: Path) -> object:
    """A file's bytes; the header of tensors as what it says, because safetensors writes metadata in any order."""
    data = file.read_bytes()
    if file.suffix != ".safetensors":
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def difference(left: Mapping[str, object], wanted: Mapping[str, object]) -> str | None:
    if left.keys() != wanted.keys():
        return f"other files: {', '.join(sorted(left.keys() ^ wanted.keys()))}"
    return next((f"{name} differs" for name in wanted if left[name] != wanted[name]), None)


def ledger_faults(folder: Path) -> tuple[int, list[str]]:
    """Number of prompts that were drawn, and what is wrong with the ledger."""
    last = saved(folder / CHECKPOINTS)[0]
    proof = check_ledger(folder, json.loads((last / "state" / "run_state.json").read_text())["next_problem"])
    return proof.drawn, list(proof.wrong)
