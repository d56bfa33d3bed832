"""Supervised fine-tuning: the loss against transformers' own, and a run from file to checkpoint."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import PreTrainedModel

from proximo.config import toml
from proximo.data import DataFile, Mistakes
from proximo.models import tiny_model, tiny_tokenizer
from proximo.models.packing.attention import attention
from proximo.models.shipped import resolve
from proximo.rewards import FormatReward
from proximo.supervised import sft as module
from proximo.supervised.encoding import Encoded, Limit, encode
from proximo.supervised.fitting import FitOptions
from proximo.supervised.sft import References, SftConfig, Supervised, reference_examples, sft
from proximo.tasks import Arithmetic, File
from tests.models.test_scoring import exact
from tests.rows import metrics_of, write_rows
from tests.supervised.test_encoding import chatml

TINY = tiny_tokenizer()
RAGGED = [
    Encoded("x:1", (7, 8, 9), ((3, 4, 5, 6, 1),)),
    Encoded("x:2", (9,), ((6, 1),)),
    Encoded("x:3", (5, 5, 5, 5, 5, 5), ((2, 1),)),
    Encoded("x:4", (10, 11), ((12, 13, 14, 15, 16, 17, 1),)),
]
TOKENS = 5 + 2 + 2 + 7


def small(seed: int = 0) -> PreTrainedModel:
    return tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=seed)


def exact_model() -> PreTrainedModel:
    """In float64 throughout."""
    return exact(small().to(dtype=torch.float64))  # pyright: ignore[reportCallIssue]


def quiet(line: str) -> None:
    """Nobody listens."""


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# The loss.


def padded_loss(model: PreTrainedModel) -> torch.Tensor:
    """transformers' own forward pass and torch's own cross-entropy; the prompt's labels do not count."""
    rows = [torch.tensor([*item.prompt, *item.completions[0]]) for item in RAGGED]
    labels = [torch.tensor([-100] * len(item.prompt) + [*item.completions[0]]) for item in RAGGED]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    with attention(model, "sdpa"):
        logits = model(input_ids=tokens, attention_mask=mask).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def test_the_loss_is_a_token_mean_whatever_the_budget():
    model = exact_model()
    expected = padded_loss(model)
    expected.backward()
    wanted = gradients(model)
    for budget, parts in ((1000, 1), (20, 2), (1, 4)):
        model.zero_grad()
        stage = Supervised(model, RAGGED, [], token_budget=budget)
        losses = list(stage.losses([2, 0, 3, 1]))
        assert len(losses) == parts
        total = torch.stack([loss for loss, _ in losses]).sum()
        total.backward()
        assert_close(total, expected, rtol=0, atol=1e-12)
        assert sum(float(sums["tokens"]) for _, sums in losses) == TOKENS
        found = gradients(model)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert_close(found[name], gradient, rtol=0, atol=1e-12)


def test_held_out_loss_is_the_same_mean():
    model = exact_model()
    with torch.no_grad():
        expected = float(padded_loss(model))
    for budget in (1000, 1):
        for dynamic in (False, True):
            metrics = Supervised(model, [], RAGGED, token_budget=budget, dynamic=dynamic).held_out()
            assert metrics["loss"] == pytest.approx(expected, abs=1e-12)
            assert metrics["perplexity"] == pytest.approx(torch.tensor(expected).exp().item())
    assert Supervised(model, RAGGED, [], token_budget=1).held_out() == {}


def test_dynamic_fine_tuning_weighs_each_token_by_its_probability():
    model = exact_model()
    [(plain, _)] = Supervised(model, RAGGED[1:2], [], token_budget=99).losses([0])
    [(dynamic, _)] = Supervised(model, RAGGED[1:2], [], token_budget=99, dynamic=True).losses([0])
    with attention(model, "sdpa"), torch.no_grad():
        logprobs = model(input_ids=torch.tensor([[9, 6]])).logits.log_softmax(-1)
    first, end = logprobs[0, 0, 6], logprobs[0, 1, 1]
    assert_close(plain, -(first + end) / 2, rtol=0, atol=1e-12)
    assert_close(dynamic, -(first.exp() * first + end.exp() * end) / 2, rtol=0, atol=1e-12)


# Runs.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    small().save_pretrained(path)
    TINY.save_pretrained(path)
    return str(path)


SUMS = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a in range(10) for b in range(10)]
FIT = FitOptions(epochs=3.0, batch=16, learning_rate=5e-3, warmup_steps=2)


@pytest.mark.slow("trains a model")
def test_a_run_from_a_file(tmp_path: Path, folder: str):
    config = SftConfig(DataFile(write_rows(tmp_path / "x.jsonl", SUMS), held_out=0.2), model=folder, fit=FIT)
    said = []
    result = sft(config, tmp_path / "run", said.append)
    assert result.best["loss"] < result.before["loss"] - 1
    assert (result.steps, result.best_step, result.skipped, result.stopped_early) == (15, 15, 0, False)
    assert toml.loads((tmp_path / "run" / "config.toml").read_text(), SftConfig) == config
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "result.json",
        "run.json",
        "timings.jsonl",
    }
    assert sum("held_out/loss" in row for row in metrics_of(tmp_path / "run")) == 4
    [counts] = re.findall(r"(\d+) to train on, (\d+) held out", "\n".join(said))
    assert sum(map(int, counts)) == len(SUMS)
    # The next stage reads the run's folder.
    following = sft(replace(config, model=str(tmp_path / "run")), tmp_path / "next", quiet)
    assert following.before == pytest.approx(result.best)


def test_examples_of_a_task():
    examples = reference_examples(Arithmetic(digits=1, held_out=10), "train", 40, 0)
    assert len(examples) == 40
    assert eval(str(examples[3].prompt).removesuffix("=")) == int(examples[3].completion)


