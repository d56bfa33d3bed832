"""Parts of a model that are not trained."""

import copy
from dataclasses import replace

import pytest
import torch

from proximo.algorithms import GRPO
from proximo.config import toml
from proximo.learner.learner import Learner
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy, frozen_names
from proximo.models import tiny_model
from proximo.models.adapters.lora import Lora
from proximo.rl.assemble import assemble
from proximo.rl.config import RunConfig, TrainingOptions
from proximo.runs.config_changes import differences
from tests.learner.test_values import groups


def small():
    return tiny_model(hidden=16, layers=2, heads=2, kv_heads=1, intermediate=16)


def test_what_is_frozen_stays_and_the_rest_moves():
    model = small()
    before = copy.deepcopy(model)
    options = LearnerOptions(groups=2, minibatches=1, learning_rate=1e-2, freeze=("embed", "layers.0."))
    learner = Learner(PlainPolicy(model), GRPO, options, temperature=1.0, seed=0)
    learner.update(assemble(groups(), [], learner, 8).batch, fresh=True)
    moved = {
        name
        for (name, new), old in zip(model.named_parameters(), before.parameters(), strict=True)
        if not torch.equal(new, old)
    }
    assert moved == {name for name, _ in model.named_parameters() if "embed" not in name and "layers.0." not in name}
    assert isinstance(learner.policy, PlainPolicy)
    held = {name.rpartition(".")[0] for name in learner.policy.tensors()["optimizer"]}
    assert held == moved


def test_names_are_matched_anywhere_with_wildcards_and_by_all_they_have():
    assert frozen_names(small(), ()) == set()
    assert frozen_names(small(), ("layers.?.mlp.up*",)) == {f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1)}
    # The head is the embedding here, and either name freezes it.
    model = small()
    options = replace(LearnerOptions(), freeze=("lm_head",))
    Learner(PlainPolicy(model), GRPO, options, temperature=1.0, seed=0)
    assert not model.model.embed_tokens.weight.requires_grad


def test_what_freezes_nothing_or_everything_is_refused():
    with pytest.raises(ValueError, match=r"training.freeze has 'embod', which no parameter's name contains"):
        frozen_names(small(), ("embed", "embod"))
    with pytest.raises(ValueError, match=r"training.freeze is \['weight'\], which freezes every parameter"):
        frozen_names(small(), ("weight",))
    with pytest.raises(ValueError, match=r"training.freeze is \['embed'\], but with adapter no weight"):
        RunConfig(adapter=Lora(), training=TrainingOptions(freeze=("embed",)))


def test_a_run_that_began_before_there_was_freeze_is_still_the_same_run():
    now = toml.dumps(RunConfig())
    before = "".join(line for line in now.splitlines(keepends=True) if not line.startswith("freeze"))
    assert before != now
    assert differences(before, now) == {}
    frozen = toml.dumps(RunConfig(training=TrainingOptions(freeze=("embed",))))
    assert list(differences(before, frozen)) == ["training.freeze"]
