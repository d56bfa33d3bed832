"""Studies whose runs are more than training by one config: preferences, and forks around a collapse."""

import math
from collections.abc import Callable
from dataclasses import replace

from proximo.losses.pairwise import Dpo
from proximo.losses.pieces.gates import Clip
from proximo.losses.pieces.ratios import SequenceRatio
from proximo.rl.config import EvaluationOptions, RunConfig
from proximo.rl.evaluate import known_mean
from proximo_lab.studies.designs.gates import FARTHER, MANY
from proximo_lab.studies.designs.settings import NEAR, SMALL, TWINS, TWINS_LATER, alike, changed, trained, twins
from proximo_lab.studies.measures import ACCURACY, BEFORE, COLLAPSED, PASS_AT_K
from proximo_lab.studies.protocols.dpo import Preferred
from proximo_lab.studies.protocols.recovery_forks import FALLEN, SMOOTHED, Change, Forked, fall, fork_curve
from proximo_lab.studies.record import Record
from proximo_lab.studies.study import Arm, Contrast, Measure, Study, Tuning

# Preferences

_BUDGET = replace(NEAR, steps=30, evaluation=EvaluationOptions(problems=500, samples=8))
"""30 steps of 256 completions: 7,680 that are sampled and labelled."""
_DPO = Preferred(loss=Dpo(beta=1.0), epochs=2.0)
_TWINS = twins("grpo, one rate", _BUDGET)
_STILL = Arm("no learning", trained(_BUDGET, learning_rate=1e-12))

DPO_GRPO = Study(
    name="dpo-grpo",
    title="GRPO and DPO on as many completions",
    claim="GRPO samples its own completions, so that covering good and bad cases takes less work on data than DPO's "
    "preference pairs.",
    source="a retelling of GRPO; DPO: Rafailov et al., 2023 (arXiv:2305.18290)",
    question="From 7,680 completions that the model itself samples and the task labels, does GRPO learn more than DPO, "
    "and what do rounds of sampling give DPO?",
    arms=(
        Arm("grpo", _BUDGET, tuned=True),
        Arm("dpo", _BUDGET, tuned=True, course=_DPO),
        Arm("dpo, 3 rounds", _BUDGET, tuned=True, course=replace(_DPO, rounds=3)),
        _STILL,
        *_TWINS,
    ),
    seeds=tuple(range(5)),
    contrasts=(
        Contrast("GRPO ends higher than DPO", "grpo", "dpo", ACCURACY, 0.03, (3,)),
        Contrast("and than DPO in three rounds", "grpo", "dpo, 3 rounds", ACCURACY, 0.03, (3,)),
        Contrast("rounds help DPO", "dpo, 3 rounds", "dpo", ACCURACY, 0.03),
        Contrast("GRPO has more problems within reach of eight samples", "grpo", "dpo", PASS_AT_K, 0.02, (3,)),
    ),
    positive=(
        Contrast("GRPO learns", "grpo", _STILL.name, ACCURACY, 0.1),
        Contrast("DPO learns", "dpo", _STILL.name, ACCURACY, 0.03),
    ),
    negative=(alike(_TWINS, ACCURACY, 0.03),),
    measures=(BEFORE, ACCURACY, PASS_AT_K),
    curve="outcome",
    caveats=(
        SMALL,
        "Sums with their verdict as label, in the place of sorted letters as first planned: no fine-tuning comes "
        "before, and the label is the true reward.",
        "Of each group DPO uses one right and one wrong completion, twice; GRPO uses all eight, once.",
        "The learning rate is tuned for each arm; β of DPO is 1 throughout, as in the pipeline's demo: a pilot with 0.1"
        " at a rate of 1e-4 unlearned most of what the model knew.",
        "The figure shows what is sampled: DPO samples with the model of its last round.",
    ),
    afterwards=(TWINS_LATER,),
    later=TWINS,
    change="pairs that are chosen with care, another β, or labels that cost more for rewards than for preferences.",
    run_seconds=17,
    tuning=Tuning((1e-5, 2e-5, 5e-5, 1e-4), (100, 101), ACCURACY),
    quick_steps=6,
)

# Recovery

HIGH_RATE, END = 4e-4, 5
"""A rate at which most runs collapse, and the last steps of a fork of which the outcome is averaged."""
RETURNED = 0.9
"""Share of the best outcome that counts as a recovery."""
BEFORE_FALL, AFTER_FALL = -4, 3
SAME, TENTH, SEQUENCE = "as it was", "a tenth of the rate", "sequence ratio"


