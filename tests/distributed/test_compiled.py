"""Layers in shards are compiled between the hooks that gather their weights, once for all of them."""

import pytest

from tests.run_processes import Script

COMPILED = """
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from proximo.distributed.rank_group import Crew
from proximo.distributed.mesh import Mesh
from proximo.distributed.policy import ShardedPolicy
from proximo.models import compiling, scoring
from proximo.models.packing.attention import decoder_layers
from proximo.rl.assemble import assemble
from tests.distributed.rank_cases import CASES, build, make_groups

counter, compile = CompileCounterWithBackend("aot_eager"), torch.compile
torch.compile = lambda function, **options: compile(function, backend=counter, **options)
torch.set_num_threads(1)
mesh = Mesh.alone()

def updated(fast, odd, checkpointed, hold=lambda policy: policy):
    compiling.compiles = scoring.reads_blocks = lambda _: fast
    learner = build(CASES["grpo"], hold)
    if odd:  # of two layers one computes something else, which a guard must see
        decoder_layers(learner.model)[1].self_attn.scaling *= 2.0
    compiling.checkpoint_layers(learner.model, checkpointed)
    for step in range(2):
        learner.start_step()
        learner.set_learning_rate(step)
        [update] = learner.updates(assemble(make_groups(5, seed=step), [], learner, 24).batch)
    return update.gradient_norm, dict(learner.policy.weights())

for odd, checkpointed in ((False, 0), (True, 0), (False, 2)):
    before = counter.frame_count
    norm, weights = updated(True, odd, checkpointed, lambda policy: ShardedPolicy(policy, Crew(mesh)))
    compiled = counter.frame_count - before
    plain_norm, plain = updated(False, odd, checkpointed)
    wanted = compiled > 0 if odd else compiled == (0 if before else 1)
    assert wanted, f"{compiled} compilations of two layers, odd {odd}, checkpointed {checkpointed}"
    assert abs(norm - plain_norm) < 1e-5 * plain_norm, (odd, checkpointed, norm, plain_norm)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, plain[name], rtol=1e-5, atol=1e-6)
mesh.close()
print("fine")
"""


@pytest.mark.slow("compiles layers")
def test_layers_in_shards_are_compiled_once_and_told_apart(tmp_path):
    script = Script(COMPILED, stdout=tmp_path / "stdout", stderr=tmp_path / "stderr")
    assert script.wait() == 0, (tmp_path / "stderr").read_text()[-2000:]
    assert (tmp_path / "stdout").read_text() == "fine\n"
