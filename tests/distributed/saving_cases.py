"""A policy in shards, saved and read by groups of processes.

`python -m tests.distributed.saving_cases CASE FROM TO` makes one update, or reads the checkpoint FROM if that is not
"-", and writes a checkpoint to TO; then it makes a second update, and writes TO/next. With `elsewhere` behind them,
engines sample, so that rank 0 alone has a copy.
"""

import json
import sys
from pathlib import Path

import torch

from proximo.distributed.mesh import Mesh
from proximo.distributed.policy import ShardedPolicy
from proximo.distributed.rank_group import Crew
from proximo.learner.learner import Learner
from proximo.learner.named_tensors import STATE
from proximo.models.sampled import logprobs_of
from proximo.rl.assemble import assemble
from tests.distributed.rank_cases import CASES, build, make_groups


def advanced(learner: Learner, step: int) -> Learner:
    """After one more update."""
    learner.start_step()
    learner.set_learning_rate(step)
    for _ in learner.updates(assemble(make_groups(2, seed=step), [], learner, 24).batch):
        pass
    return learner


def save(learner: Learner, folder: Path) -> None:
    (folder / STATE).mkdir(parents=True)
    learner.policy.save(folder)
    learner.policy.write(folder / STATE)
    (folder / "state.json").write_text(json.dumps(learner.policy.state()))


def load(learner: Learner, folder: Path) -> Learner:
    learner.policy.load(folder, json.loads((folder / "state.json").read_text()))
    return learner


def main(name: str, source: str, target: Path, *, elsewhere: bool) -> None:
    torch.set_num_threads(1)
    mesh = Mesh.join(device="cpu", timeout=60.0)
    crew = Crew(mesh)
    learner = build(CASES[name], lambda policy: ShardedPolicy(policy, crew, copy="host" if elsewhere else "every rank"))
    policy = learner.policy
    assert isinstance(policy, ShardedPolicy)
    assert (policy.copy.kept is None) == (elsewhere and mesh.rank > 0)
    if mesh.rank:
        policy.follow(learner)
    else:
        save(advanced(learner, 0) if source == "-" else load(learner, Path(source)), target)
        save(advanced(learner, 1), target / "next")
        rows = [(5, 6, 7), (8,)], torch.tensor([[9, 10, 11], [12, 0, 0]]), torch.tensor([3, 1])
        with torch.no_grad():
            whole = logprobs_of(policy.copy.model, *rows)
        torch.testing.assert_close(policy.logprobs(*rows), whole, rtol=0, atol=1e-6)
        crew.dismiss()
    mesh.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), elsewhere="elsewhere" in sys.argv)
