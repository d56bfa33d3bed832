"""A fresh environment with the project's wheel in it, and a folder outside the repository for what a user has."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".journeys"
EXTRAS = ("gguf", "lora", "view", "wandb", "trackio", "tensorboard", "mlflow")
NOTEBOOK = ("ipykernel", "nbclient")
"""Packages that run a notebook."""
INSTALLED = FOLDER / "installed.json"


def install() -> None:
    """Make the environment anew with the tested versions: the wheel alone first, to see what that brings, then what
    journeys need besides."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    print(f"journeys: installing the project into {FOLDER.relative_to(ROOT)}, which takes minutes", flush=True)
    subprocess.run([sys.executable, "-m", "venv", FOLDER / "venv"], check=True)
    python = FOLDER / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", FOLDER / "wheel", ROOT], check=True)
    (wheel,) = (FOLDER / "wheel").glob("*.whl")
    install = [*pip, "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, wheel], check=True)
    listed = subprocess.run([*pip, "list", "--format", "json"], check=True, capture_output=True, text=True)
    others = [each for each in json.loads(listed.stdout) if each["name"] not in ("pip", "setuptools", "proximo")]
    INSTALLED.write_text(json.dumps({"packages": len(others), "wheel_bytes": wheel.stat().st_size}))
    subprocess.run([*install, f"{wheel}[{','.join(EXTRAS)}]", *NOTEBOOK], check=True)


def surroundings(home: Path) -> dict[str, str]:
    """Variables of a user's shell: the environment first in its path, a home without any cache, and no network for the
    hub, so that a missing connection is not waited for."""
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    return kept | {
        "PATH": f"{FOLDER / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
