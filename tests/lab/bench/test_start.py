"""From the command to the first update: two processes, one with empty caches."""

import json
import os
import subprocess

import pytest

from proximo_lab.bench import starting
from proximo_lab.bench.own import OwnRow
from proximo_lab.bench.starting import PHASES, TOTAL, FirstStep
from proximo_lab.bench.tables import start
from proximo_lab.bench.tables.start import CACHES, Start
from tests.lab.bench.test_bench import alone

ROW = OwnRow("tiny", 2, 2, 8, "4")


@pytest.mark.slow("starts processes")
def test_a_process_tells_the_seconds_of_its_phases(tmp_path, capsys):
    Start(ROW)._save_model(tmp_path / "model", "cpu")
    given = [json.dumps({"shape": "tiny", "groups": 2, "siblings": 2, "prompt": 8, "lengths": "4"})]
    with pytest.raises(FirstStep):
        starting.main(["0", *given, str(tmp_path / "model"), str(tmp_path / "run"), "cpu"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(told) == [*PHASES, TOTAL]
    assert told["imports"] > 1e9  # the command was given at the epoch
    assert all(told[phase] > 0 for phase in PHASES)
    assert told[TOTAL] == pytest.approx(sum(told[phase] for phase in PHASES))
    step = json.loads((tmp_path / "run/timings.jsonl").read_text().splitlines()[0])
    assert told["update"] == step["assemble"] + step["update"]


@pytest.mark.slow("starts processes")
def test_the_second_process_finds_what_the_first_left(monkeypatch):
    seen = []

    def run(command, *, env, **_):
        seen.append((command, {name: env[name] for name in CACHES}))
        assert os.path.isfile(os.path.join(command[5], "model.safetensors"))
        seconds = {"imports": 1.0, TOTAL: 50.0 if len(seen) == 1 else 46.0}
        return subprocess.CompletedProcess(command, 0, stdout=f"noise\n{json.dumps(seconds)}\n")

    monkeypatch.setattr(start.subprocess, "run", run)
    cold, warm = Start(ROW, cold=90.0, warm=45.0).run(alone())
    (first, caches), (second, same) = seen
    assert caches == same
    assert first[6] != second[6]  # run folders
    assert (cold.name, warm.name) == ("tiny-2x2-p8-r4, cold", "tiny-2x2-p8-r4, warm")
    assert cold.figures == {"imports s": "1", "first update s": "50"}
    assert [row.verdicts[0].reached for row in (cold, warm)] == [True, False]


@pytest.mark.slow("starts processes")
def test_a_process_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(
        start.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 3, stdout="")
    )
    with pytest.raises(ValueError, match="process with cold caches ended with 3"):
        Start(ROW).run(alone())
