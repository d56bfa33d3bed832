"""Studies on answers of many lengths: sums worked out behind filler words."""

from dataclasses import dataclass, replace

from torch import Tensor

from proximo.algorithms import DAPO, GRPO
from proximo.losses.pieces.filters import KeepAll
from proximo.losses.pieces.gates import Clip
from proximo.losses.pieces.shaping import LinearOverlong, SoftOverlong
from proximo.losses.pieces.weights import SequenceMean, TokenMean
from proximo.recipes.presets import LENGTH
from proximo.rl.config import EvaluationOptions
from proximo.samplers.sampler import SamplingOptions
from proximo.types.tensor_types import Float, Int
from proximo_lab.studies.designs.settings import TWINS, TWINS_LATER, alike, changed, in_world, trained, twins
from proximo_lab.studies.measures import (
    AREA_BY_SECONDS,
    AREA_BY_TOKENS,
    SAMPLED_ACCURACY,
    SAMPLED_AREA,
    UNSTEADY,
    at_end,
    growth,
    over_run,
)
from proximo_lab.studies.study import Arm, Contrast, Study, Tuning

BASE = in_world(LENGTH, replace(GRPO, kl=None))
TUNING = Tuning((1e-4, 2e-4, 4e-4), (100, 101), SAMPLED_AREA)
WORLD = (
    "A model of about a million parameters and sums behind filler words that mean nothing: half of the answers are "
    "shorter than 32 tokens, a twentieth longer than 113."
)
LENGTHENED = growth("length", "growth of the length")
CUT = over_run("truncated", "cut off", "share of the completions")


@dataclass(frozen=True)
class TokenBonus:
    """A reward for every token, whatever the answer: what must make answers longer."""

    coefficient: float = 0.05
    """Reward of a token, in units of half the distance between right and wrong."""

    def __call__(self, lengths: Int[Tensor, " B"], completion_limit: int, unit: float) -> Float[Tensor, " B"]:
        return unit * self.coefficient * lengths.double()


_LONGER = Arm("bonus on length", changed(BASE, shape=TokenBonus()))
_SAME = Arm("sequence mean, one rate", BASE)
BONUS_SHOWS = Contrast("a bonus on each token lengthens answers", _LONGER.name, _SAME.name, LENGTHENED, 0.25)
_LIMITED = replace(BASE, sampling=SamplingOptions(temperature=1.0, max_tokens=48))
_LIMITED_TWINS = twins("wrong, one rate", _LIMITED)

OVERLONG = Study(
    name="overlong",
    title="Answers that are cut off",
    claim="Assigning a punitive reward to truncated samples may introduce noise … this penalty can potentially confuse "
    "the model … Soft Overlong Punishment.",
    source="DAPO (Yu et al., 2025, arXiv:2503.14476), section 3.4",
    question="With a limit of 48 tokens, is it better to count cut-off answers as wrong, to leave them out, or to add "
    "a soft penalty?",
    arms=(
        Arm("wrong", _LIMITED, tuned=True),
        Arm("left out", changed(_LIMITED, keep=KeepAll(truncated=False)), tuned=True),
        Arm("soft", changed(_LIMITED, shape=SoftOverlong()), tuned=True),
        Arm("linear", changed(_LIMITED, shape=LinearOverlong(0.02, limit=24)), tuned=True),
        _SAME,
        _LONGER,
        *_LIMITED_TWINS,
    ),
    seeds=tuple(range(10, 15)),
    contrasts=(
        Contrast("a soft penalty learns more", "soft", "wrong", SAMPLED_AREA, 0.03, (8,)),
        Contrast("and shortens answers", "soft", "wrong", LENGTHENED, -0.1, (8,)),
        Contrast("leaving cut-off answers out learns more", "left out", "wrong", SAMPLED_AREA, 0.03, (41,)),
        Contrast("its gradient is steadier", "left out", "wrong", UNSTEADY, -0.1, (41,)),
    ),
    positive=(BONUS_SHOWS,),
    negative=(alike(_LIMITED_TWINS, SAMPLED_AREA, 0.03),),
    measures=(SAMPLED_ACCURACY, SAMPLED_AREA, LENGTHENED, CUT, UNSTEADY),
    curve="truncated",
    caveats=(
        WORLD,
        "Brevity itself is a way to be right more often under a limit: the penalty teaches it, and so does counting "
        "cut-off answers as wrong.",
        "How many of the cut-off answers would have been right is not measured.",
    ),
    change="answers that need their length.",
    run_seconds=48,
    tuning=TUNING,
    afterwards=(
        "The first design had a penalty on length as its positive control. It could not come out: every arm halves its "
        "answers, and the penalty was to halve them once more (−0.064, −0.219 to +0.090, 5 seeds). The control became "
        "a bonus, which pulls the other way, and the seeds new ones; no arm of this study but the tuning had been run.",
        TWINS_LATER,
        "Planned at first and not done: limits at three percentiles of the length, a penalty of twice the size, and "
        "the share of cut-off answers that would have been right.",
    ),
    later=TWINS,
    quick_steps=20,
)

