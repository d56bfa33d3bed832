"""Studies of what a run learns from: the KL term, the group, the verdicts, the scale of advantages."""

from dataclasses import replace

from proximo.algorithms import DAPO, GRPO, PPO
from proximo.losses.pieces.advantages import GroupCentred
from proximo.losses.pieces.divergences import KlLoss, UnbiasedK3
from proximo.losses.pieces.shaping import KlReward
from proximo.losses.pieces.weights import ConstantLength
from proximo.models.values import OwnLayers
from proximo.recipes.presets import OPEN_ENDED
from proximo.rl.config import EvaluationOptions, RunConfig, ValueOptions
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.tasks.arithmetic import Arithmetic
from proximo.tasks.sources.mixture import Mixture, Source
from proximo_lab.studies.designs.settings import (
    NEAR,
    SMALL,
    TWINS,
    TWINS_LATER,
    alike,
    changed,
    in_world,
    trained,
    twins,
)
from proximo_lab.studies.measures import ACCURACY, AREA, ENTROPY, at_end, final, over_run, rise
from proximo_lab.studies.noise import NoisyVerdict
from proximo_lab.studies.study import Arm, Contrast, Study, Tuning

TUNING = Tuning((1e-5, 2e-5, 5e-5), (100, 101), AREA)
"""Rates around the demo's."""
SEEDS = tuple(range(5))

_DAPO = replace(NEAR, algorithm=DAPO)


def _kl(config: RunConfig, coefficient: float) -> RunConfig:
    return changed(config, kl=KlLoss(coefficient)) if coefficient else config


KL = Study(
    name="kl",
    title="Learning without the KL term",
    claim="During training the long-CoT reasoning model, the model distribution can diverge significantly from the "
    "initial model, thus this restriction is not necessary. Therefore, we will exclude the KL term.",
    source="DAPO (Yu et al., 2025, arXiv:2503.14476), section 2.3",
    question="With the verdict itself as reward, does leaving the KL term out let a model learn more?",
    arms=(
        *(Arm(f"grpo β {each:g}", _kl(NEAR, each), tuned=True) for each in (0, 0.001, 0.04, 0.2, 1.0)),
        *(Arm(f"dapo β {each:g}", _kl(_DAPO, each), tuned=True) for each in (0, 0.04)),
        Arm("one rate β 0", NEAR),
        Arm("one rate β 0.001", _kl(NEAR, 0.001)),
    ),
    seeds=SEEDS,
    contrasts=(
        Contrast("GRPO learns more without its KL term", "grpo β 0", "grpo β 0.04", AREA, 0.02, (28,)),
        Contrast("so does DAPO", "dapo β 0", "dapo β 0.04", AREA, 0.02, (28,)),
        Contrast("and than with five times the coefficient", "grpo β 0", "grpo β 0.2", AREA, 0.02),
    ),
    positive=(Contrast("a coefficient of 1 holds learning back", "grpo β 1", "grpo β 0", AREA, -0.02),),
    negative=(Contrast("a coefficient of 0.001 changes nothing", "one rate β 0.001", "one rate β 0", AREA, 0.02),),
    measures=(ACCURACY, AREA, ENTROPY, over_run("kl", "KL to the reference", "nats a token")),
    curve="outcome",
    caveats=(
        SMALL,
        "The reward is the true verdict, so there is nothing to hack: what a KL term is for is not tested here.",
        "A claim that nothing is lost holds if the first contrast is no effect in the other direction.",
    ),
    afterwards=("Planned at first were four coefficients for DAPO too; it has two.",),
    change="a task whose solution lies far from the first policy.",
    run_seconds=24,
    tuning=TUNING,
)

