"""Studies on answers of many lengths: sums worked out behind filler words."""

from dataclasses import dataclass, replace

from torch import Tensor

from proximo.algorithms import DAPO, GRPO
from proximo.maths.pieces.gates import Clip
from proximo.maths.pieces.keeping import KeepAll, KeepMixed
from proximo.maths.pieces.shaping import LinearOverlong, SoftOverlong
from proximo.maths.pieces.weights import SequenceMean, TokenMean
from proximo.presets import LENGTH
from proximo.samplers import SamplingOptions
from proximo.studies.designs.settings import changed, in_world, trained
from proximo.studies.measures import (
    AREA_BY_TOKENS,
    BEFORE,
    SAMPLED_ACCURACY,
    SAMPLED_AREA,
    UNSTEADY,
    at_end,
    growth,
    over_run,
)
from proximo.studies.study import Arm, Contrast, Study, Tuning
from proximo.tensor_types import Float, Int

BASE = in_world(LENGTH, replace(GRPO, kl=None))
TUNING = Tuning((1e-4, 2e-4, 4e-4), (100, 101), SAMPLED_AREA)
SEEDS = tuple(range(5))
AGAIN = tuple(range(10, 15))
"""Seeds of two studies whose first control could not come out: no result was seen with these before."""
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
UNTRAINED = "before the first step nothing differs"
BONUS_SHOWS = Contrast("a bonus on each token lengthens answers", _LONGER.name, _SAME.name, LENGTHENED, 0.25)
ANOTHER_CONTROL = (
    "The first design had a penalty on length as its positive control. It could not come out: every arm halves its "
    "answers, and the penalty was to halve them once more (−0.064, −0.219 to +0.090, 5 seeds). The control became a "
    "bonus, which pulls the other way, and the seeds new ones; {rest}"
)

_LIMITED = replace(BASE, sampling=SamplingOptions(temperature=1.0, max_tokens=48))

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
    ),
    seeds=AGAIN,
    contrasts=(
        Contrast("a soft penalty learns more", "soft", "wrong", SAMPLED_AREA, 0.03, (8,)),
        Contrast("and shortens answers", "soft", "wrong", LENGTHENED, -0.1, (8,)),
        Contrast("leaving cut-off answers out learns more", "left out", "wrong", SAMPLED_AREA, 0.03, (41,)),
        Contrast("its gradient is steadier", "left out", "wrong", UNSTEADY, -0.1, (41,)),
    ),
    positive=(BONUS_SHOWS,),
    negative=(Contrast(UNTRAINED, "soft", "wrong", BEFORE, 0.001),),
    measures=(SAMPLED_ACCURACY, SAMPLED_AREA, LENGTHENED, CUT, UNSTEADY),
    curve="truncated",
    caveats=(
        WORLD,
        "Brevity itself is a way to be right more often under a limit: the penalty teaches it, and so does counting "
        "cut-off answers as wrong.",
        "How many of the cut-off answers would have been right is not measured.",
    ),
    change="answers that need their length.",
    run_seconds=60,
    tuning=TUNING,
    afterwards=(ANOTHER_CONTROL.format(rest="no arm of this study but the tuning had been run."),),
    quick_steps=20,
)

_FILTER = trained(changed(BASE, keep=KeepMixed()), refill_rounds=1)
_HIGHER = changed(_FILTER, gate=Clip(0.2, 0.28))
_SOFT = changed(_HIGHER, shape=SoftOverlong())
_TOKENS = changed(_SOFT, weights=TokenMean())
_WHOLE = replace(BASE, algorithm=DAPO)
_SLOW = Arm("a twentieth of the rate", trained(BASE, learning_rate=1e-5))