_CUT_OFF = replace(
    BASE,
    sampling=SamplingOptions(temperature=1.0, max_tokens=64),
    evaluation=EvaluationOptions(problems=100, every=20, samples=4),
)
"""Config with a limit that cuts off a fifth of the first answers."""
_FILTER = changed(_CUT_OFF, keep=KeepAll(truncated=False))
_HIGHER = changed(_FILTER, gate=Clip(0.2, 0.28))
_SOFT = changed(_HIGHER, keep=KeepAll(), shape=SoftOverlong())
_TOKENS = changed(_SOFT, weights=TokenMean())
_WHOLE = replace(_CUT_OFF, algorithm=DAPO)
_RUNGS = {
    "grpo": _CUT_OFF,
    "+ overlong filter": _FILTER,
    "+ clip-higher": _HIGHER,
    "+ soft overlong": _SOFT,
    "+ token mean": _TOKENS,
    "+ dynamic sampling (DAPO)": _WHOLE,
    "DAPO − clip-higher": changed(_WHOLE, gate=Clip(0.2, 0.2)),
    "DAPO − soft overlong": changed(_WHOLE, shape=None),
    "DAPO − token mean": changed(_WHOLE, weights=SequenceMean()),
}
_GRPO, _FILTERED, _HIGHER_CLIP, _PENALTY, _BY_TOKEN, _DAPO = tuple(_RUNGS)[:6]
_TWINS = twins("grpo at 0.0002", _CUT_OFF)
_SLOW = Arm("grpo at 1e-05", trained(_CUT_OFF, learning_rate=1e-5))


def _adds(what: str, arm: str, against: str, *claims: int) -> Contrast:
    return Contrast(what, arm, against, SAMPLED_AREA, 0.02, claims)


def _lost(what: str, arm: str) -> Contrast:
    return Contrast(what, arm, _DAPO, SAMPLED_AREA, -0.02)