_FREE = replace(in_world(OPEN_ENDED, replace(GRPO, kl=None)), evaluation=EvaluationOptions(problems=50))
_OWN_SIGNAL = replace(_FREE, rewards=RewardMix())
_TRUE = at_end("outcome", "true reward at the end", "share of the pairs in order")
_LEARNED_REWARD = rise("reward", "rise of the reward that is trained on", "of its scale")
_PPO = replace(_FREE, algorithm=PPO, value=ValueOptions(OwnLayers(1), learning_rate=1e-3))

REWARD_HACKING = Study(
    name="reward-hacking",
    title="The KL term and a reward that can be hacked",
    claim="A KL penalty from the fine-tuned model at each token mitigates over-optimization of the reward model.",
    source="InstructGPT (Ouyang et al., 2022, arXiv:2203.02155), section 3.5",
    question="Trained on a reward model, does a policy lose true reward as the learned one rises, and does a KL term "
    "prevent it?",
    arms=(
        Arm("grpo, no KL", _FREE),
        Arm("grpo, K3 0.04", changed(_FREE, kl=KlLoss(0.04))),
        Arm("grpo, K3 0.2", changed(_FREE, kl=KlLoss(0.2))),
        Arm("grpo, unbiased K3 0.5", changed(_FREE, kl=KlLoss(0.5, UnbiasedK3()))),
        Arm("ppo, no KL", changed(_PPO, shape=None)),
        Arm("ppo, KL in the reward 0.2", changed(_PPO, shape=KlReward(0.2))),
        Arm("grpo, no learning", trained(_FREE, learning_rate=1e-9)),
        Arm("grpo, true reward, no KL", _OWN_SIGNAL),
        Arm("grpo, true reward, K3 0.04", changed(_OWN_SIGNAL, kl=KlLoss(0.04))),
    ),
    seeds=tuple(range(8)),
    contrasts=(
        Contrast(
            "with a KL term more of the true reward is kept", "grpo, unbiased K3 0.5", "grpo, no KL", _TRUE, 0.1, (16,)
        ),
        Contrast("PPO with a KL in the reward too", "ppo, KL in the reward 0.2", "ppo, no KL", _TRUE, 0.1, (16,)),
        Contrast("GRPO's own coefficient is enough", "grpo, K3 0.04", "grpo, no KL", _TRUE, 0.1, (16,)),
        Contrast("five times as much is", "grpo, K3 0.2", "grpo, no KL", _TRUE, 0.1),
        Contrast("the true reward is more than at first", "grpo, unbiased K3 0.5", "grpo, no learning", _TRUE, 0.1),
    ),
    positive=(
        Contrast("without a KL the learned reward rises", "grpo, no KL", "grpo, no learning", _LEARNED_REWARD, 0.5),
        Contrast("and true reward is lost", "grpo, no KL", "grpo, no learning", _TRUE, -0.1),
    ),
    negative=(
        Contrast(
            "where the true reward is trained on, a KL term of 0.04 changes nothing",
            "grpo, true reward, K3 0.04",
            "grpo, true reward, no KL",
            _TRUE,
            0.05,
        ),
    ),
    measures=(_TRUE, _LEARNED_REWARD, over_run("kl", "KL to the reference", "nats a token"), ENTROPY),
    curve="outcome",
    caveats=(
        SMALL,
        "Answers of five letters, and a reward model trained on 2,000 rankings of the first policy's own answers.",
        "All arms have one learning rate; PPO's and GRPO's are not compared.",
        "A pipeline with other models and four seeds found 0.00 to 0.57 without a KL and 0.91 to 0.94 with one.",
    ),
    afterwards=(
        "Answers have six tokens, with their end; the sentence about three is that of other studies.",
        "Arms without a KL term keep no reference, so that their distance from it has no number.",
    ),
    change="a reward model that stays right where the policy goes, or one that is trained again on the way.",
    run_seconds=30,
)

_MIXED = over_run("dead_groups", "groups that teach nothing", "share of the groups")
_COVERED = over_run("solved_by_any", "prompts with a right completion", "share of the groups")
_TOTAL, _SIZES = 512, (8, 2, 4, 16, 32, 64)


