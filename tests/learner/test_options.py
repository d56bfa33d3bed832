"""The learner's own options, and what it may know: nothing of tasks, rewards, samplers or the loop."""

import subprocess
import sys
from dataclasses import fields

import pytest

from proximo.learner.options import LearnerOptions
from proximo.rl.config import TrainingOptions

BELOW = {"algorithms", "losses", "models", "system", "types"}
"""Rooms that the learner stands on."""
IMPORT = """
import pkgutil, sys
from importlib import import_module
import proximo.learner
for module in pkgutil.iter_modules(proximo.learner.__path__, "proximo.learner."):
    import_module(module.name)
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("proximo.")}))
"""


@pytest.mark.slow("starts Python anew")
def test_the_learner_loads_no_task_reward_environment_or_sampler():
    """A fresh process imports every module of the learner, and nothing comes along but tensors, models and files."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"learner", *BELOW}


def test_the_table_training_has_the_learner_s_options_as_they_are():
    table = {each.name: (each.type, each.default) for each in fields(TrainingOptions)}
    own = {each.name: (each.type, each.default) for each in fields(LearnerOptions)}
    assert own.items() <= table.items()
    assert TrainingOptions().for_learner() == LearnerOptions()


def test_the_learner_gets_what_the_table_says():
    changed = {"groups": 6, "minibatches": 3, "epochs": 2, "adam_moments": "8bit", "freeze": ("embed",)}
    found = TrainingOptions(**changed, group_size=2, refill_rounds=1).for_learner()
    assert found == LearnerOptions(**changed)
    assert found.updates == TrainingOptions(**changed).updates == 6


@pytest.mark.parametrize(
    ("name", "value"), [("groups", 0), ("token_budget", 0), ("max_skipped", 0), ("skip_spikes", 1)]
)
def test_what_is_wrong_with_them_is_said_alike_by_both(name, value):
    messages = []
    for options in (LearnerOptions, TrainingOptions):
        with pytest.raises(ValueError, match=rf"^training\.{name} is {value}: ") as found:
            options(**{name: value})
        messages.append(str(found.value))
    assert messages[0] == messages[1]
