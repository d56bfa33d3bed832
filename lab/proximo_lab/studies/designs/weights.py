"""The study of how a loss weighs tokens and sequences, on answers of many lengths."""

from dataclasses import replace

from proximo.losses.pieces.weights import ConstantLength, PromptMean, SequenceMean, TokenMean, Weights
from proximo.rl.config import EvaluationOptions
from proximo.samplers.sampler import SamplingOptions
from proximo_lab.studies.designs.length import BASE, CUT, LENGTHENED, WORLD, TokenBonus
from proximo_lab.studies.designs.settings import NEAR, changed, trained
from proximo_lab.studies.measures import OUTCOMES, UNSTEADY, growth, over_run, rise
from proximo_lab.studies.study import Arm, Contrast, Measure, Study

_WRONG = growth("length_wrong", "growth of wrong answers")
_LOOPS = over_run("loops", "loops", "share of the completions")
_ENTROPY = rise("entropy", "rise of the entropy", "nats a token")
_FIRST_LOOPS = Measure(
    "loops at first",
    "share of the completions",
    "`loops` of the first step",
    lambda run: run.known("loops")[0],
)
LIMITS = TIGHT, ROOMY = 64, 256
"""Tokens of a completion: the first cuts off a fifth of them, the second hardly any, so that length and reward are
independent."""
RATES = SLOWER, FASTER = 2e-4, 4e-4
WEIGHTS: dict[str, Weights] = {
    "sequence mean": SequenceMean(),
    "token mean": TokenMean(),
    "prompt mean": PromptMean(),
    "constant length": ConstantLength(),
}


def _weighted(name: str, limit: int, rate: float) -> Arm:
    """Training problems hardly ever repeat, so their outcomes are those of new problems; a few are held out."""
    config = replace(
        trained(changed(BASE, weights=WEIGHTS[name]), learning_rate=rate),
        sampling=SamplingOptions(temperature=1.0, max_tokens=limit),
        evaluation=EvaluationOptions(problems=100, samples=4),
    )
    return Arm(_weighted_name(name, limit, rate), config)


def _weighted_name(name: str, limit: int, rate: float) -> str:
    return f"{name}, limit {limit}, {rate:g}"


def _than_sequences(
    what: str, name: str, limit: int, rate: float, measure: Measure, counts: float, *claims: int
) -> Contrast:
    ours, theirs = (_weighted_name(each, limit, rate) for each in (name, "sequence mean"))
    return Contrast(f"{what}, limit {limit}, rate {rate:g}", ours, theirs, measure, counts, claims)


_PAID = Arm("bonus on length, limit 64", changed(_weighted("sequence mean", TIGHT, SLOWER).config, shape=TokenBonus()))
_SUMS = {name: Arm(f"{name}, sums", changed(NEAR, weights=WEIGHTS[name])) for name in ("sequence mean", "token mean")}

TOKEN_MEAN = Study(
    name="token-mean",
    title="The token mean and length",
    claim="Since all samples are assigned the same weight, tokens within longer responses may have a "
    "disproportionately lower contribution … sample-level loss cannot effectively penalize undesirable patterns in "
    "long samples, which leads to an unhealthy increase in entropy and response length.",
    source="DAPO (Yu et al., 2025, arXiv:2503.14476), section 3.3",
    question="Do wrong answers, loops or entropy grow under a mean over each sequence, and less under a mean over all "
    "tokens?",
    arms=(
        *(_weighted(name, limit, rate) for limit in LIMITS for rate in RATES for name in WEIGHTS),
        _PAID,
        *_SUMS.values(),
    ),
    seeds=tuple(range(20, 25)),
    contrasts=(
        *(
            _than_sequences("wrong answers grow less with the token mean", "token mean", limit, rate, _WRONG, -0.25, 39)
            for limit in LIMITS
            for rate in RATES
        ),
        *(
            _than_sequences("there are fewer loops", "token mean", limit, rate, _LOOPS, -0.02, 39)
            for limit in LIMITS
            for rate in RATES
        ),
        *(
            _than_sequences("the gradient is steadier", "token mean", limit, SLOWER, UNSTEADY, -0.1, 5)
            for limit in LIMITS
        ),
        *(_than_sequences("more is learned", "token mean", limit, SLOWER, OUTCOMES, 0.03, 5) for limit in LIMITS),
        *(_than_sequences("entropy rises less", "token mean", limit, SLOWER, _ENTROPY, -0.05, 40) for limit in LIMITS),
        *(
            _than_sequences(f"wrong answers grow less with the {name}", name, TIGHT, SLOWER, _WRONG, -0.25)
            for name in ("prompt mean", "constant length")
        ),
    ),
    positive=(
        Contrast(
            "a bonus on each token lengthens answers",
            _PAID.name,
            _weighted_name("sequence mean", TIGHT, SLOWER),
            LENGTHENED,
            0.25,
        ),
        Contrast("the model loops", _weighted_name("sequence mean", ROOMY, SLOWER), None, _FIRST_LOOPS, 0.1),
    ),
    negative=(
        Contrast(
            "where answers have three tokens nothing differs",
            _SUMS["token mean"].name,
            _SUMS["sequence mean"].name,
            OUTCOMES,
            0.03,
        ),
    ),
    measures=(
        LENGTHENED,
        _WRONG,
        growth("length_right", "growth of right answers"),
        _LOOPS,
        _ENTROPY,
        UNSTEADY,
        CUT,
        OUTCOMES,
    ),
    curve="length_wrong",
    drawn=(
        *(_weighted_name(name, TIGHT, SLOWER) for name in WEIGHTS),
        *(_weighted_name(name, ROOMY, SLOWER) for name in ("sequence mean", "token mean")),
        _PAID.name,
    ),
    caveats=(
        WORLD,
        "Fine-tuning gave the model its lengths, independent of being right; a large model's own lengths are not.",
        "The weights change the size of the step, so that every arm is there at two rates.",
        "An earlier study (five other seeds, tuned rates, limits of 96 and 160) found −0.008 (−0.180 to +0.164) in the "
        "growth of wrong answers and −0.015 (−0.063 to +0.033) in loops.",
    ),
    afterwards=(
        "Answers of the control's sums have one to four tokens, most of them three, so that the two weightings are "
        "nearly, not exactly, the same loss there.",
    ),
    change="a model that repeats itself when it is lost.",
    run_seconds=66,
    quick_steps=20,
)