def _stays_down(name: str, offset: int) -> Callable[[Record], float]:
    def of(run: Record) -> float:
        outcomes, forked = run.known("outcome"), run.known(fork_curve(name, offset))
        at = fall(outcomes)
        if at is None or not forked:
            return math.nan
        best = max(known_mean(outcomes[done - SMOOTHED : done]) for done in range(SMOOTHED, at + 1))
        return float(known_mean(forked[-END:]) < RETURNED * best)

    return of


def _down(name: str, offset: int) -> Measure:
    when = f"{abs(offset)} steps {'before' if offset < 0 else 'after'} the fall"
    return Measure(
        f"stays down: {name}, {when}",
        "share of the seeds",
        f"1 if the mean outcome of the last {END} steps of the fork `{name}` from {when} is below {RETURNED:.0%} of "
        f"the run's best before it, else 0; the fall is the step at which the mean outcome of {SMOOTHED} steps is "
        f"first below {FALLEN:.0%} of the best before",
        _stays_down(name, offset),
        grain=1.0,
    )


def _departs(run: Record) -> float:
    outcomes, forked = run.known("outcome"), run.known(fork_curve(SAME, BEFORE_FALL))
    at = fall(outcomes)
    if at is None or not forked:
        return math.nan
    undisturbed = outcomes[at + BEFORE_FALL :]
    return max(abs(ours - theirs) for ours, theirs in zip(forked, undisturbed, strict=False))


_DEPARTS = Measure(
    "departure of an unchanged fork",
    "share",
    "largest difference between the outcomes of a fork with nothing changed and of the run itself, step by step",
    _departs,
)


def _sequences(config: RunConfig) -> RunConfig:
    return changed(config, ratio=SequenceRatio(), gate=Clip(0.03, 0.04))


_FALLING = trained(FARTHER, learning_rate=HIGH_RATE)
_FORKS = Forked(
    (Change(SAME), Change(TENTH, rate=0.1), Change(SEQUENCE, algorithm=_sequences(_FALLING).algorithm)),
    (BEFORE_FALL, AFTER_FALL),
)
_RUN = Arm("clip at 0.0004, forked", _FALLING, course=_FORKS)

RECOVERY = Study(
    name="recovery",
    title="Recovering from a collapse",
    claim="The model collapse is often irreversible: resuming training is fruitless, even when reverting to a previous "
    "checkpoint and meticulously tuning hyperparameters, extending the generation length, or switching the queries.",
    source="GSPO (Zheng et al., 2025, arXiv:2507.18071), section 1",
    question="After a collapse, does a fork from a checkpoint shortly before or after it return to where the run was, "
    "with nothing changed, with a tenth of the rate, or with a sequence ratio?",
    arms=(_RUN,),
    seeds=tuple(range(12)),
    contrasts=(
        Contrast(
            "after the fall a tenth of the rate stays down", _RUN.name, None, _down(TENTH, AFTER_FALL), MANY, (46,)
        ),
        Contrast("so does a sequence ratio", _RUN.name, None, _down(SEQUENCE, AFTER_FALL), MANY, (46,)),
        Contrast("and the run as it was", _RUN.name, None, _down(SAME, AFTER_FALL), MANY, (46,)),
        Contrast(
            "before the fall a tenth of the rate stays down", _RUN.name, None, _down(TENTH, BEFORE_FALL), MANY, (46,)
        ),
        Contrast("and a sequence ratio", _RUN.name, None, _down(SEQUENCE, BEFORE_FALL), MANY, (46,)),
    ),
    positive=(
        Contrast("the runs collapse", _RUN.name, None, COLLAPSED, 0.5),
        Contrast("with nothing changed they fall again", _RUN.name, None, _down(SAME, BEFORE_FALL), MANY),
    ),
    negative=(Contrast("an unchanged fork is the run itself", _RUN.name, None, _DEPARTS, 0.001),),
    measures=(ACCURACY, COLLAPSED),
    curve="outcome",
    collapse="the run has fallen when the mean outcome of 3 steps is below half of the best before; `collapsed` is as "
    "in the other studies",
    caveats=(
        SMALL,
        "The collapse comes from a high rate with 32 updates on each step's samples, not from long text or routers.",
        "Forks keep the optimizer's moments. Runs that do not fall have no forks and are not counted.",
        "After the fall some answers are still right; a collapse that leaves none could only stay down.",
    ),
    afterwards=(
        "Planned at first and not done: a mixture that collapses, forks 10 and 2 steps before the fall and 2 after it, "
        "a third of the rate, and routing replay.",
    ),
    limits="after the fall, while from 4 steps before it a tenth of the rate recovers in 12 of 12 seeds",
    change="a collapse of another kind: one that a high rate does not cause.",
    run_seconds=360,
    quick_steps=30,
)
