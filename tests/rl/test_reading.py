"""Files of the package that a training run reads."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import proximo
from proximo.config import toml
from proximo.recipes.presets import ARITHMETIC

TRAIN = """
import sys
from pathlib import Path
from proximo.config import toml
from proximo.rl.config import RunConfig
from proximo.rl.run import Run
from proximo.rl.train import train

class Silent:
    def __getattr__(self, name):
        return lambda *_, **__: None

train(Run(toml.load("run.toml", RunConfig), Path("run"), Silent()))
files = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name.split(".")[0] == "proximo"}
print(*sorted(files), sep="\\n")
"""


@pytest.mark.slow("trains a run in a new process")
def test_the_demo_reads_less_than_half_of_the_files(tmp_path: Path):
    training, evaluation = replace(ARITHMETIC.training, groups=4), replace(ARITHMETIC.evaluation, problems=4)
    short = replace(ARITHMETIC, steps=1, training=training, evaluation=evaluation)
    (tmp_path / "run.toml").write_text(toml.dumps(short))
    done = subprocess.run([sys.executable, "-c", TRAIN], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    package = Path(proximo.__file__).parent
    read = [Path(line) for line in done.stdout.splitlines() if line.endswith(".py")]
    assert all(path.is_relative_to(package) for path in read)
    assert 2 * len(read) < len([*package.rglob("*.py")])
    rooms = {path.relative_to(package).parts[0] for path in read}
    assert not rooms & {"cli", "api", "insight", "serving", "planning", "recipes", "distributed"}
