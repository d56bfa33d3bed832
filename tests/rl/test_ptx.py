"""PPO-ptx: examples whose gradient is added to that of every update."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proximo.data.mixing import Ptx
from proximo.learner.ranks import Ranks
from proximo.models import tiny_model, tiny_tokenizer
from proximo.recipes.presets import ARITHMETIC
from proximo.rl.build import MixedIn
from proximo.rl.config import RunConfig
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.system.lines import JsonLines
from proximo.tasks.arithmetic import Arithmetic


def written(folder: Path, more: int = 0) -> Path:
    """Five sums whose answers are so much too large."""
    path = folder / "examples.jsonl"
    rows = ({"prompt": f"{number}+{number}=", "completion": f"{2 * number + more}"} for number in range(5))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mixed(folder: Path, model, **changes) -> MixedIn:
    options = Ptx(str(written(folder)), **changes)
    return MixedIn(options, model, tiny_tokenizer(), token_budget=1000, seed=3)


def test_the_gradient_is_the_coefficient_times_that_of_the_mean_nll(tmp_path):
    model = tiny_model(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, seed=1)
    found = mixed(tmp_path, model, coefficient=2.5, examples=5)
    before = [torch.ones_like(each) for each in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient.clone()
    loss = found(0, torch.Tensor.backward).floats()["ptx_loss"]
    model.set_attn_implementation("sdpa")
    tokenizer, total, tokens = tiny_tokenizer(), torch.zeros(()), 0
    for number in range(5):
        prompt = tokenizer.encode(f"{number}+{number}=")
        answer = [*tokenizer.encode(f"{2 * number}"), tokenizer.eos_token_id]
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
        total = total - logits.log_softmax(dim=-1)[range(len(answer)), answer].sum()
        tokens += len(answer)
    assert loss == pytest.approx(float(total.detach()) / tokens, rel=1e-5)
    wanted = torch.autograd.grad(total / tokens, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, 1 + 2.5 * gradient, rtol=1e-4, atol=1e-5)


def test_every_example_has_its_turn_before_one_comes_again(tmp_path):
    found = mixed(tmp_path, tiny_model(seed=1), examples=2)
    drawn = [item for version in range(5) for item in found.items(version)]
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == list(range(5))
    assert drawn[:5] != drawn[5:]
    assert mixed(tmp_path, tiny_model(seed=1), examples=2).items(3) == found.items(3)


def dead_run(folder: Path, ptx: Ptx | None) -> RunConfig:
    """Groups of one verdict only: without examples nothing is learned."""
    small = replace(ARITHMETIC.training, groups=1, group_size=2, minibatches=1, learning_rate=1e-3, warmup_steps=0)
    return replace(
        ARITHMETIC,
        task=Arithmetic(operations=("+",), digits=3, held_out=10),
        device="cpu",
        steps=3,
        training=small,
        evaluation=replace(ARITHMETIC.evaluation, problems=0),
        algorithm=replace(ARITHMETIC.algorithm, kl=None),
        ptx=ptx,
    )


def test_a_run_learns_the_examples_even_where_every_group_is_dead(tmp_path):
    config = dead_run(tmp_path, Ptx(str(written(tmp_path, more=1)), examples=5))
    train(Run(config, tmp_path / "run", ProgressLines()))
    rows = [row for row in JsonLines(tmp_path / "run/metrics.jsonl") if "ptx_loss" in row]
    assert [row["dead_groups"] for row in rows] == [1.0] * 3
    assert rows[-1]["ptx_loss"] < 0.8 * rows[0]["ptx_loss"]


def test_what_cannot_be_mixed_in_is_refused(tmp_path):
    good = Ptx("examples.jsonl")
    for field, wrong in (("coefficient", 0.0), ("examples", 0), ("max_tokens", 1)):
        with pytest.raises(ValueError, match="leave ptx out for no term"):
            replace(good, **{field: wrong})
    with pytest.raises(ValueError, match="mixed in by one process"):
        replace(dead_run(tmp_path, Ptx("examples.jsonl")), ranks=Ranks(2))
    with pytest.raises(ValueError, match="max_tokens"):
        mixed(tmp_path, tiny_model(seed=1), max_tokens=3)
