"""Iterative GRPO: the policy and its reward model are trained in turn, each on what the other has become.

Round k trains the policy of round k − 1 with the reward of judge k. Its completions are then ranked, mixed with a share
of earlier rankings, and judge k trained further on them: that is judge k + 1. DeepSeekMath (arXiv 2402.03300),
algorithm 1. The reference of a round is the policy that it begins with.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from proximo.config import toml
from proximo.data import DataFile
from proximo.recipes.pipeline.running import fitted, prefixed, reinforced
from proximo.rl.config import RunConfig
from proximo.runs.session import RunSession, open_session
from proximo.supervised.fitting import FitOptions
from proximo.supervised.pairs import PairsConfig, write_pairs
from proximo.supervised.reward_model import RewardModelConfig, train_reward_model
from proximo.system.folders import write_file
from proximo.system.lines import plain
from proximo.system.opening import open_file

FIT = FitOptions(learning_rate=3e-4)
"""Training of reward models between rounds: less than they were trained at first."""
FEWEST = 10
"""Rankings of which a tenth is held out; fewer are all trained on."""


@dataclass(frozen=True)
class RoundsConfig:
    """Settings of the rounds, all that determines their results."""

    policy: RunConfig
    """Run of each round. It has one reward model, with which the first round begins."""
    pairs: str
    """File of rankings that the first reward model was trained on, .jsonl or .parquet; later ones are mixed with it."""
    rounds: int = 2
    """Number of rounds. 1 is plain GRPO."""
    by: Literal["outcome", "reward"] = "outcome"
    """Value to rank by: the task's score, or the reward that was trained on."""
    old_share: float = 0.1
    """Share of a round's rankings that are drawn from the earlier ones."""
    fit: FitOptions = FIT
    """Training of a reward model between rounds."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}: give at least 1")
        if not 0 <= self.old_share < 1:
            raise ValueError(f"old_share is {self.old_share}: give a share from 0 to below 1")
        if len(self.policy.rewards.models) != 1:
            raise ValueError(
                f"policy.rewards.models has {len(self.policy.rewards.models)}: rounds need one reward model to train "
                "further, as in --reward-model runs/judge"
            )
        if self.policy.ranks is not None:
            raise ValueError("policy.ranks: rounds train in one process; run the stages one by one for several")


@dataclass(frozen=True)
class Round:
    """Results of one round."""

    number: int
    before: float
    """Held-out accuracy of the policy that it began with."""
    after: float
    judge_before: float | None
    """Share of this round's held-out pairs that its own reward model ordered rightly; None after the last round."""
    judge_after: float | None
    """The same after it was trained further on this round's rankings."""
    rankings: int
    """Rankings, new and old, that the next reward model is trained on; 0 after the last round."""
    outcomes: tuple[float, float] | None = None
    """Mean held-out task score before and after, where answers are not just right or wrong."""


def iterate(
    config: RoundsConfig,
    folder: Path,
    say: Callable[[str], None],
    session: RunSession | None = None,
    *,
    accept_lost: bool = False,
) -> list[Round]:
    """Run all rounds; the same call resumes. `accept_lost`: resume although a stage's log has lost rows.

    Example: iterate(RoundsConfig(run_with_a_judge, "pairs.jsonl", rounds=3), Path("runs/rounds"), print)
    """
    with ExitStack() as until:
        session = session or until.enter_context(open_session(folder, toml.dumps(config), points=None, allowed=None))
        session.start()
        done, model = [], config.policy.model
        for number in range(1, config.rounds + 1):
            done.append(_round(config, folder, number, model, prefixed(f"round {number}", say), accept_lost))
            model = str(_policy(folder, number))
            write_file(folder / "rounds.json", (json.dumps([plain(asdict(each)) for each in done]) + "\n").encode())
        session.finish({"rounds": config.rounds})
        return done


def _round(
    config: RoundsConfig, folder: Path, number: int, model: str, say: Callable[[str], None], accept_lost: bool
) -> Round:
    """The policy of a round, and the reward model for the next one."""
    [judge] = config.policy.rewards.models
    held = replace(judge, path=judge.path if number == 1 else str(_judge(folder, number)))
    run = replace(config.policy, model=model, rewards=replace(config.policy.rewards, models=(held,)))
    result = reinforced(run, _policy(folder, number), say, accept_lost)
    policy = Round(number, result.before.accuracy, result.after.accuracy, None, None, 0)
    if not (result.before.is_share and result.after.is_share):
        policy = replace(policy, outcomes=(result.before.outcome, result.after.outcome))
    if number == config.rounds:
        return policy
    rankings = _ranked(config, folder, number, say)
    data = DataFile(str(_pairs(folder, number + 1)))
    if rankings < FEWEST:
        data = replace(data, held_out=0.0)  # too few to keep one apart: a round that has been trained is not given up
    fit = RewardModelConfig(data, held.path, fit=config.fit, device=config.policy.device)
    judged = fitted(train_reward_model, fit, _judge(folder, number + 1), say, accept_lost)
    before, after = judged.before.get("accuracy"), judged.best.get("accuracy")
    return replace(policy, judge_before=before, judge_after=after, rankings=rankings)


def _ranked(config: RoundsConfig, folder: Path, number: int, say: Callable[[str], None]) -> int:
    """Write the rankings of a round, unless an earlier attempt has; returns how many rows there are."""
    out = _pairs(folder, number + 1)
    if not out.exists():
        old = config.pairs if number == 1 else str(_pairs(folder, number))
        run, seed = str(_policy(folder, number)), config.policy.seed
        counts = write_pairs(PairsConfig(run, str(out), by=config.by, old=old, old_share=config.old_share, seed=seed))
        say(f"{counts.fresh} new rankings and {counts.old} old ones for the next reward model")
    with open_file(out) as rows:
        return sum(1 for _ in rows)


def _policy(folder: Path, number: int) -> Path:
    return folder / f"policy-{number}"


def _judge(folder: Path, number: int) -> Path:
    return folder / f"judge-{number}"


def _pairs(folder: Path, number: int) -> Path:
    return folder / f"pairs-{number}.jsonl"


def table(rounds: Sequence[Round]) -> str:
    """The rounds in lines."""
    lines = ["round  held out before  after   pairs ordered rightly by its judge, and once trained further"]
    for each in rounds:
        known = each.judge_before is not None and each.judge_after is not None
        judged = f"{each.judge_before:>6.1%} → {each.judge_after:.1%}" if known else ""
        shares, values = (f"{each.before:.1%}", f"{each.after:.1%}"), each.outcomes
        before, after = shares if values is None else (f"{value:.3f}" for value in values)
        lines.append(f"{each.number:>5}  {before:>15}  {after:>5}   {judged}")
    graded = any(each.outcomes is not None for each in rounds)
    return "\n".join([*lines, *["held out: mean task scores, since answers are not just right or wrong"] * graded])
