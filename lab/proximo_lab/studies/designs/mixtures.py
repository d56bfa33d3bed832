"""Studies of mixtures of experts."""

from dataclasses import replace

from proximo.algorithms import GRPO, GSPO, SAPO
from proximo.losses.pieces.gates import Clip
from proximo.recipes.presets import MOE_ECHO
from proximo_lab.studies.designs.settings import at, at_rate, changed, copies, trained
from proximo_lab.studies.measures import BLOCKED, COLLAPSE, COLLAPSED, OUTCOMES, RATIO_SPREAD, at_end, over_run
from proximo_lab.studies.study import Contrast, Study

LETTERS, MANY = 32, 5 / 8
RATES = LOW, MIDDLE, HIGH, HIGHER = 3e-4, 6e-4, 7e-4, 8e-4
"""Learning rates from one at which hardly any run collapses to one at which most do."""
FATAL = 1e-3
"""A rate at which all do."""
_DRIFT = over_run("routing_drift", "experts changed by one update", "share of the experts")
_END = at_end("outcome", "outcome at the end", "share")
_PLAIN = {
    name: copies(MOE_ECHO, algorithm, LETTERS)
    for name, algorithm in {"grpo": replace(GRPO, kl=None), "gspo": replace(GSPO, kl=None), "sapo": SAPO}.items()
}
_REPLAYED = {f"{name} + R2": replace(config, routing_replay="old_policy") for name, config in _PLAIN.items()}
_NARROW, _FROZEN = "grpo, clip 1e-6", "grpo, routers frozen"
_CONTROLS = {
    _NARROW: changed(_PLAIN["grpo"], gate=Clip(1e-6, 1e-6)),
    _FROZEN: trained(_PLAIN["grpo"], freeze=("mlp.gate.weight",)),
}


def _rarer(what: str, arm: str, against: str, rate: float, claims: tuple[int, ...] = ()) -> Contrast:
    """An arm collapses less often than another."""
    return Contrast(f"{what} at {rate:g}", at(arm, rate), at(against, rate), COLLAPSED, -MANY, claims)


def _more(what: str, arm: str, against: str, rate: float, claims: tuple[int, ...] = (), sign: int = 1) -> Contrast:
    """An arm learns more than another, or less."""
    return Contrast(f"{what} at {rate:g}", at(arm, rate), at(against, rate), OUTCOMES, sign * 0.05, claims)


_FATAL = at_rate("grpo", _PLAIN["grpo"], FATAL)
_STILL = at_rate("grpo", _PLAIN["grpo"], 1e-9)