def _grouped(size: int) -> RunConfig:
    return replace(trained(NEAR, groups=_TOTAL // size, group_size=size), steps=40)


_GROUP_TWINS = twins("group of 8, one rate", _grouped(8))

GROUP_SIZE = Study(
    name="group-size",
    title="Coverage and the size of the group",
    claim="With enough rollouts for each prompt, most of the good and bad cases are covered.",
    source="a retelling of GRPO (DeepSeekMath, Shao et al., 2024, arXiv:2402.03300, samples 64)",
    question="At 512 completions a step, what do larger groups of fewer prompts cover, and do they learn more?",
    arms=(*(Arm(f"group of {size}", _grouped(size), tuned=True) for size in _SIZES), *_GROUP_TWINS),
    seeds=SEEDS,
    contrasts=(
        Contrast("32 rollouts cover more prompts than 8", "group of 32", "group of 8", _COVERED, 0.02, (2,)),
        Contrast("fewer of their groups teach nothing", "group of 32", "group of 8", _MIXED, -0.1, (2,)),
        Contrast("they learn more from the same number of completions", "group of 32", "group of 8", AREA, 0.02),
        Contrast("8 learn more than 2", "group of 8", "group of 2", AREA, 0.02),
    ),
    positive=(Contrast("64 rollouts cover more than 2", "group of 64", "group of 2", _COVERED, 0.05),),
    negative=(alike(_GROUP_TWINS, AREA, 0.02),),
    measures=(ACCURACY, AREA, _COVERED, _MIXED, ENTROPY),
    curve="dead_groups",
    drawn=tuple(f"group of {size}" for size in _SIZES),
    caveats=(SMALL, "Two-digit sums that the model often gets right: few prompts are out of reach of eight samples."),
    afterwards=(TWINS_LATER, "Runs had 60 steps at first, and rates up to 5e-5; the verdicts were the same."),
    later=TWINS,
    change="prompts of which one in a hundred completions is right.",
    run_seconds=28,
    tuning=replace(TUNING, rates=(2e-5, 5e-5, 1e-4)),
)


def _noisy(missed: float, let_through: float, graders: int = 1) -> RunConfig:
    return replace(NEAR, rewards=RewardMix(task=0.0, rules=(WeightedRule(NoisyVerdict(missed, let_through, graders)),)))


NOISY_REWARD = Study(
    name="noisy-reward",
    title="Learning from wrong verdicts",
    claim="Relying on a single reward function makes training sensitive to its noise and bias; several together are "
    "more robust.",
    source="a retelling of DAPO's motivation; no paper is cited for it",
    question="How many wrong verdicts does it take to hurt, and do three graders help?",
    arms=(
        Arm("0 %", _noisy(0, 0), tuned=True),
        Arm("5 %", _noisy(0.05, 0.05), tuned=True),
        Arm("10 %", _noisy(0.1, 0.1), tuned=True),
        Arm("20 %", _noisy(0.2, 0.2), tuned=True),
        Arm("20 % of the right", _noisy(0.2, 0), tuned=True),
        Arm("20 % of the wrong", _noisy(0, 0.2), tuned=True),
        Arm("20 %, three graders", _noisy(0.2, 0.2, 3), tuned=True),
        Arm("50 %", _noisy(0.5, 0.5)),
        Arm("one rate 0 %", _noisy(0, 0)),
        Arm("one rate, task", NEAR),
    ),
    seeds=SEEDS,
    contrasts=(
        Contrast("10 % wrong verdicts hurt", "10 %", "0 %", AREA, -0.03, (27,)),
        Contrast("20 % hurt", "20 %", "0 %", AREA, -0.03, (27,)),
        Contrast("three graders do better than one", "20 %, three graders", "20 %", AREA, 0.03, (27,)),
        Contrast("wrong answers let through hurt", "20 % of the wrong", "0 %", AREA, -0.03),
        Contrast("right answers missed hurt", "20 % of the right", "0 %", AREA, -0.03),
    ),
    positive=(Contrast("verdicts by the toss of a coin teach nothing", "50 %", "one rate 0 %", AREA, -0.1),),
    negative=(Contrast("a grader without noise is the task itself", "one rate 0 %", "one rate, task", AREA, 0.01),),
    measures=(ACCURACY, AREA, ENTROPY),
    curve="outcome",
    caveats=(
        SMALL,
        "Noise is independent of the answer, and an answer gets the same verdict each time; a grader that is wrong in "
        "a way that can be exploited is another question.",
        "Three graders err independently of each other here, which is the best case.",
    ),
    afterwards=("Planned at first was noise on one side at 5, 10 and 20 %; it was run at 20 %.",),
    change="noise that depends on the answer, as a learned reward's does.",
    run_seconds=23,
    tuning=TUNING,
)

_LEVELS = {"one digit": 1, "two digits": 2, "three digits": 3}


def _levels(left_out: str = "") -> RunConfig:
    sources = tuple(
        Source(name, Arithmetic(digits=digits, held_out=10 if digits == 1 else 200), float(name != left_out))
        for name, digits in _LEVELS.items()
    )
    return replace(NEAR, task=Mixture(sources), evaluation=EvaluationOptions(problems=410, every=5))


_TWO, _ONE = (final(f"{name}/outcome", f"accuracy on {name}", "share") for name in ("two digits", "one digit"))
_ALL = _levels()
_STD_TWINS = twins("std and length, one rate", _ALL)

STD = Study(
    name="std",
    title="Dividing by the standard deviation",
    claim="Questions with lower standard deviations (too easy or too hard, with rewards almost all 1 or 0) are given "
    "higher weights during policy updates: a question-level difficulty bias.",
    source="Dr. GRPO (Liu et al., 2025, arXiv:2503.20783), section 3.1",
    question="On sums of one, two and three digits, does leaving out the division by the group's standard deviation, "
    "or by the length, change what is learned?",
    arms=(
        Arm("std and length", _ALL, tuned=True),
        Arm("no std", changed(_ALL, advantage=GroupCentred()), tuned=True),
        Arm("no length", changed(_ALL, weights=ConstantLength()), tuned=True),
        Arm("neither (Dr. GRPO)", changed(_ALL, advantage=GroupCentred(), weights=ConstantLength()), tuned=True),
        Arm("without two digits", _levels("two digits"), tuned=True),
        *_STD_TWINS,
    ),
    seeds=SEEDS,
    contrasts=(
        Contrast("without the std two digits are learned better", "no std", "std and length", _TWO, 0.02, (56,)),
        Contrast("and one digit", "no std", "std and length", _ONE, 0.02, (56,)),
        Contrast("without the length two digits are learned better", "no length", "std and length", _TWO, 0.02),
        Contrast("without either", "neither (Dr. GRPO)", "std and length", _TWO, 0.02, (56,)),
    ),
    positive=(
        Contrast(
            "two digits are learned less if they are left out", "without two digits", "std and length", _TWO, -0.02
        ),
    ),
    negative=(alike(_STD_TWINS, _TWO, 0.02),),
    measures=(_ONE, _TWO, AREA, ENTROPY, over_run("gradient_norm", "gradient norm", "mean over the run")),
    curve="outcome",
    caveats=(
        SMALL,
        "The model answers no three-digit sum before training and none after it; these prompts are groups in which "
        "every reward is 0.",
        "Leaving out the std makes gradients smaller; AdamW hides a constant factor, and each arm's rate is tuned.",
        "Answers have one to four tokens, so length matters little.",
    ),
    afterwards=(TWINS_LATER,),
    later=TWINS,
    change="problems whose pass rates spread from 1 in 100 to 99 in 100.",
    run_seconds=18,
    tuning=TUNING,
)