def test_a_finite_task_gives_all_it_has(tmp_path: Path):
    rows = [{"prompt": row["prompt"], "answer": row["completion"]} for row in SUMS]
    path = write_rows(tmp_path / "x.jsonl", rows)
    examples = reference_examples(File(path), "train", 1000, 0)
    held_out = reference_examples(File(path), "held_out", None, 0)
    assert len(examples) + len(held_out) == 100
    assert len({example.prompt for example in examples + held_out}) == 100
    with pytest.raises(ValueError, match="has no reference answer for x-.*, give completions in a file"):
        reference_examples(File(path, reward=FormatReward("a+")), "train", 1000, 0)


def test_a_conversation_is_learned_turn_by_turn(tmp_path: Path, folder: str):
    turns = [("user", "1+1?"), ("assistant", "2"), ("user", "and 1?"), ("assistant", "3")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}] * 8
    config = SftConfig(DataFile(write_rows(tmp_path / "x.jsonl", rows), held_out=0.0), model=folder, fit=FIT)
    result = sft(config, tmp_path / "run", quiet)
    first, *_, last = metrics_of(tmp_path / "run")
    assert first["tokens"] == 16 * 2
    assert last["loss"] < first["loss"]
    assert result.before == {}


def test_a_conversation_in_one_row_has_the_loss_and_gradient_of_its_replies_apart():
    """Turns between replies are read and not learned, so rows of one reply each give the same."""
    one = Encoded(
        "x", (5, 6), ((7, 1, 20, 21, 22, 8, 9, 1),), trained=(True, True, False, False, False, True, True, True)
    )
    apart = [Encoded("x", (5, 6), ((7, 1),)), Encoded("x", (5, 6, 7, 1, 20, 21, 22), ((8, 9, 1),))]
    losses, grads, held_out = [], [], []
    for rows in ([one, RAGGED[0]], [*apart, RAGGED[0]]):
        model = exact_model()
        stage = Supervised(model, rows, rows, token_budget=4096)
        [(loss, metrics)] = stage.losses(range(len(rows)))
        loss.backward()
        losses.append((loss.item(), metrics["tokens"]))
        grads.append(gradients(model))
        held_out.append(stage.held_out()["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][1] == 5 + len(RAGGED[0].completions[0])
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-9)
    for name, gradient in grads[0].items():
        torch.testing.assert_close(gradient, grads[1][name], rtol=1e-7, atol=1e-12)


# What is refused, before any weights are read.


def test_bad_data_is_refused_before_the_model_loads(tmp_path: Path, folder: str, monkeypatch):
    monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    path = write_rows(tmp_path / "x.jsonl", [*SUMS, {"prompt": "1+1="}, {"prompt": "1+1=", "completion": ""}])
    with pytest.raises(ValueError, match=r"x.jsonl:101: no column 'completion'.*\n.*x.jsonl:102: completion is empty$"):
        sft(SftConfig(DataFile(path), model=folder), tmp_path / "run", quiet)
    with pytest.raises(ValueError, match="data.path is 'none.jsonl': there is no such file"):
        sft(SftConfig(DataFile("none.jsonl"), model=folder), tmp_path / "run", quiet)
    long = References(Arithmetic(digits=9, held_out=10), examples=3, max_tokens=10)
    with pytest.raises(ValueError, match="with references that cannot be used:\narithmetic-"):
        sft(SftConfig(long, model=folder), tmp_path / "run", quiet)
    assert not (tmp_path / "run").exists()


def test_values_out_of_range():
    with pytest.raises(ValueError, match="data.examples is 0"):
        References(examples=0)
    mistakes = Mistakes()
    assert encode(TINY, reference_examples(Arithmetic(held_out=10), "held_out", None, 0), Limit(99), mistakes)
    assert not mistakes


# A run's folder is a model.


def test_a_run_folder_resolves_to_its_newest_checkpoint(tmp_path: Path):
    assert resolve(str(tmp_path)) == str(tmp_path)
    assert resolve("some/hub-id") == "some/hub-id"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-000900.partial").mkdir()
    with pytest.raises(ValueError, match="holds no finished checkpoint"):
        resolve(str(tmp_path))
    for name in ("step-000020", "step-000100", "step-1000000", "step-000003"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert resolve(str(tmp_path)) == str(tmp_path / "checkpoints" / "step-1000000")


def test_a_run_does_not_go_on_with_other_items_than_it_began_with(tmp_path: Path):
    """An earlier version made one item of each reply of a conversation, and noted no number of items."""
    turns = [{"role": role, "content": "12"} for role in ("user", "assistant", "user", "assistant")]
    rows = [{"messages": [{"role": "user", "content": str(number)}, *turns[1:]]} for number in range(8)]
    write_rows(tmp_path / "chats.jsonl", rows)
    model, tokenizer = small(), chatml()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    fit = FitOptions(batch=2, epochs=3.0, save_every=4)
    config = SftConfig(DataFile(str(tmp_path / "chats.jsonl"), held_out=0.0), str(tmp_path / "model"), fit=fit)

    def until_the_tenth(line: str) -> None:
        if line.startswith("step 10/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sft(config, tmp_path / "run", until_the_tenth)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["items"] == 8
    record = {name: each for name, each in record.items() if name not in ("sealed", "sha256")}
    for changed, began in (
        ({**record, "items": 16}, "16 items of data"),
        ({name: each for name, each in record.items() if name not in ("items", "steps")}, "8 conversations row by row"),
    ):
        (tmp_path / "run" / "run.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"began with {began}.*, and this version reads 8 items there"):
            sft(config, tmp_path / "run", quiet)
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    assert sft(config, tmp_path / "run", quiet).steps == 12
