"""An environment for each system, made when it is missing, and the worker that runs in it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
TORCH = "torch>=2.10,<2.14"
REQUIREMENTS = {
    "trl": (TORCH, "trl==1.16.0"),
    "verl": (TORCH, "verl==0.9.1", "transformers<5.11"),
}


def prepared(system: str) -> Path:
    """The Python of this system's environment, under .parity/; made anew when its requirements changed."""
    folder = ROOT / ".parity" / system
    ready = folder / ".ready"
    python = folder / "bin" / "python"
    wanted = "\n".join(REQUIREMENTS[system])
    if not ready.exists() or ready.read_text() != wanted:
        print(f"parity: installing {', '.join(REQUIREMENTS[system])} into {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[system]], check=True)
        ready.write_text(wanted)
    return python


def report_of(system: str) -> dict[str, Any]:
    """Report that the system's worker printed. It sees proximo's source, not an installed copy."""
    surroundings = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "lab"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(prepared(system)), "-W", "ignore", "-m", f"proximo_lab.parity.against_{system}"]
    done = subprocess.run(command, env=surroundings, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"proximo_lab.parity.against_{system} failed:\n{done.stderr}")
    # Whatever the systems themselves print comes before it.
    return json.loads(done.stdout.splitlines()[-1])
