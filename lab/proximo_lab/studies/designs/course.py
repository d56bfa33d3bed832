"""Studies of the course of a run: what its groups teach, and what it starts from."""

from dataclasses import replace

from proximo.rl.evaluate import known_mean
from proximo.tasks.arithmetic import Arithmetic
from proximo_lab.studies.designs.settings import NEAR, SMALL, trained
from proximo_lab.studies.measures import ACCURACY, BEFORE, GAIN, LAST, at_end, over_run, rise
from proximo_lab.studies.record import Record
from proximo_lab.studies.study import Arm, Contrast, Measure, Study

LEARNING = Arm("two digits", NEAR)
FROZEN = Arm("frozen", trained(NEAR, learning_rate=1e-12))
"""The same run with a rate at which no weight moves."""
SEEDS = tuple(range(5))


def _unsolved(run: Record) -> float:
    """Fall of the share of groups that are all wrong."""
    shares = [dead - solved for dead, solved in zip(run.steps["dead_groups"], run.steps["dead_solved"], strict=True)]
    few = max(1, int(LAST * len(shares)))
    return known_mean(shares[:few]) - known_mean(shares[-few:])


_FEWER_WRONG = Measure(
    "fewer groups that are all wrong",
    "share of the groups",
    "mean of `dead_groups` − `dead_solved` over the first tenth of the steps minus that over the last",
    _unsolved,
)
_MORE_RIGHT = rise("dead_solved", "more groups that are all right", "share of the groups")
_LEARNED = rise("outcome", "rise of the outcome", "share")

DEAD_GROUPS = Study(
    name="dead-groups",
    title="Dead groups early and late",
    claim="Early in training most groups are all wrong, late most are all right: in both cases nothing is learned from "
    "them.",
    source="a retelling of DAPO (arXiv:2503.14476, section 3.2, has the second half)",
    question="Does the share of groups that are all wrong fall over a run, and that of groups that are all right rise?",
    arms=(LEARNING, FROZEN),
    seeds=SEEDS,
    contrasts=(
        Contrast("groups that are all right become more", LEARNING.name, None, _MORE_RIGHT, 0.1, (6,)),
        Contrast("groups that are all wrong become fewer", LEARNING.name, None, _FEWER_WRONG, 0.05, (6,)),
    ),
    positive=(Contrast("the policy learns", LEARNING.name, None, _LEARNED, 0.1),),
    negative=(Contrast("a frozen policy's groups stay as they are", FROZEN.name, None, _MORE_RIGHT, 0.1),),
    measures=(
        ACCURACY,
        over_run("dead_groups", "dead groups", "share of the groups"),
        at_end("dead_groups", "dead groups at the end", "share of the groups"),
        at_end("dead_solved", "all right at the end", "share of the groups"),
    ),
    curve="dead_groups",
    caveats=(SMALL, "The model is right on a third of the problems from the start, so few groups are ever all wrong."),
    afterwards=(
        "Planned at first was to read the 15 runs of `proximo compare five` again; these are five new ones of GRPO.",
    ),
    limits="as a trend alone, for in the first tenth of the steps 7 % of the groups are all wrong and 28 % all right, "
    "and in the last 40 % all right",
    change="a first policy that solves a few per cent.",
    run_seconds=21,
)

FIRST_SUCCESS = Study(
    name="first-success",
    title="Nothing comes of nothing",
    claim="Supervised fine-tuning must come before reinforcement learning: a model that never succeeds has nothing to "
    "strengthen.",
    source="a retelling",
    question="Does a model that is right on none of its samples learn anything?",
    arms=(
        LEARNING,
        Arm("three digits", replace(NEAR, task=Arithmetic(digits=3, held_out=1000))),
        FROZEN,
    ),
    seeds=SEEDS,
    contrasts=(
        Contrast(
            "three digits, which the model never gets right, gain less than two",
            "three digits",
            LEARNING.name,
            GAIN,
            -0.2,
            (14,),
        ),
        Contrast("they gain something", "three digits", None, GAIN, 0.01),
    ),
    positive=(Contrast("two digits are learned", LEARNING.name, FROZEN.name, GAIN, 0.2),),
    negative=(Contrast("a frozen policy gains nothing", FROZEN.name, None, GAIN, 0.01),),
    measures=(BEFORE, ACCURACY, GAIN, over_run("solved_by_any", "prompts with a right completion", "share")),
    curve="outcome",
    caveats=(
        SMALL,
        "Two tasks stand for two first policies: the model was fine-tuned on two digits and never on three.",
    ),
    afterwards=(
        "Planned at first were four models, with 0, 1, 10 and 30 % of the problems in reach of eight samples, and 150 "
        "steps. There is one model on two tasks, and 60 steps.",
    ),
    limits='where "never" is up to 0.9 % of the prompts in the first ten steps',
    change="longer runs, or rewards for parts of an answer.",
    run_seconds=19,
)
