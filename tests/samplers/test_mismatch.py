"""A sampler that is not quite the policy: what is measured, what the learner makes of it, and what repairs it."""

import itertools
import json
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

import proximo
from proximo.algorithms import DAPO, GRPO, SAPO, Algorithm
from proximo.config import toml
from proximo.learner.learner import Learner
from proximo.learner.options import LearnerOptions
from proximo.learner.policy import PlainPolicy
from proximo.losses import (
    GeometricRejection,
    IcePop,
    SamplerPolicy,
    SequenceMasked,
    SequenceTruncated,
    SoftGate,
    TokenTruncated,
)
from proximo.losses.diagnostics import effective_share, mismatch
from proximo.losses.intervals import half_width
from proximo.losses.pieces.ratios import SequenceProductRatio, SequenceRatio, TokenRatio
from proximo.models import load_model, score, tiny_model, tiny_moe, tiny_tokenizer
from proximo.models.shipped import resolve
from proximo.rl.assemble import assemble
from proximo.rl.config import EvaluationOptions, RunConfig, SamplerOptions, TrainingOptions
from proximo.rl.metrics import mismatch_metrics
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.train import train_step
from proximo.runs.records import DataCursor
from proximo.samplers.embedded import Embedded, local_sampler
from proximo.samplers.mismatched import Mismatched, MismatchedSampler
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Completion, Grade, Group, Problem, Request, Rollout
from tests import ROOT

TOKENIZER = tiny_tokenizer()
LN2 = math.log(2)


# The statistics


def test_statistics_by_hand():
    log_weight = torch.tensor([[LN2, 0.0], [-LN2, math.nan], [math.inf, math.nan]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    found = mismatch(log_weight, mask)
    assert found is not None
    # w is 2, 1 and 1/2; the completions' products are 2 and 1/2, and the third completion has no token.
    assert found.gap == pytest.approx(2 * LN2 / 3)
    assert found.kl == pytest.approx(((2 - 1 - LN2) + 0 + (0.5 - 1 + LN2)) / 3)
    assert found.kl_k1 == pytest.approx(0.0)
    assert found.ratio_mean == pytest.approx(3.5 / 3)
    assert found.ratio_max == 2
    assert found.ess == pytest.approx(3.5**2 / (3 * 5.25))
    assert found.sequence_spread == pytest.approx(LN2)
    assert mismatch(log_weight, torch.zeros_like(mask)) is None


def test_a_divergence_is_of_the_sampler_from_the_learner():
    # Tokens that the sampler finds likelier than the learner: drawn too often, k1 is above 0.
    found = mismatch(torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool))
    assert found is not None
    assert found.kl_k1 == 1
    assert found.kl == pytest.approx(math.exp(-1))
    assert found.ess == 1
    assert set(mismatch_metrics(None)) == set(mismatch_metrics(found))
    assert mismatch_metrics(found) == {
        "sampler_gap": 1.0,
        "mismatch_kl": pytest.approx(math.exp(-1)),
        "mismatch_kl_k1": 1.0,
        "mismatch_ratio_mean": pytest.approx(math.exp(-1)),
        "mismatch_ratio_max": pytest.approx(math.exp(-1)),
        "mismatch_ess": pytest.approx(1.0),
        "mismatch_sequence_spread": 0.0,
    }


def test_effective_share():
    assert effective_share(0.5, 0.5) == 0.5  # every second weight is 1, the others 0
    assert effective_share(0.0, 0.0) == 0  # everything rejected


# The sampler

REQUESTS = [Request(7, (12, 30, 8), 6), Request(9, (40,), 6)]
OPTIONS = SamplingOptions(max_tokens=6)


def dense():
    return tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1)


def mixture(seed: int = 1):
    return tiny_moe(hidden=32, layers=2, heads=2, kv_heads=1, experts=4, chosen=2, intermediate=32, seed=seed)


