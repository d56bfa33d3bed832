"""`proximo train pipeline-demo`: all stages from demonstrations to PPO, GRPO and DPO, measured by the true reward."""

import json

from proximo.api.folders import folder_for, suit_session
from proximo.cli.arguments import refuse, refusing, say, take_switch
from proximo.cli.flags import changed
from proximo.cli.run_folders import ACCEPT_LOST, report_failure, taken
from proximo.config import toml
from proximo.models import pick_device
from proximo.recipes.pipeline import PipelineConfig, pipeline
from proximo.system.opening import read_json, read_text

HELP = """arguments of the command itself:
  pipeline.toml       config file, such as the config.toml of a pipeline's folder
  --run DIR           folder of the pipeline; the same command with the same folder resumes it
  --accept-lost-rows  on resume: continue although metrics.jsonl or ledger.jsonl has lost rows
  --dry-run           print the config and the stages without starting them
  --json              print the results as JSON on stdout
examples:
  proximo train {name}
  proximo train {name} --run runs/demo --seed 1
"""


def run(
    name: str, default: PipelineConfig, arguments: list[str], *, folder: str | None, as_json: bool, dry_run: bool
) -> int:
    """Exit status: 0 done, 1 failed during training, 2 refused before training."""
    accept_lost = take_switch(arguments, ACCEPT_LOST)
    config = changed(
        _from_file(arguments, default),
        arguments,
        prog=f"proximo train {name}",
        usage="[pipeline.toml] [--run DIR]",
        description="Fine-tune, train a reward model, then train on it, on a task whose true reward is known.",
        help_more=HELP.format(name=name),
    )
    if dry_run:
        with refusing():
            pick_device(config.device)
        if as_json:
            print(json.dumps({"config": toml.plain(config), "stages": list(config.stages)}))
        else:
            print(toml.dumps(config))
            print(f"# in turn: {', '.join(config.stages)}")
        return 0
    path = folder_for(folder or None, name)
    with taken(path, toml.dumps(config), allowed=None, points=None) as session:
        if session.result is not None:
            say(f"{path}: this run is finished")
        else:
            suit_session(session, config.sft_config(path).model, config.device, say)
            try:
                pipeline(config, path, say, session, accept_lost=accept_lost)
            except (OSError, ValueError) as error:
                report_failure(session, error)
                return 1
    if as_json:
        print(json.dumps(read_json(path / "results.json")))
    else:
        report = read_text(path / "report.md")
        print(f"\n{report}\nrun folder  {path}, with report.md and results.json")
    return 0


def _from_file(arguments: list[str], default: PipelineConfig) -> PipelineConfig:
    """Take a pipeline's config.toml from the arguments, if one comes first."""
    if not arguments or arguments[0].startswith("-"):
        return default
    name = arguments.pop(0)
    if not name.endswith(".toml"):
        refuse(f"{name}: give the config.toml of a pipeline, or nothing")
    with refusing():
        return toml.load(name, PipelineConfig)
