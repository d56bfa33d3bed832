"""Studies of mixtures of experts."""

from dataclasses import replace

from proximo.algorithms import GRPO, GSPO, SAPO
from proximo.maths.pieces.gates import Clip
from proximo.presets import MOE_ECHO
from proximo.studies.designs.settings import changed, in_world, trained
from proximo.studies.measures import (
    BEFORE,
    BLOCKED,
    COLLAPSE,
    COLLAPSED,
    RATIO_SPREAD,
    SAMPLED_ACCURACY,
    SAMPLED_AREA,
    over_run,
)
from proximo.studies.study import Arm, Contrast, Study
from proximo.training.config import RunConfig

MANY, HIGH, LOW = 5 / 8, 1e-3, 3e-4
_GRPO, _GSPO, _SAPO = (
    in_world(MOE_ECHO, algorithm) for algorithm in (replace(GRPO, kl=None), replace(GSPO, kl=None), SAPO)
)
_DRIFT = over_run("routing_drift", "experts changed by one update", "share of the experts")


def _arm(name: str, config: RunConfig, rate: float) -> Arm:
    return Arm(f"{name} at {rate:g}", trained(config, learning_rate=rate))


def _replayed(config: RunConfig) -> RunConfig:
    return replace(config, routing_replay="old_policy")


_PLAIN = {"grpo": _GRPO, "gspo": _GSPO, "sapo": _SAPO}
_REPLAYED = {f"{name} + R2": _replayed(config) for name, config in _PLAIN.items()}
_STILL = _arm("grpo", _GRPO, 1e-9)

MIXTURE = Study(
    name="mixture",
    title="Mixtures of experts, sequence ratios and replay",
    claim="The volatile expert activation of mixtures prevents GRPO from converging properly without Routing Replay; "
    "GSPO has eliminated the dependency on it.",
    source="GSPO (Zheng et al., 2025, arXiv:2507.18071), section 5.3",
    question="Does a mixture collapse under GRPO and not under GSPO, and what do replay and smaller steps change?",
    arms=(
        *(_arm(name, config, HIGH) for name, config in (_PLAIN | _REPLAYED).items()),
        *(_arm(name, config, LOW) for name, config in _PLAIN.items()),
        _arm("grpo, clip 0.0003", changed(_GRPO, gate=Clip(3e-4, 4e-4)), HIGH),
        _arm("grpo, routers frozen", trained(_GRPO, freeze=("mlp.gate.weight",)), HIGH),
        _STILL,
    ),
    seeds=tuple(range(8)),
    contrasts=(
        Contrast("GSPO collapses less often than GRPO", "gspo at 0.001", "grpo at 0.001", COLLAPSED, -MANY, (9, 42)),
        Contrast("and learns more", "gspo at 0.001", "grpo at 0.001", SAMPLED_AREA, 0.05, (9, 23)),
        Contrast(
            "GRPO with GSPO's band on tokens collapses less often",
            "grpo, clip 0.0003 at 0.001",
            "grpo at 0.001",
            COLLAPSED,
            -MANY,
        ),
        Contrast(
            "at a third of the rate GSPO learns more", "gspo at 0.0003", "grpo at 0.0003", SAMPLED_AREA, 0.05, (23,)
        ),
        Contrast("replay lets GRPO learn more", "grpo + R2 at 0.001", "grpo at 0.001", SAMPLED_AREA, 0.05, (45,)),
        Contrast("replay lets GSPO learn less", "gspo + R2 at 0.001", "gspo at 0.001", SAMPLED_AREA, -0.05, (44,)),
        Contrast("frozen routers help GRPO", "grpo, routers frozen at 0.001", "grpo at 0.001", SAMPLED_AREA, 0.05),
        Contrast(
            "routes trigger the clip: fewer are blocked with replay",
            "grpo + R2 at 0.001",
            "grpo at 0.001",
            BLOCKED,
            -0.02,
            (48,),
        ),
        Contrast("one update changes experts", "grpo at 0.0003", None, _DRIFT, 0.005, (29,)),
        Contrast("SAPO collapses less often than GRPO", "sapo at 0.001", "grpo at 0.001", COLLAPSED, -MANY, (11,)),
    ),
    positive=(
        Contrast("three times the rate changes more experts", "grpo at 0.001", "grpo at 0.0003", _DRIFT, 0.005),
        Contrast("GRPO learns at the lower rate", "grpo at 0.0003", _STILL.name, SAMPLED_AREA, 0.05),
    ),
    negative=(
        Contrast("a rate of 1e-9 changes no expert", _STILL.name, None, _DRIFT, 0.005),
        Contrast("before the first step nothing differs", "gspo at 0.001", "grpo at 0.001", BEFORE, 0.001),
    ),
    measures=(SAMPLED_ACCURACY, SAMPLED_AREA, COLLAPSED, _DRIFT, RATIO_SPREAD, BLOCKED),
    curve="outcome",
    collapse=COLLAPSE,
    caveats=(
        "A mixture of about a million parameters with tiny routers and copies of 16 letters.",
        "At these rates weights move more than routes do, so that replay has little to hold.",
        "Rates are not tuned: stability is compared at the same two rates for all.",
        "A smaller step prevents a collapse too; the arm with GSPO's band on tokens and the lower rate stand for that.",
    ),
    change="a mixture whose routers change more experts in one update than the 10 % of the paper's.",
    run_seconds=55,
    quick_steps=12,
)