DAPO_LADDER = Study(
    name="dapo-ladder",
    title="DAPO's ladder",
    claim="Each of the techniques (overlong filtering, clip-higher, soft overlong punishment, token-level loss, "
    "dynamic sampling) improves on the naive GRPO.",
    source="DAPO (Yu et al., 2025, arXiv:2503.14476), table 1",
    question="What does each of DAPO's changes add, by updates, by sampled tokens and by seconds, and what is lost "
    "without it?",
    arms=(*(Arm(name, config, tuned=True) for name, config in _RUNGS.items()), _SLOW, *_TWINS),
    seeds=tuple(range(20, 28)),
    contrasts=(
        _adds("DAPO learns more by updates", _DAPO, _GRPO, 21),
        Contrast("and by tokens", _DAPO, _GRPO, AREA_BY_TOKENS, 0.02, (21,)),
        Contrast("dynamic sampling learns more by tokens", _DAPO, _BY_TOKEN, AREA_BY_TOKENS, 0.02, (7,)),
        _adds("by updates", _DAPO, _BY_TOKEN, 7),
        Contrast("its gradient is steadier", _DAPO, _BY_TOKEN, UNSTEADY, -0.1, (37,)),
        _adds("the overlong filter", _FILTERED, _GRPO),
        _adds("clip-higher", _HIGHER_CLIP, _FILTERED),
        _adds("the soft penalty in the filter's place", _PENALTY, _HIGHER_CLIP),
        _adds("the token mean", _BY_TOKEN, _PENALTY),
        _lost("without clip-higher less", "DAPO − clip-higher"),
        _lost("without the soft penalty less", "DAPO − soft overlong"),
        _lost("without the token mean less", "DAPO − token mean"),
        _lost("without dynamic sampling less", _BY_TOKEN),
    ),
    positive=(Contrast("a rate of 1e-5 learns less", _SLOW.name, _TWINS[0].name, SAMPLED_AREA, -0.03),),
    negative=(alike(_TWINS, SAMPLED_AREA, 0.02),),
    timed=(
        Contrast("DAPO learns more by seconds", _DAPO, _GRPO, AREA_BY_SECONDS, 0.02),
        Contrast("dynamic sampling", _DAPO, _BY_TOKEN, AREA_BY_SECONDS, 0.02),
        Contrast("the overlong filter", _FILTERED, _GRPO, AREA_BY_SECONDS, 0.02),
        Contrast("runs that differ by rounding", _TWINS[1].name, _TWINS[0].name, AREA_BY_SECONDS, 0.02),
    ),
    measures=(
        SAMPLED_ACCURACY,
        SAMPLED_AREA,
        AREA_BY_TOKENS,
        over_run("dead_groups", "dead groups", "share of the groups"),
        UNSTEADY,
        CUT,
        at_end("length", "length at the end", "tokens"),
    ),
    curve="mean_at_k",
    held_out=True,
    drawn=tuple(_RUNGS)[:6],
    caveats=(
        WORLD,
        "Dynamic sampling draws more for each update: it is compared by updates, by tokens and by seconds.",
        "One order of the ladder; taking each away from the whole is the other view of it.",
        "The soft penalty takes the place of the overlong filter, as in DAPO itself: with both, an answer at the limit "
        "would be punished and then left out.",
        "A first study had a limit of 96 tokens, a filter of dead groups in place of the overlong filter and five "
        "other seeds. DAPO learned more by updates (+0.049, +0.037 to +0.061) and by tokens (+0.030, +0.005 to "
        "+0.056), nearly all of it by dynamic sampling. Its best rates were the highest that it tried, so there is one "
        "more here.",
    ),
    afterwards=(
        "The verdict is about the whole against GRPO. That each technique improves is not shown: dynamic sampling does "
        "by updates. Added last and taken away it is the same two arms, so these are one comparison.",
        "The tuning, on two seeds, gave 4e-4 to the whole and 2e-4 to the whole without the token mean and without "
        "dynamic sampling. What the token mean does by itself cannot be told from it: in the tuning the whole had 45.5 "
        "and 48.6 % at 2e-4 and 50.0 and 53.8 % at 4e-4, without the token mean 48.1 and 49.7 %, then 46.1 and 50.7 %. "
        "In the first study both had 4e-4, and nothing that counts was lost without it (+0.003, −0.015 to +0.021).",
        "By tokens dynamic sampling adds nothing that counts. By seconds it looks like a loss, but there even runs "
        "that differ by rounding are only known to be within 0.02: seconds are too noisy for a verdict.",
    ),
    change="longer runs, in which entropy collapses and groups die.",
    run_seconds=32,
    tuning=Tuning((1e-4, 2e-4, 4e-4, 8e-4), (100, 101), SAMPLED_AREA),
    quick_steps=20,
)
