"""`start`: seconds from the command to the first update, with an empty and with a filled compile cache."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from proximo_lab.bench.memory import release
from proximo_lab.bench.own import OwnRow
from proximo_lab.bench.report import Row, Verdict, short
from proximo_lab.bench.session import Session
from proximo_lab.bench.tables.comparing import described

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
"""Variables of folders in which compilers, and Proximo's measurement of the machine, keep what a process leaves."""
SOURCE = Path(__file__).parents[3]
FIRST_UPDATE = "first update"


@dataclass(frozen=True)
class Start:
    """Two processes one after the other: the first finds empty caches, the second what the first left."""

    row: OwnRow
    cold: float | None = None
    """Maximum seconds with empty caches."""
    warm: float | None = None
    """Maximum seconds with filled ones."""

    @property
    def name(self) -> str:
        return self.row.workload().name

    def run(self, session: Session) -> list[Row]:
        with tempfile.TemporaryDirectory(prefix="proximo-start-") as name:
            folder = Path(name)
            self._save_model(folder / "model", session.device)
            taken = {}
            for caches in ("cold", "warm"):
                session.say(f"  {caches} caches")
                taken[caches] = self._started(folder, caches, session.device)
        bounds = (self.cold, self.warm)
        return [
            self._row(caches, seconds, bound) for (caches, seconds), bound in zip(taken.items(), bounds, strict=True)
        ]

    def _row(self, caches: str, seconds: dict[str, float], bound: float | None) -> Row:
        verdict = None if bound is None else Verdict("seconds", seconds[FIRST_UPDATE], bound, at_least=False)
        return Row(
            f"{self.name}, {caches}",
            figures={f"{phase} s": short(taken) for phase, taken in seconds.items()},
            verdicts=() if verdict is None else (verdict,),
            details={"workload": described(self.row.workload()), "seconds": seconds},
        )

    def _save_model(self, folder: Path, device: str) -> None:
        disable_progress_bar()
        shape = self.row.workload().shape
        dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
        shape.model(attention="sdpa", dtype=dtype, device=device).save_pretrained(folder)
        shape.tokenizer(ends=True).save_pretrained(folder)
        release(device)

    def _started(self, folder: Path, caches: str, device: str) -> dict[str, float]:
        """Seconds of the phases of a process."""
        path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        folders = {variable: str(folder / "caches" / variable.lower()) for variable in CACHES}
        given = [json.dumps(asdict(self.row)), str(folder / "model"), str(folder / caches), device]
        process = subprocess.run(
            [sys.executable, "-m", "proximo_lab.bench.starting", repr(time.time()), *given],
            env={**os.environ, **folders, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if process.returncode:
            raise ValueError(
                f"table start: the process with {caches} caches ended with {process.returncode}, see above"
            )
        return json.loads(process.stdout.splitlines()[-1])


CPU = (
    Start(OwnRow("tiny", 2, 8, 64, "32")),
    Start(OwnRow("SmolLM2-135M", 2, 8, 64, "32")),
)
GPU = (
    Start(OwnRow("Qwen3-0.6B"), cold=90.0, warm=45.0),
    Start(OwnRow("Llama-1B", prompt=200, lengths="600")),
)
