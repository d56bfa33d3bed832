"""`proximo fork`: continue a run from one of its checkpoints with something changed."""

from pathlib import Path

from proximo.api.forking import folder_of, refuse_no_steps, refuse_scheduled
from proximo.cli.arguments import asks_for_help, refuse, refusing, say, take, take_number, take_switch
from proximo.cli.commands.train import follow_run, train_in
from proximo.cli.configs import naming_flags, run_config
from proximo.cli.run_folders import launched, take_ranks, take_trackers, take_webhook, with_ranks
from proximo.config import toml
from proximo.runs.checkpoints import step_of
from proximo.runs.forking import changes, checkpoint_at, fork, refuse_other_weights
from proximo.runs.tracking.trackers import CHOICES
from proximo.system.opening import without_links

FORM = "RUN [--at STEP] [--run DIR] [--algorithm NAME] [--field VALUE ...]"
HELP = f"""flags of the command itself:
  --at STEP          checkpoint to begin from, by the number of steps done; without it the newest
  --run DIR          folder of the fork (default: RUN-at-STEP, with the algorithm's name where it changes)
  --fresh-optimizer  begin without the optimizer's moments
  --ranks N          train on N processes that hold the model in shards
  --track NAME ...   send the fork while it runs to {CHOICES}
  --notify URL       tell a webhook how the fork ends, as train does
  --json             print the result as JSON on stdout, progress on stderr
A fork begins with the run's weights, optimizer, data cursor and random numbers, so that its next prompts and draws are
those of the run; a value model that the run does not have begins anew. With nothing changed it writes the same bytes.
The same command again resumes it; give --at where the run still goes on.

"""
EXAMPLES = """examples:
  proximo fork runs/a --at 40 --algorithm gspo
  proximo fork runs/a --at 40 --training.learning-rate 1e-6 --run runs/a-slower
  proximo fork runs/a --steps 200                       more steps, from the newest checkpoint, in another folder
"""


def run(arguments: list[str]) -> int:
    webhook, given = take_webhook(arguments), list(arguments)
    as_json, fresh = take_switch(arguments, "--json"), take_switch(arguments, "--fresh-optimizer")
    folder, trackers, ranks = take(arguments, "--run"), take_trackers(arguments), take_ranks(arguments)
    at = take_number(arguments, "--at", int)
    parent, point = _begun(arguments, at)
    config, _ = run_config(
        arguments,
        prog="proximo fork",
        usage=FORM,
        description="Continue a run from one of its checkpoints in a folder of its own, with fields changed.",
        help_more=f"{naming_flags('fork', HELP)}{EXAMPLES}",
    )
    config = config if ranks is None else with_ranks(config, ranks)
    step, text = step_of(point), toml.dumps(config)
    with refusing():
        refuse_no_steps(config, step)
        refuse_scheduled(parent, config)
        refuse_other_weights(parent, text)
    path = without_links(folder) if folder else folder_of(parent, step, config.algorithm, text)
    if config.ranks is not None:
        is_named = folder is not None
        status = launched(
            config.ranks, ["fork", *given], path, lambda: follow_run(config), named=is_named, webhook=webhook
        )
        if status is not None:
            return status
    with refusing(OSError):
        other = fork(parent, path, point, fresh_optimizer=fresh)
    if other is not None:
        say(f"warning: {other}")
    return train_in(path, config, changes(path, text), trackers=trackers, webhook=webhook, as_json=as_json)


def _begun(arguments: list[str], at: int | None) -> tuple[Path, Path]:
    """The run and its checkpoint; the run's config takes its place among the arguments."""
    if asks_for_help(arguments):
        return Path(), Path()
    if not arguments or arguments[0].startswith("-"):
        refuse(f"fork needs the folder of a run: proximo fork {FORM}")
    with refusing():
        parent = without_links(arguments.pop(0))
        point = checkpoint_at(parent, at)
    arguments.insert(0, str(parent / "config.toml"))
    return parent, point