def move(model, seed: int = 0) -> None:
    """As an update would."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=random, dtype=parameter.dtype))


def scored(model, completions: list[tuple[Completion, ...]]) -> Tensor:
    """The learner's log-probs minus the sampler's, of every token."""
    rows = [(number, each) for number, siblings in enumerate(completions) for each in siblings]
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(each.tokens) for _, each in rows], batch_first=True)
    lengths = torch.tensor([len(each.tokens) for _, each in rows])
    with torch.no_grad():
        ours = score(
            model,
            prompts=[request.prompt_tokens for request in REQUESTS],
            tokens=tokens,
            lengths=lengths,
            group=torch.tensor([number for number, _ in rows]),
            temperature=1.0,
        ).logprobs
    own = [torch.tensor(each.logprobs, dtype=ours.dtype) for _, each in rows]
    return torch.cat([(row[:length] - log).double() for row, length, log in zip(ours, lengths, own, strict=True)])


def test_without_a_difference_it_is_the_exact_sampler():
    model = dense()
    exact = local_sampler(model, TOKENIZER).sample(REQUESTS, OPTIONS, seed=3, step=5, version=0)
    copied = MismatchedSampler(PlainPolicy(model), TOKENIZER, Mismatched()).sample(REQUESTS, OPTIONS, seed=3, step=5)
    assert copied == exact


@pytest.mark.parametrize(("precision", "low", "high"), [("bfloat16", 1e-4, 1e-1), ("float16", 1e-5, 1e-2)])
def test_rounded_weights_are_what_it_really_draws_with(precision, low: float, high: float):
    model = dense()
    before = [parameter.clone() for parameter in model.parameters()]
    completions = MismatchedSampler(PlainPolicy(model), TOKENIZER, Mismatched(precision)).sample(
        REQUESTS, OPTIONS, seed=3, step=5
    )
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert low < float(scored(model, completions).abs().mean()) < high
    rounded = dense()
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(getattr(torch, precision)).to(torch.float32)
    assert float(scored(rounded, completions).abs().max()) < 1e-5


def test_weights_of_two_steps_ago():
    model = dense()
    sampler = MismatchedSampler(PlainPolicy(model), TOKENIZER, Mismatched(lag=2))
    kept, versions = [], []
    for step in range(4):
        kept.append([parameter.clone() for parameter in model.parameters()])
        versions.append(sampler.refresh(PlainPolicy(model), 10 * step))
        completions = sampler.sample(REQUESTS, OPTIONS, seed=0, step=step, version=10 * step)
        assert {each.version for siblings in completions for each in siblings} == {versions[-1]}
        then = dense()
        with torch.no_grad():
            for parameter, weight in zip(then.parameters(), kept[max(0, step - 2)], strict=True):
                parameter.copy_(weight)
        assert float(scored(then, completions).abs().max()) < 1e-5
        assert (float(scored(model, completions).abs().mean()) > 1e-2) == (step > 0)
        move(model, seed=step)
    assert versions == [0, 0, 0, 10]


def test_noise_on_routers_repeats_by_seed_and_step_and_does_not_pile_up():
    model = mixture()
    sampler = MismatchedSampler(PlainPolicy(model), TOKENIZER, Mismatched(router_noise=0.3))
    first, other, again = (sampler.sample(REQUESTS, OPTIONS, seed=1, step=step) for step in (0, 1, 0))
    assert first == again
    gaps = [float(scored(model, each).abs().mean()) for each in (first, other)]
    assert gaps[0] != gaps[1]
    assert min(gaps) > 1e-3
    exact = MismatchedSampler(PlainPolicy(model), TOKENIZER, Mismatched()).sample(REQUESTS, OPTIONS, seed=1, step=0)
    assert float(scored(model, exact).abs().max()) < 1e-5
    noisy = [(ours, theirs) for ours, theirs in zip(sampler._copy.named_parameters(), model.parameters(), strict=True)]
    assert {name for (name, ours), theirs in noisy if not torch.equal(ours, theirs)} == {
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.mlp.gate.weight",
    }


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"sampler.router_noise is 0.1.*no experts.*leave it out"):
        MismatchedSampler(PlainPolicy(dense()), TOKENIZER, Mismatched(router_noise=0.1))
    with pytest.raises(ValueError, match="router_noise is -1"):
        Mismatched(router_noise=-1.0)
    with pytest.raises(ValueError, match="lag is -1"):
        Mismatched(lag=-1)
    config = RunConfig(sampler=Mismatched("bfloat16", lag=2))
    assert toml.loads(toml.dumps(config), RunConfig) == config


# The learner


def group_of(version: int) -> Group:
    rollouts = [Rollout(Completion((5, 6), (-1.0, -1.0), "x", "stop", version), Grade(float(n))) for n in range(2)]
    return Group(Problem("p", "p", None), (5, 6, 7), tuple(rollouts))


def learner(algorithm: Algorithm, minibatches: int = 2) -> Learner:
    options = LearnerOptions(groups=2, minibatches=minibatches, warmup_steps=0, learning_rate=1e-3)
    return Learner(PlainPolicy(dense()), algorithm, options, temperature=1.0, seed=0)


def test_rows_of_a_lagging_sampler_have_the_learners_old_policy_and_carried_rows_their_samplers():
    trainer = learner(replace(GRPO, correct=TokenTruncated()))
    trainer.policy.version = 9
    trainer.start_step(sampled_version=6)
    lagging, carried = group_of(version=6), group_of(version=3)
    batch = assemble([lagging, carried], [], trainer, 8).batch
    assert trainer.is_stale(batch).tolist() == [False, False, True, True]
    assert torch.equal(batch.old_logprobs[:2], trainer.old_scores(batch).logprobs[:2])
    assert (batch.old_logprobs[2:] == -1.0).all()


def test_a_sampler_with_older_weights_is_never_trusted():
    trainer = learner(GRPO)
    trainer.trusts_sampler = True  # it was close when last measured
    trainer.policy.version = 2
    trainer.start_step()
    assert not trainer.needs_old_pass()
    trainer.start_step(sampled_version=1)
    assert trainer.needs_old_pass()


def test_with_one_update_a_step_a_lagging_sampler_is_measured_and_the_ratio_is_one():
    trainer = learner(GRPO, minibatches=1)
    trainer.policy.version = 2
    trainer.start_step(sampled_version=0)
    assembled = assemble([group_of(version=0)], [], trainer, 8)
    assert assembled.sampler_gap is None  # no old pass
    [update] = trainer.updates(assembled.batch)
    assert update.stats.floats()["log_ratio_max"] == 0
    assert update.first_gap is not None
    assert update.first_gap.gap > 1


# Real training

ALGORITHM = replace(DAPO, keep=GRPO.keep)
REPAIRS: Mapping[str, Algorithm] = {
    "tis": replace(ALGORITHM, correct=TokenTruncated()),
    "sequence_tis": replace(ALGORITHM, correct=SequenceTruncated()),
    "mis": replace(ALGORITHM, correct=SequenceMasked()),
    "icepop": replace(ALGORITHM, correct=IcePop()),
    "geometric": replace(ALGORITHM, correct=GeometricRejection()),
    "bypass": replace(ALGORITHM, anchor=SamplerPolicy()),
}
MEASURED = "kl kl_k1 ratio_mean ratio_max ess sequence_spread"
CONFIG = RunConfig(
    sampling=SamplingOptions(max_tokens=5),
    training=TrainingOptions(groups=8, group_size=6, minibatches=2, learning_rate=1e-4, warmup_steps=0),
    evaluation=EvaluationOptions(problems=1),
    steps=2,
)


@cache
def trained(name: str | None, sampler: SamplerOptions) -> tuple[Tensor, list[dict[str, float]]]:
    """The weights after two steps of a real run, and its metrics."""
    return steps_of(replace(CONFIG, algorithm=ALGORITHM if name is None else REPAIRS[name], sampler=sampler))


def steps_of(config: RunConfig) -> tuple[Tensor, list[dict[str, float]]]:
    torch.set_default_dtype(torch.float32)
    try:
        with TemporaryDirectory() as folder:
            run = Run(config, Path(folder), ProgressLines())
            run.log.start("")
            cursor = DataCursor()
            for step in range(config.steps):
                cursor = train_step(run, step, cursor).cursor
            rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    finally:
        torch.set_default_dtype(torch.float64)
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()]), rows


INJECTED = Mismatched("bfloat16", lag=1)


def distance(weights: Tensor, others: Tensor) -> float:
    """Between two results, as a share of the way that training went."""
    start = torch.cat(
        [parameter.detach().flatten() for parameter in load_model(resolve("tiny-arithmetic")).parameters()]
    )
    return float((weights - others).norm() / (others - start).norm())


@pytest.mark.slow("trains with every correction")
@pytest.mark.parametrize("name", REPAIRS)
def test_every_correction_trains_and_says_what_it_did(name: str):
    weights, rows = trained(name, INJECTED)
    untouched, plain_rows = trained(None, INJECTED)
    assert len(rows) == 2
    for row in [*rows, *plain_rows]:
        assert all(math.isfinite(row[f"mismatch_{each}"]) for each in MEASURED.split())
        assert row["sampler_gap"] > 1e-4
        assert 0 < row["mismatch_ess"] < 1
        assert row["mismatch_kl"] > 0
    # The second step's sampler has the first step's weights as well.
    assert plain_rows[1]["mismatch_kl"] > 2 * plain_rows[0]["mismatch_kl"]
    assert distance(weights, untouched) > 1e-2
    for row in rows:
        corrects = name != "bypass"
        assert ({"correction", "correction_max", "correction_ess", "rejected"} <= row.keys()) == corrects
        if corrects:
            assert 0 <= row["rejected"] <= 1
            assert 0 <= row["correction_ess"] <= 1
        if name in ("tis", "sequence_tis"):
            assert row["rejected"] == 0
            assert row["correction_ess"] < 1
        if name == "geometric":
            assert 0 < row["rejected"] <= 1
            assert row["correction_ess"] == pytest.approx(1 - row["rejected"])
    assert "correction" not in plain_rows[0]


def test_a_mismatch_of_nothing_is_the_exact_run():
    copied, rows = trained(None, Mismatched())
    exact, exact_rows = trained(None, Embedded())
    assert torch.equal(copied, exact)
    assert rows == exact_rows


@pytest.mark.slow("trains with every correction")
def test_replaying_the_samplers_routes_takes_most_of_the_routers_noise_away(tmp_path):
    """The numbers of claim 10, of mixtures that were drawn with 4 seeds."""
    noisy = replace(CONFIG, algorithm=ALGORITHM, model=str(tmp_path), sampler=Mismatched(router_noise=0.01), steps=1)
    gaps: dict[str | None, list[float]] = {None: [], "sampler": []}
    for seed in range(4):
        mixture(seed).save_pretrained(tmp_path)
        TOKENIZER.save_pretrained(tmp_path)
        (_, [native]), (_, [replayed]) = (steps_of(replace(noisy, seed=seed, routing_replay=each)) for each in gaps)
        assert native["mismatch_kl"] > 4 * replayed["mismatch_kl"] > 0
        assert native["sampler_gap"] > 2 * replayed["sampler_gap"] > 0
        for gap, row in zip(gaps.values(), (native, replayed), strict=True):
            gap.append(row["sampler_gap"])
    (native, spread), (replayed, small) = ((statistics.mean(gap), half_width(gap)) for gap in gaps.values())
    assert native - spread > 0.001
    assert replayed + small < 0.00015


# The toy with a known answer: a policy over all texts of three letters from an alphabet of three

LETTERS, LENGTH = 3, 3
TEXTS = torch.tensor(list(itertools.product(range(LETTERS), repeat=LENGTH)))
PREFIXES = sorted({tuple(text[:cut]) for text in TEXTS.tolist() for cut in range(LENGTH)})
PLACE = torch.tensor([[PREFIXES.index(tuple(text[:cut])) for cut in range(LENGTH)] for text in TEXTS.tolist()])


def logprobs_of(table: Tensor) -> Tensor:
    """[27, 3]: of every letter of every text; the table has a row of logits for each of the 13 prefixes."""
    return table.log_softmax(dim=-1)[PLACE, TEXTS]


def biases(algorithms: Mapping[str, Algorithm], sigma: float, seed: int) -> dict[str, float]:
    """|expected gradient under the sampler − gradient of the expected reward| / |the latter|, both by enumeration."""
    random = torch.Generator().manual_seed(seed)
    table = torch.randn(len(PREFIXES), LETTERS, generator=random)
    sampler = logprobs_of(table + sigma * torch.randn(len(PREFIXES), LETTERS, generator=random))
    reward = torch.randn(len(TEXTS), generator=random)
    policy = table.clone().requires_grad_()
    (exact,) = torch.autograd.grad((logprobs_of(policy).sum(dim=1).exp() * reward).sum(), policy)
    probability = sampler.sum(dim=1, keepdim=True).exp()
    advantages = (reward - (probability.squeeze(1) * reward).sum()).unsqueeze(1).expand_as(sampler)
    found = {}
    for name, algorithm in algorithms.items():
        policy = table.clone().requires_grad_()
        logprobs = logprobs_of(policy)
        loss, _ = proximo.policy_loss(
            algorithm,
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            rollout_logprobs=sampler,
            advantages=advantages,
            mask=torch.ones_like(sampler, dtype=torch.bool),
            group=torch.zeros(len(TEXTS), dtype=torch.long),
            weights=probability.expand_as(sampler),  # each text as often as the sampler says it
        )
        (gradient,) = torch.autograd.grad(-loss, policy)
        found[name] = float((gradient - exact).norm() / exact.norm())
    return found


PLAIN = replace(GRPO, kl=None)
TOY = {
    "none": PLAIN,
    "tis": replace(PLAIN, correct=TokenTruncated()),
    "icepop": replace(PLAIN, correct=IcePop()),
    "mis": replace(PLAIN, correct=SequenceMasked()),
    "sequence_tis": replace(PLAIN, correct=SequenceTruncated()),
    "uncapped": replace(PLAIN, correct=SequenceTruncated(math.inf)),
    "bypass": replace(PLAIN, anchor=SamplerPolicy()),
    "geometric": replace(PLAIN, correct=GeometricRejection(0.9, 1.1)),
}


def test_corrections_reduce_the_bias_of_the_gradient():
    trials = [biases(TOY, sigma=0.3, seed=seed) for seed in range(30)]
    mean = {name: sum(trial[name] for trial in trials) / len(trials) for name in TOY}
    expected = {"none": 0.324, "tis": 0.239, "icepop": 0.240, "mis": 0.147, "sequence_tis": 0.019}
    assert {name: mean[name] for name in expected} == pytest.approx(expected, abs=1e-3)
    # A token's own weight repairs its own surprise and not what came before it: better, not right, in most trials.
    for name in ("tis", "icepop", "mis"):
        assert sum(trial[name] < trial["none"] for trial in trials) >= 24, name
    assert all(trial["sequence_tis"] < trial["none"] for trial in trials)
    # A completion's whole weight is right, exactly so without a cap.
    assert max(trial["uncapped"] for trial in trials) < 1e-10
    # A rejection is a choice, not a weight, and so is what a clip blocks: both add bias of their own (0.629, 0.537).
    assert min(mean["geometric"], mean["bypass"]) > mean["none"]


def test_on_an_exact_sampler_nothing_is_biased():
    trial = biases(TOY, sigma=0.0, seed=0)
    assert max(trial.values()) < 1e-10


# GSPO's ratio as an importance weight


def test_only_the_ratio_of_whole_completions_is_an_unbiased_weight():
    """Four symbols from three, drawn independently; f counts the last symbol, so that E_new[f] is 4 · 0.5."""
    texts = torch.tensor(list(itertools.product(range(3), repeat=4)))
    old, new = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    probability, log_ratio = old[texts].prod(dim=1), (new / old).log()[texts]
    count, mask = (texts == 2).sum(dim=1), torch.ones_like(texts, dtype=torch.bool)

    def estimate(weight: Tensor) -> float:
        return float((probability * weight * count).sum())

    assert estimate(SequenceProductRatio()(log_ratio, mask)[:, 0].exp()) == pytest.approx(4 * 0.5, abs=1e-12)
    # s: 4 · E[r^¼, c] · E[r^¼]³, with r = 0.4, 1, 2.5 for the three symbols.
    root = 0.5 * 0.4**0.25 + 0.3 + 0.2 * 2.5**0.25
    expected = 4 * 0.2 * 2.5**0.25 * root**3
    assert estimate(SequenceRatio()(log_ratio, mask)[:, 0].exp()) == pytest.approx(expected, abs=1e-12)
    assert expected == pytest.approx(0.860, abs=5e-4)
    # The token mean: (4 · E[r, c] + 12 · E[r] · E[c]) / 4. Without a weight: 4 · 0.2.
    assert estimate(TokenRatio()(log_ratio, mask).exp().mean(dim=1)) == pytest.approx(1.1, abs=1e-12)
    assert estimate(torch.ones(len(texts))) == pytest.approx(0.8, abs=1e-12)
    # A difference of log-probs is no weight: under the old policy its mean is −4 · KL(old‖new), not 1.
    assert estimate(log_ratio.sum(dim=1)) == pytest.approx(0.073, abs=5e-4)
    kl = float((old * (old / new).log()).sum())
    assert float((probability * log_ratio.sum(dim=1)).sum()) == pytest.approx(-4 * kl, abs=1e-12)
    # These are the numbers of the page.
    page = (ROOT / "docs" / "algorithms" / "gspo.md").read_text()
    table = page.partition("| weight | estimate of E_new[f] = 2 |\n|---|---|\n")[2].partition("\n\n")[0]
    assert re.findall(r"\| ([\d.]+) \|$", table, re.MULTILINE) == ["2", "1.1", f"{expected:.3f}", "0.8", "0.073"]


# SAPO's gate and GSPO's


def test_the_distance_between_the_soft_gate_and_the_sequence_gate_by_hand():
    # A row with z = (ln 2, −ln 2): z̄ is 0 and the sequence gate whole; r − 1 is 1 and −1/2.
    gap = SoftGate(2.0, 4.0).sequence_gap(
        torch.tensor([[LN2, -LN2, 9.0]]), torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[True, True, False]])
    )
    real = (1 / math.cosh(1) ** 2 + 1 / math.cosh(0.5) ** 2) / 2
    assert gap.flatten().tolist() == pytest.approx([1 - real] * 3)
    worse = SoftGate(2.0, 4.0).sequence_gap(
        torch.tensor([[LN2, -LN2]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    )
    assert worse[0, 0] == pytest.approx(1 - (1 / math.cosh(2) ** 2 + 1 / math.cosh(1) ** 2) / 2)


@pytest.mark.parametrize("make", [dense, mixture])
def test_the_gates_law_holds_on_a_real_packed_batch(make):
    """A completion's mean gate stays within τ²/4 · (Var(r) + |(r̄ − 1)² − z̄²|) of the sequence gate, z = log r."""
    model = make()
    completions = local_sampler(model, TOKENIZER).sample(REQUESTS, SamplingOptions(max_tokens=12), seed=0, step=0)
    for seed in range(4):
        move(model, seed)
        gaps = scored(model, completions).split([len(each.tokens) for siblings in completions for each in siblings])
        assert max(float(z.abs().max()) for z in gaps) > 0.01
        for tau, z in itertools.product((0.5, 1.0, 1.05, 4.0), gaps):
            r, row = z.exp(), z.unsqueeze(0)
            distance = SoftGate(tau, tau).sequence_gap(row, torch.ones_like(row), torch.ones_like(row).bool())[0, 0]
            assert distance <= tau**2 / 4 * (r.var(correction=0) + ((r.mean() - 1) ** 2 - z.mean() ** 2).abs()) + 1e-12


def test_only_a_soft_gate_reports_its_distance():
    for algorithm, reports in ((SAPO, True), (GRPO, False)):
        trainer = learner(algorithm)
        batch = assemble([group_of(0), group_of(0)], [], trainer, 8).batch
        first, second = (update.stats.floats() for update in trainer.updates(batch))
        assert ("sapo_gap" in first) is reports
        if reports:
            assert first["sapo_gap"] == pytest.approx(0, abs=1e-6)
            assert second["sapo_gap"] > 1e-7
