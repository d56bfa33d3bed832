"""Reward models learn what was preferred, from every pair of a ranking."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from proximo.cli import main
from proximo.data import DataFile
from proximo.losses.pairwise import BradleyTerry
from proximo.models import tiny_model, tiny_tokenizer
from proximo.models.reward_models import completion_scores, load_reward_model
from proximo.supervised.encoding import Encoded, to_rows
from proximo.supervised.fitting import FitOptions
from proximo.supervised.reward_model import Judgement, RewardModelConfig, train_reward_model

# The stage


def items() -> list[Encoded]:
    """A ranking of three and two pairs, one of them with a margin."""
    return [
        Encoded("a", (5, 6, 7), ((8, 9, 1), (9, 1), (10, 11, 12, 1))),
        Encoded("b", (6,), ((13, 1), (14, 15, 1)), margin=0.5),
        Encoded("c", (7, 7), ((16, 17, 1), (18, 1))),
    ]


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_model(hidden=32, layers=2, intermediate=48).save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def scores_of(model, rankings: list[Encoded]) -> torch.Tensor:
    rows = to_rows(rankings)
    return completion_scores(model, prompts=rows.prompts, tokens=rows.tokens, lengths=rows.lengths, group=rows.group)


def test_the_loss_by_hand(folder):
    model = load_reward_model(str(folder))
    with torch.no_grad():
        r = scores_of(model, items()).tolist()

    def loss(chosen: float, rejected: float, margin: float = 0.0) -> float:
        return math.log1p(math.exp(rejected - chosen + margin)) + 0.01 * (chosen + rejected) ** 2

    by_prompt = [
        (loss(r[0], r[1]) + loss(r[0], r[2]) + loss(r[1], r[2])) / 3,
        loss(r[3], r[4], 0.5),
        loss(r[5], r[6]),
    ]
    for budget in (1, 1000):
        stage = Judgement(model, items(), items()[1:], BradleyTerry(centring=0.01), budget)
        parts = list(stage.losses([0, 2, 1]))
        assert len(parts) == (3 if budget == 1 else 1)
        assert float(sum(loss.detach() for loss, _ in parts)) == pytest.approx(sum(by_prompt) / 3, abs=1e-5)
        held_out = stage.held_out()
        assert held_out["loss"] == pytest.approx(sum(by_prompt[1:]) / 2, abs=1e-5)
        assert held_out["accuracy"] == ((r[3] > r[4]) + (r[5] > r[6])) / 2
        assert held_out["score_gap"] == pytest.approx((r[3] - r[4] + r[5] - r[6]) / 2, abs=1e-5)
        assert held_out["score_mean"] == pytest.approx(sum(r[3:]) / 4, abs=1e-5)
        spread = math.sqrt(sum((score - sum(r[3:]) / 4) ** 2 for score in r[3:]) / 4)
        assert held_out["score_std"] == pytest.approx(spread, abs=1e-5)
        chances = [1 / (1 + math.exp(-abs(gap))) for gap in (r[3] - r[4], r[5] - r[6])]
        assert 0 <= held_out["calibration"] <= max(chances)


def test_micro_batches_add_up_to_the_whole_gradient(folder):
    model = load_reward_model(str(folder), dtype=torch.float64)
    found = []
    for budget in (1, 1000):
        model.zero_grad()
        for loss, _ in Judgement(model, items(), [], BradleyTerry(), budget).losses([0, 1, 2]):
            loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for small, large in zip(*found, strict=True):
        assert_close(small, large, rtol=1e-6, atol=1e-8)  # transformers' norms are float32 inside


# The whole way


def planted(path: Path, count: int = 700) -> Path:
    """Of two or three words, the one with more of the letter a is preferred."""
    draw = random.Random(3)
    rows = []
    while len(rows) < count:
        words = ["".join(draw.choices("aabcdefg", k=8)) for _ in range(draw.choice((2, 3)))]
        ranked = sorted(words, key=lambda word: -word.count("a"))
        if len({word.count("a") for word in words}) == len(words):
            rows.append({"prompt": f"{draw.choice('xyz')}{len(rows)}:", "ranking": ranked})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow("trains a model")
def test_a_planted_preference_is_learned_and_kept(folder, tmp_path):
    fit = FitOptions(epochs=2.0, batch=32, learning_rate=3e-3, warmup_steps=5)
    config = RewardModelConfig(DataFile(str(planted(tmp_path / "words.jsonl"))), str(folder), fit=fit)
    fitted = train_reward_model(config, tmp_path / "run", lambda _: None)
    assert fitted.best["accuracy"] > 0.9 > 0.8 > fitted.before["accuracy"]
    assert fitted.best["calibration"] < 0.1
    assert fitted.best["score_gap"] > 1

    # Plain transformers, with padding, says the same as we do.
    tokenizer = AutoTokenizer.from_pretrained(fitted.checkpoint)
    plain = AutoModelForSequenceClassification.from_pretrained(fitted.checkpoint, dtype=torch.float32)
    texts = ["x1:aaaaaa<eos>", "x1:aab<eos>", "x1:bbbbbb<eos>"]
    with torch.no_grad():
        expected = plain(**tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)).logits
        judge = load_reward_model(str(tmp_path / "run" / "checkpoints" / fitted.checkpoint.name), fresh_head=False)
        ids = [tuple(tokenizer.encode(text.removeprefix("x1:"))) for text in texts]
        found = scores_of(judge, [Encoded("", tuple(tokenizer.encode("x1:")), tuple(ids))])
    assert_close(found, expected[:, 0], rtol=0, atol=1e-4)
    assert found[0] > found[2] + 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["held_out/accuracy"] == fitted.before["accuracy"]
    assert {"loss", "accuracy", "score_gap"} <= rows[1].keys()


def raised(_: object, __: object, scores: torch.Tensor) -> torch.Tensor:
    return scores + 2.0


@pytest.mark.slow("trains a model")
def test_centring_pulls_the_mean_to_zero(folder):
    means = []
    for centring in (0.0, 0.1):
        model = load_reward_model(str(folder))
        model.get_submodule("score").register_forward_hook(raised)
        stage = Judgement(model, items(), items(), BradleyTerry(centring), 1000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(40):
            optimizer.zero_grad()
            next(stage.losses([0, 1, 2]))[0].backward()
            optimizer.step()
        means.append(stage.held_out()["score_mean"])
    assert abs(means[1]) < 0.3 < 1.0 < means[0]


def test_a_tokenizer_without_padding_gets_what_the_model_leaves_out(folder, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    data = DataFile(str(planted(tmp_path / "words.jsonl", 8)), held_out=0.0)
    fitted = train_reward_model(RewardModelConfig(data, str(folder)), tmp_path / "run", lambda _: None)
    assert AutoTokenizer.from_pretrained(fitted.checkpoint).pad_token == "<eos>"
    assert load_reward_model(str(fitted.checkpoint)).config.pad_token_id == 1


def test_on_the_command_line(folder, tmp_path, capsys):
    data = planted(tmp_path / "words.jsonl", 40)
    command = ["reward-model", str(data), "--model", str(folder), "--run", str(tmp_path / "run"), "--json"]
    assert main([*command, "--data.held-out", "0.3", "--fit.batch", "16"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["held_out_best"].keys() == facts["held_out_before"].keys() >= {"accuracy", "calibration"}
    assert load_reward_model(facts["checkpoint"], fresh_head=False).num_labels == 1
    # A stage continues from a run folder, and keeps the head it finds there.
    again = ["reward-model", str(data), "--model", str(tmp_path / "run"), "--run", str(tmp_path / "more"), "--json"]
    assert main([*again, "--data.held-out", "0.3"]) == 0
    assert json.loads(capsys.readouterr().out)["held_out_before"] == pytest.approx(facts["held_out_best"], abs=1e-4)