MIXTURE = Study(
    name="mixture",
    title="Mixtures of experts, sequence ratios and replay",
    claim="The volatile expert activation of mixtures prevents GRPO from converging properly without Routing Replay; "
    "GSPO has eliminated the dependency on it.",
    source="GSPO (Zheng et al., 2025, arXiv:2507.18071), section 5.3",
    question="Does a mixture collapse under GRPO and not under GSPO, and what do replay and smaller steps change?",
    arms=(
        *(at_rate(name, config, rate) for rate in RATES for name, config in (_PLAIN | _REPLAYED | _CONTROLS).items()),
        _FATAL,
        _STILL,
    ),
    seeds=tuple(range(8)),
    contrasts=(
        *(_rarer("GSPO collapses less often than GRPO", "gspo", "grpo", rate, (9, 42)) for rate in (HIGHER, HIGH)),
        *(_more("GSPO learns more than GRPO", "gspo", "grpo", rate, (9, 23)) for rate in (MIDDLE, LOW)),
        *(
            _rarer("GRPO with a token clip that blocks as much collapses less often", _NARROW, "grpo", rate)
            for rate in (HIGHER, HIGH)
        ),
        *(_rarer("and GSPO less often than that", "gspo", _NARROW, rate, (9,)) for rate in (HIGHER, HIGH)),
        *(_rarer("replay keeps GRPO from collapsing", "grpo + R2", "grpo", rate) for rate in (HIGHER, HIGH)),
        *(_more("replay lets GRPO learn more", "grpo + R2", "grpo", rate) for rate in (MIDDLE, LOW)),
        *(_rarer("replay keeps GSPO from collapsing", "gspo + R2", "gspo", rate, (45,)) for rate in (HIGHER, HIGH)),
        *(_more("replay lets GSPO learn less", "gspo + R2", "gspo", rate, (44,), sign=-1) for rate in (MIDDLE, LOW)),
        *(_rarer("frozen routers keep GRPO from collapsing", _FROZEN, "grpo", rate) for rate in (HIGHER, HIGH)),
        *(_more("frozen routers let GRPO learn more", _FROZEN, "grpo", rate) for rate in (MIDDLE, LOW)),
        Contrast(
            f"routes trigger the clip: fewer tokens are blocked with replay at {LOW:g}",
            at("grpo + R2", LOW),
            at("grpo", LOW),
            BLOCKED,
            -0.02,
            (48,),
        ),
        Contrast(f"one update changes experts at {LOW:g}", at("grpo", LOW), None, _DRIFT, 0.005, (29,)),
        *(_rarer("SAPO collapses less often than GRPO", "sapo", "grpo", rate, (11,)) for rate in (HIGHER, MIDDLE)),
        *(_rarer("replay keeps SAPO from collapsing", "sapo + R2", "sapo", rate) for rate in (MIDDLE, LOW)),
    ),
    positive=(
        Contrast(f"GRPO collapses at {FATAL:g}", _FATAL.name, _STILL.name, COLLAPSED, MANY),
        Contrast(f"GRPO learns at {LOW:g}", at("grpo", LOW), _STILL.name, OUTCOMES, 0.05),
        Contrast("the narrow clip blocks", at(_NARROW, LOW), at("grpo", LOW), BLOCKED, 0.2),
    ),
    negative=(
        Contrast("a rate of 1e-9 changes no expert", _STILL.name, None, _DRIFT, 0.005),
        Contrast("and collapses no run", _STILL.name, None, COLLAPSED, MANY),
    ),
    measures=(_END, OUTCOMES, COLLAPSED, _DRIFT, RATIO_SPREAD, BLOCKED),
    curve="outcome",
    drawn=(
        *(at(name, LOW) for name in ("grpo", "gspo", "sapo")),
        *(at(name, HIGHER) for name in ("grpo", "gspo", "sapo", "grpo + R2", _NARROW)),
    ),
    collapse=COLLAPSE,
    caveats=(
        f"A mixture of 0.9 million parameters with tiny routers and copies of {LETTERS} letters.",
        "At these rates weights move more than routes do, so that replay has little to hold.",
        "Rates are not tuned: stability is compared at the same four rates for all, which pilots with other seeds "
        "chose. Experts that differ are counted at the lowest, before runs collapse.",
        "A smaller step prevents a collapse too. A token clip at 1e-6 stands for that: in pilots it blocked 39 % of "
        "the tokens where GSPO blocked 43 %.",
        "A first study had copies of 16 letters and two rates, 3e-4 and 1e-3. GRPO collapsed in 1 of its 8 seeds, GSPO "
        "in none; the seeds here are the same, the problems are others.",
    ),
    afterwards=(
        "At 8e-4 GSPO is spared a collapse in 3 of 8 seeds, and so is GRPO with the narrow token clip; at 7e-4 in 4 "
        "and in 3, where GRPO is in 2. Eight seeds cannot tell that from nothing.",
        "Runs collapse in their first steps, before routes could have drifted far; neither replay nor frozen routers "
        "prevent it.",
        "The token clip blocked 38 % of the tokens at 3e-4, as many as GSPO, and 35 to 38 % at higher rates, where "
        "GSPO blocked 44 to 45 %.",
        "Planned at first were rates from 1e-3 to 3e-3, at which all arms collapse on copies of this length within "
        "four steps. The rates here are those between which they begin to.",
    ),
    change="a mixture whose routers change more experts in one update than the 10 % of the paper's.",
    run_seconds=26,
    quick_steps=12,
)
