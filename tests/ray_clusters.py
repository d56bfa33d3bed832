"""Cases that need a Ray cluster, in a process of a Python that has Ray."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT


def run_cases(module: str, folder: Path, seconds: float) -> dict[str, Any]:
    """What `python -m module FOLDER` wrote to result.json there; skips the test where there is no Ray."""
    python = os.environ.get("PROXIMO_RAY_PYTHON") or sys.executable
    if python == sys.executable and importlib.util.find_spec("ray") is None:
        pytest.skip("PROXIMO_RAY_PYTHON names no Python with Ray")
    places = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    # A cluster of a test sees a lost node after seconds, not minutes.
    places |= {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
    command = [python, "-m", module, str(folder)]
    done = subprocess.run(
        command, env={**os.environ, **places}, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert (folder / "result.json").exists(), done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())
