"""Preference optimisation: values by hand, a plain padded reference, exactness, and that a preference is learned."""

import gc
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3ForCausalLM

from proximo.cli import main
from proximo.config import toml
from proximo.data import DataFile, Mistakes
from proximo.losses import Dpo, Ipo
from proximo.models import load_model, tiny_model, tiny_tokenizer
from proximo.supervised import dpo as module
from proximo.supervised.dpo import DpoConfig, Preferences, dpo
from proximo.supervised.encoding import Encoded, Prepared
from proximo.supervised.fitting import FitOptions
from proximo.supervised.reference import Reference, compute_reference, read_reference, summed_logprobs, write_reference
from tests.models.test_scoring import exact

TOKENIZER = tiny_tokenizer()
RANKINGS = [
    Encoded("a", (10, 11, 12), ((20, 21, 22, 1), (23, 1))),
    Encoded("b", (13,), ((24, 1), (25, 26, 27, 28, 1), (29, 30, 1))),
    Encoded("c", (14, 15), ((31, 32, 1), (33, 34, 35, 1))),
]
"""Two pairs and a ranking of three, of unequal lengths."""


def small_model(seed: int = 1) -> PreTrainedModel:
    return tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=seed)


def wide_model(seed: int = 1) -> PreTrainedModel:
    """In float64 throughout."""
    return exact(small_model(seed).double())


def preferences(loss: Dpo | Ipo, *, token_budget: int = 10_000, batch: int = 64, rankings=RANKINGS) -> Preferences:
    """A model that has moved away from its reference, in float64."""
    data = Prepared(rankings, rankings[:2], Mistakes())
    known = compute_reference(partial(summed_logprobs, wide_model(2)), data, "", batch, token_budget)
    options = FitOptions(token_budget=token_budget, batch=batch)
    return Preferences(wide_model(), data, known, loss, options)


def step(stage: Preferences, items: list[int]) -> tuple[float, dict[str, float], Tensor]:
    """Loss, metrics and gradient of one optimizer step."""
    stage.model.zero_grad()
    total, sums = 0.0, {}
    for loss, metrics in stage.losses(items):
        loss.backward()
        total += float(loss.detach())
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    gradient = torch.cat([p.grad.flatten() for p in stage.model.parameters() if p.grad is not None])
    return total, sums, gradient


# Values


def in_place_of_scores(monkeypatch, values: list[list[float]]) -> None:
    """The policy says these log-probs of the rows' tokens, whatever the model."""

    def score_rows(model, rows):
        said = torch.zeros(rows.tokens.shape)
        for row, numbers in enumerate(values):
            said[row, : len(numbers)] = torch.tensor(numbers)
        return SimpleNamespace(logprobs=said.requires_grad_())

    monkeypatch.setattr(module, "score_rows", score_rows)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (Dpo(0.1), 0.620957047790),
        (Dpo(0.1, label_smoothing=0.1), 0.635957047790),
        # Means over 2 and 4 tokens: 0.5 / 2 − (−1 / 4) − 1 / (2 · 0.1) = −4.5.
        (Ipo(0.1), 4.5**2),
    ],
)
def test_a_pair_by_hand(monkeypatch, loss: Dpo | Ipo, expected: float):
    pair = Encoded("p", (5,), ((6, 1), (7, 8, 9, 1)))
    data = Prepared([pair], [], Mistakes())
    stage = Preferences(small_model(), data, Reference(((-12.5, -13.0),), (), "", ""), loss, FitOptions())
    in_place_of_scores(monkeypatch, [[-10.0, -2.0], [-5.0, -5.0, -2.0, -2.0]])
    ((value, metrics),) = stage.losses([0])
    assert float(value.detach()) == pytest.approx(expected, abs=1e-11)
    shared = 1 if isinstance(loss, Dpo) else 2
    found = {name: float(each) for name, each in metrics.items()}
    assert found == pytest.approx(
        {
            "accuracy": 1.0,
            "margin": 0.15 if isinstance(loss, Dpo) else 0.05,
            "chosen_reward": 0.05 / shared,
            "rejected_reward": -0.1 / shared**2,
            "chosen_logprob": -12.0 / shared,
            "rejected_logprob": -14.0 / shared**2,
            "drift": 0.25,
        },
        abs=1e-12,
    )
    assert stage.held_out() == {}


