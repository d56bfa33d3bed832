"""Fifty kills of any process of a run that samples ahead on ranks and engines; `make faults` makes a few of them."""

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT

CODE = """
import json, sys
from pathlib import Path
from proximo_lab.faults.__main__ import prepare
prepare()
from proximo_lab.faults import flight
from proximo_lab.faults.processes import adopt_orphans, orphans
adopt_orphans()
found = flight.run(Path(sys.argv[1]), kills=int(sys.argv[2]))
print(json.dumps(found.to_dict() | {"left": orphans()}))
"""
KILLS, SECONDS = 50, 7200


@pytest.mark.scale
def test_no_prompt_is_lost_or_repeated_whoever_is_killed(tmp_path):
    command = [sys.executable, "-c", CODE, str(tmp_path / "flight"), str(KILLS)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    (tmp_path / "flight").mkdir()
    with (tmp_path / "printed").open("w") as printed:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=printed,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
        )
    text = (tmp_path / "printed").read_text()
    assert done.returncode == 0, text[-2000:]
    found = json.loads(text.splitlines()[-1])
    assert not [detail for kind in found["kinds"].values() for detail in kind["details"]]
    figures = found["figures"]
    assert (figures["kills"], figures["lost_or_repeated"], found["left"]) == (KILLS, 0, [])
    assert set(figures["struck"]) == {"learner", "rank", "engine", "driver"}
    assert figures["tokens_continued"] > 0
