"""`proximo iterate`: train a policy and its reward model in turn."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from proximo.api.folders import folder_for, suit_session
from proximo.cli.arguments import refuse, refusing, say, take, take_number, take_switch
from proximo.cli.configs import naming_flags, run_config
from proximo.cli.run_folders import ACCEPT_LOST, report_failure, taken
from proximo.config import toml
from proximo.recipes.pipeline.rounds import FIT, Round, RoundsConfig, iterate, table
from proximo.rl.config import RunConfig
from proximo.system.lines import plain
from proximo.system.opening import read_json

FORM = "[PRESET | run.toml] --reward-model DIR --pairs FILE [--rounds N] [--run DIR] [--field VALUE ...]"
HELP = """flags of the command itself:
  --pairs FILE           rankings that the reward model was trained on; later ones are mixed with them
  --rounds N             number of rounds (default 2); 1 is a plain run
  --by outcome|reward    what new completions are ranked by (default: the task's score)
  --old-share X          share of a round's rankings that are earlier ones (default 0.1)
  --judge-rate X         learning rate of the reward model between rounds (default 3e-4)
  --judge-epochs X       passes over the rankings between rounds (default 1)
  --run DIR              folder of the rounds; the same command with the same folder resumes them
  --accept-lost-rows     on resume: continue although metrics.jsonl or ledger.jsonl has lost rows
  --json                 print the rounds as JSON on stdout, progress on stderr
Round k trains the policy of round k-1 on reward model k. Its completions are then ranked and reward model k is trained
further on them. DIR has policy-1, pairs-2.jsonl, judge-2, policy-2 and so on, each a run folder or file of its own.

"""
EXAMPLES = """examples:
  proximo iterate --model runs/sft --data problems.jsonl --reward-model runs/judge --pairs pairs.jsonl --steps 40
  proximo iterate run.toml --reward-model runs/judge --pairs pairs.jsonl --rounds 4 --run runs/rounds
"""


def run(arguments: list[str]) -> int:
    """Exit status: 0 done, 1 failed during training, 2 refused before training."""
    as_json, accept_lost = take_switch(arguments, "--json"), take_switch(arguments, ACCEPT_LOST)
    folder, pairs = take(arguments, "--run"), take(arguments, "--pairs")
    chosen = {
        "rounds": take_number(arguments, "--rounds", int),
        "old_share": take_number(arguments, "--old-share", float),
        "by": take(arguments, "--by"),
    }
    rate = take_number(arguments, "--judge-rate", float)
    epochs = take_number(arguments, "--judge-epochs", float)
    policy, _ = run_config(
        arguments,
        prog="proximo iterate",
        usage=FORM,
        description="Train a policy and its reward model in turn: iterative GRPO.",
        help_more=f"{naming_flags('iterate', HELP)}{EXAMPLES}",
    )
    config = _rounds(policy, pairs, chosen, {"learning_rate": rate, "epochs": epochs})
    path = folder_for(folder or None, "iterate")
    with taken(path, toml.dumps(config), allowed=None, points=None) as session:
        if session.result is not None:
            say(f"{path}: this run is finished")
            rounds = [Round(**each) for each in read_json(path / "rounds.json")]
        else:
            suit_session(session, policy.model, policy.device, say)
            try:
                rounds = iterate(config, path, say, session, accept_lost=accept_lost)
            except (OSError, ValueError) as error:
                report_failure(session, error)
                return 1
    rows = [plain(asdict(each)) for each in rounds]
    print(json.dumps({"run": str(path), "rounds": rows}) if as_json else f"\n{table(rounds)}\n\nrun folder  {path}")
    return 0


def _rounds(
    policy: RunConfig, pairs: str | None, options: dict[str, object], fit: dict[str, float | None]
) -> RoundsConfig:
    """The rounds that were asked for; what was not given keeps its default."""
    if pairs is None:
        refuse("iterate needs --pairs FILE, the rankings that the reward model was trained on")
    if not Path(pairs).is_file():
        refuse(f"--pairs {pairs}: there is no such file; proximo pairs RUN --out {pairs} writes one")
    given = {name: value for name, value in fit.items() if value is not None}
    if (by := options["by"]) not in (None, "outcome", "reward"):
        refuse(f"--by {by}: give outcome or reward")
    chosen = {name: value for name, value in options.items() if value is not None}
    with refusing():
        return RoundsConfig(policy, pairs, fit=replace(FIT, **given), **chosen)  # pyright: ignore[reportArgumentType]