def test_all_pairs_of_a_ranking_and_each_prompt_counts_once(monkeypatch):
    rankings = [Encoded("p", (5,), ((6,), (7,), (8,))), Encoded("q", (9,), ((10,), (11,)))]
    sums = ((0.0, 0.0, 0.0), (0.0, 0.0))
    stage = Preferences(
        small_model(), Prepared(rankings, [], Mistakes()), Reference(sums, (), "", ""), Ipo(0.5), FitOptions()
    )
    in_place_of_scores(monkeypatch, [[-1.0], [-2.0], [-1.5], [-3.0], [-1.0]])
    ((value, metrics),) = stage.losses([0, 1])
    # (margin − 1)²: of the first prompt's margins 1, 0.5 and −0.5, and of the second's −2.
    assert float(value.detach()) == pytest.approx(((0 + 0.25 + 2.25) / 3 + 9) / 2)
    assert float(metrics["accuracy"]) == pytest.approx((2 / 3 + 0) / 2)
    assert float(metrics["margin"]) == pytest.approx(0.5 * (1 / 3 - 2) / 2)


# A reference that shares nothing with the code


def plain_logprobs(model: PreTrainedModel, prompt: tuple[int, ...], completion: tuple[int, ...]) -> Tensor:
    """One sequence by itself through transformers' own forward pass."""
    tokens = torch.tensor([[*prompt, *completion]])
    model.set_attn_implementation("sdpa")
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.mark.parametrize("loss", [Dpo(0.3), Dpo(0.3, label_smoothing=0.2), Ipo(0.3)], ids=repr)
def test_loss_and_gradient_are_those_of_a_plain_computation(loss: Dpo | Ipo):
    stage = preferences(loss)
    value, _, gradient = step(stage, [2, 1, 0])

    policy, frozen = wide_model(), wide_model(2)
    total = torch.zeros(())
    for item in RANKINGS:
        moved = []
        for completion in item.completions:
            difference = plain_logprobs(policy, item.prompt, completion) - plain_logprobs(
                frozen, item.prompt, completion
            )
            moved.append(difference.sum() if isinstance(loss, Dpo) else difference.mean())
        pairs = [(better, worse) for place, better in enumerate(moved) for worse in moved[place + 1 :]]
        for better, worse in pairs:
            gap = better - worse
            if isinstance(loss, Ipo):
                each = (gap - 1 / (2 * loss.beta)) ** 2
            else:
                smooth = loss.label_smoothing
                each = -(1 - smooth) * torch.log(torch.sigmoid(loss.beta * gap))
                each = each - smooth * torch.log(torch.sigmoid(-loss.beta * gap))
            total = total + each / len(pairs) / len(RANKINGS)
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    assert value == pytest.approx(float(total.detach()), rel=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    assert expected.norm() > 1e-3


# Laws


@pytest.mark.parametrize("loss", [Dpo(), Ipo()], ids=repr)
def test_micro_batches_and_their_order_change_nothing(loss: Dpo | Ipo):
    whole = step(preferences(loss), [0, 1, 2])
    split = step(preferences(loss, token_budget=1, batch=2), [2, 0, 1])
    assert whole[0] == pytest.approx(split[0], rel=1e-12)
    assert whole[1] == pytest.approx(split[1], rel=1e-9)
    torch.testing.assert_close(whole[2], split[2], rtol=1e-9, atol=1e-13)
    one, many = (preferences(loss, token_budget=budget, batch=batch).held_out() for budget, batch in ((999, 9), (1, 1)))
    assert one == pytest.approx(many, rel=1e-9)


def test_before_the_first_update_nothing_has_moved():
    """To the last bit, in float32: a pass over the held-out data is split as the reference's was."""
    random = torch.Generator().manual_seed(0)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(
            torch.randint(5, 90, (int(torch.randint(1, most, (), generator=random)),), generator=random).tolist()
        )

    rankings = [Encoded(str(number), tokens(9), (tokens(12), tokens(12))) for number in range(40)]
    data, model = Prepared(rankings[:3], rankings, Mistakes()), small_model()
    known = compute_reference(partial(summed_logprobs, model), data, "", 7, 60)
    before = Preferences(model, data, known, Dpo(), FitOptions(batch=7, token_budget=60)).held_out()
    assert (before["margin"], before["accuracy"], before["chosen_reward"], before["drift"]) == (0, 0, 0, 0)
    assert before["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert before["chosen_logprob"] < -1


# Learning


def letters(tmp_path: Path, count: int = 120) -> Path:
    """Planted: after `low` a small letter is preferred, after `up` a large one."""
    path = tmp_path / "pairs.jsonl"
    rows = []
    for number in range(count):
        letter = ascii_lowercase[number * 7 % 26]
        both = (letter, letter.upper()) if number % 2 else (letter.upper(), letter)
        rows.append({"prompt": f"{number} {('up', 'low')[number % 2]} ", "chosen": both[0], "rejected": both[1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def saved(folder: Path, seed: int = 1) -> str:
    small_model(seed).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def config_of(tmp_path: Path, **changes) -> DpoConfig:
    options = FitOptions(epochs=8.0, batch=16, learning_rate=3e-3, warmup_steps=2)
    data = DataFile(str(letters(tmp_path)), held_out=0.3)
    return replace(DpoConfig(data, model=saved(tmp_path / "model"), fit=options), **changes)


def quiet(line: str) -> None: ...


@pytest.mark.slow("trains a model")
@pytest.mark.usefixtures("ordinary_precision")
def test_a_planted_preference_is_learned(tmp_path):
    config = config_of(tmp_path)
    lines = []
    fitted = dpo(config, tmp_path / "run", lines.append)
    assert (fitted.before["accuracy"], fitted.before["margin"]) == (0, 0)
    assert fitted.best["accuracy"] > 0.9
    assert fitted.best["margin"] > 0.2
    assert fitted.best["chosen_reward"] > fitted.best["rejected_reward"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 0
    assert rows[0]["held_out/loss"] == pytest.approx(math.log(2), rel=1e-6)
    names = "loss accuracy margin chosen_reward rejected_reward chosen_logprob rejected_logprob drift"
    assert set(names.split()) <= rows[1].keys()
    assert rows[1]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[1]["margin"] == pytest.approx(0, abs=1e-5)
    assert toml.loads((tmp_path / "run" / "config.toml").read_text(), DpoConfig) == config


@pytest.mark.usefixtures("ordinary_precision")
def test_ipo_learns_from_a_toml(tmp_path):
    config = config_of(tmp_path, loss=Ipo(0.1))
    config = toml.loads(toml.dumps(replace(config, fit=replace(config.fit, epochs=1.0))), DpoConfig)
    fitted = dpo(config, tmp_path / "run", quiet)
    assert fitted.before["loss"] == pytest.approx(25.0, rel=1e-6)
    assert fitted.best["loss"] < 25.0


# The reference


@pytest.mark.usefixtures("ordinary_precision")
def test_only_one_model_is_ever_in_memory(tmp_path, monkeypatch):
    config = config_of(tmp_path, reference=saved(tmp_path / "other", seed=7))
    config = replace(config, fit=replace(config.fit, epochs=0.2))
    alive = []

    def counted() -> int:
        models = [each for each in gc.get_objects() if type(each) is Qwen3ForCausalLM]
        return sum(each.device.type != "meta" for each in models)  # shapes alone take no memory

    gc.collect()
    others = counted()

    def load(path: str, **options) -> PreTrainedModel:
        alive.append(counted() - others)
        return load_model(path, **options)

    fit = module.fit_session

    def watched(*arguments):
        alive.append(counted() - others)
        return fit(*arguments)

    monkeypatch.setattr(module, "load_model", load)
    monkeypatch.setattr(module, "fit_session", watched)
    before = dpo(config, tmp_path / "run", quiet).before
    assert alive == [0, 0, 1]  # before the reference, before the policy, while training
    # The reference is another model: from the start the policy is somewhere else.
    assert before["margin"] != 0


@pytest.mark.slow("trains a model")
@pytest.mark.usefixtures("ordinary_precision")
def test_reference_logprobs_are_reused_and_refused_where_they_do_not_fit(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    config = replace(config, fit=replace(config.fit, epochs=1.0))
    dpo(config, tmp_path / "first", quiet)
    stored = str(tmp_path / "first" / "reference.parquet")

    monkeypatch.setattr(module, "compute_reference", None)  # not computed again
    dpo(replace(config, reference_logprobs=stored), tmp_path / "second", quiet)
    first, second = (tmp_path / name / "metrics.jsonl" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    tables = [pq.read_table(tmp_path / name / "reference.parquet") for name in ("first", "second")]
    assert tables[0].equals(tables[1], check_metadata=True)

    other = replace(config, reference_logprobs=stored, model=saved(tmp_path / "other", seed=7))
    with pytest.raises(ValueError, match="computed by another model"):
        dpo(other, tmp_path / "third", quiet)
    fewer = replace(config, reference_logprobs=stored, data=replace(config.data, held_out=0.2))
    monkeypatch.setattr(module, "load_model", None)  # found before any weights are read
    for changed, message in (
        (fewer, "computed for other data"),
        (replace(config, reference_logprobs=str(tmp_path / "nothing.parquet")), "not a reference.parquet"),
        (replace(config, reference_logprobs=str(tmp_path / "pairs.jsonl")), "not a reference.parquet"),
    ):
        with pytest.raises(ValueError, match=message):
            dpo(changed, tmp_path / "third", quiet)
    assert not (tmp_path / "third").exists()


def test_what_is_stored_is_what_the_reference_says(tmp_path):
    model, data = wide_model(), Prepared(RANKINGS[:2], RANKINGS[2:], Mistakes())
    known = compute_reference(partial(summed_logprobs, model), data, "", 1, 1)
    write_reference(tmp_path / "reference.parquet", known, data)
    assert read_reference(str(tmp_path / "reference.parquet"), data) == known
    rows = pq.read_table(tmp_path / "reference.parquet").to_pylist()
    assert [(row["split"], row["place"], row["rank"], row["tokens"]) for row in rows] == [
        ("train", "a", 0, 4),
        ("train", "a", 1, 2),
        ("train", "b", 0, 2),
        ("train", "b", 1, 5),
        ("train", "b", 2, 3),
        ("held_out", "c", 0, 3),
        ("held_out", "c", 1, 4),
    ]
    expected = [
        float(plain_logprobs(model, item.prompt, c).sum().detach()) for item in RANKINGS for c in item.completions
    ]
    assert [row["logprob"] for row in rows] == pytest.approx(expected, rel=1e-12)
    first, second, third = RANKINGS
    for train, held_out in (
        ([second, first], [third]),
        ([first], [second, third]),
        ([replace(first, prompt=(10, 11, 13)), second], [third]),
        ([replace(first, completions=((20, 21, 22, 1), (24, 1))), second], [third]),
    ):
        with pytest.raises(ValueError, match="other data"):
            read_reference(str(tmp_path / "reference.parquet"), Prepared(train, held_out, Mistakes()))


def test_a_reference_with_another_vocabulary_is_refused(tmp_path):
    config = config_of(tmp_path, reference=saved(tmp_path / "other"))
    file = tmp_path / "other" / "tokenizer.json"
    other = json.loads(file.read_text())
    words = other["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(other))
    with pytest.raises(ValueError, match="their vocabularies differ"):
        dpo(config, tmp_path / "run", quiet)


# The command


@pytest.mark.parametrize("stage", ["dpo", "reward-model"])
def test_bad_pairs_are_refused_before_a_model_is_loaded(stage, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "load_model", None)
    monkeypatch.setattr("proximo.supervised.reward_model.load_reward_model", None)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "p", "chosen": "a", "rejected": "a"}\n{"prompt": "p", "chosen": "a"}\n')
    with pytest.raises(SystemExit) as stopped:
        main([stage, str(bad), "--model", "tiny-arithmetic", "--run", str(tmp_path / "run")])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "bad.jsonl:1: chosen and rejected are equal" in said
    assert "bad.jsonl:2: no column 'rejected'" in said
    assert not (tmp_path / "run").exists()