DAPO_LADDER = Study(
    name="dapo-ladder",
    title="DAPO's ladder",
    claim="Each of the techniques (overlong filtering, clip-higher, soft overlong punishment, token-level loss, "
    "dynamic sampling) improves on the naive GRPO.",
    source="DAPO (Yu et al., 2025, arXiv:2503.14476), table 1",
    question="What does each of DAPO's changes add, by updates and by sampled tokens, and what is lost without it?",
    arms=(
        Arm("grpo", BASE, tuned=True),
        Arm("+ filter", _FILTER, tuned=True),
        Arm("+ clip-higher", _HIGHER, tuned=True),
        Arm("+ soft overlong", _SOFT, tuned=True),
        Arm("+ token mean", _TOKENS, tuned=True),
        Arm("+ dynamic sampling (DAPO)", _WHOLE, tuned=True),
        Arm("DAPO − clip-higher", changed(_WHOLE, gate=Clip(0.2, 0.2)), tuned=True),
        Arm("DAPO − soft overlong", changed(_WHOLE, shape=None), tuned=True),
        Arm("DAPO − token mean", changed(_WHOLE, weights=SequenceMean()), tuned=True),
        _SLOW,
        _SAME,
    ),
    seeds=SEEDS,
    contrasts=(
        Contrast("DAPO learns more by updates", "+ dynamic sampling (DAPO)", "grpo", SAMPLED_AREA, 0.02, (21,)),
        Contrast("and by tokens", "+ dynamic sampling (DAPO)", "grpo", AREA_BY_TOKENS, 0.02, (21,)),
        Contrast(
            "dynamic sampling learns more by tokens",
            "+ dynamic sampling (DAPO)",
            "+ token mean",
            AREA_BY_TOKENS,
            0.02,
            (7,),
        ),
        Contrast("by updates", "+ dynamic sampling (DAPO)", "+ token mean", SAMPLED_AREA, 0.02, (7,)),
        Contrast("its gradient is steadier", "+ dynamic sampling (DAPO)", "+ token mean", UNSTEADY, -0.1, (37,)),
        Contrast("the filter alone", "+ filter", "grpo", SAMPLED_AREA, 0.02),
        Contrast("clip-higher", "+ clip-higher", "+ filter", SAMPLED_AREA, 0.02),
        Contrast("the soft penalty", "+ soft overlong", "+ clip-higher", SAMPLED_AREA, 0.02),
        Contrast("the token mean", "+ token mean", "+ soft overlong", SAMPLED_AREA, 0.02),
        Contrast("without clip-higher less", "DAPO − clip-higher", "+ dynamic sampling (DAPO)", SAMPLED_AREA, -0.02),
        Contrast(
            "without the soft penalty less", "DAPO − soft overlong", "+ dynamic sampling (DAPO)", SAMPLED_AREA, -0.02
        ),
        Contrast("without the token mean less", "DAPO − token mean", "+ dynamic sampling (DAPO)", SAMPLED_AREA, -0.02),
    ),
    positive=(Contrast("a twentieth of the rate learns less", _SLOW.name, _SAME.name, SAMPLED_AREA, -0.03),),
    negative=(Contrast(UNTRAINED, "+ dynamic sampling (DAPO)", "grpo", BEFORE, 0.001),),
    measures=(
        SAMPLED_ACCURACY,
        SAMPLED_AREA,
        AREA_BY_TOKENS,
        over_run("dead_groups", "dead groups", "share of the groups"),
        UNSTEADY,
        at_end("length", "length at the end", "tokens"),
    ),
    curve="outcome",
    caveats=(
        WORLD,
        "Dynamic sampling draws more for each update: it is compared by updates and by tokens.",
        "One order of the ladder; taking each away from the whole is the other view of it.",
        "The paper's overlong filter is left out in favour of the soft penalty, as in its last rows.",
    ),
    change="longer runs, in which entropy collapses and groups die.",
    run_seconds=60,
    tuning=TUNING,
    afterwards=(
        "The sentence about the world's lengths was cut off in the stored design by a slip and was completed after "
        "the runs; nothing else changed. The hash before: "
        "35a6d164aceca936eb5339da2f293e1539ef1b35db832abb5f872cb08e66ed11.",
    ),
    quick_steps=20,
)
