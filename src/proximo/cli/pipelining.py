"""`proximo train pipeline-demo`: every stage from demonstrations to PPO, GRPO and DPO, judged by the true reward."""

import json
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from proximo import toml
from proximo.cli.flags import changed, refuse, take, take_switch
from proximo.cli.opening import suit_machine
from proximo.training.pipeline import PipelineConfig, pipeline, plain, report


def run(name: str, default: PipelineConfig, arguments: list[str]) -> int:
    """0 done, 1 failed on the way, 2 refused before anything was trained."""
    as_json, dry_run = take_switch(arguments, "--json"), take_switch(arguments, "--dry-run")
    folder = take(arguments, "--run")
    config = changed(
        _from_file(arguments, default),
        arguments,
        prog=f"proximo train {name} [pipeline.toml] [--run DIR] [--json] [--dry-run]",
        description="Fine-tune, learn a reward, and train on it, where the true reward is known.",
    )
    if dry_run:
        print(toml.dumps(config))
        print(f"# in turn: {', '.join(config.stages)}")
        return 0
    path = Path(folder) if folder else Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    used = (path / "config.toml").exists()
    suit_machine(config.sft_config(path).model, config.device)
    try:
        result = pipeline(config, path, _say)
    except ValueError as error:
        if used:
            refuse(str(error))
        print(f"error: {error}\nwhat was written so far is in {path}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(plain(asdict(result))))
    else:
        print(f"\n{report(result)}\nrun folder  {path}, with report.md and results.json")
    return 0


def _from_file(arguments: list[str], default: PipelineConfig) -> PipelineConfig:
    """The config.toml of a pipeline, where one comes first; removed from the arguments."""
    if not arguments or arguments[0].startswith("-"):
        return default
    name = arguments.pop(0)
    if not name.endswith(".toml") or not Path(name).is_file():
        refuse(f"{name}: there is no such file; give the config.toml of a pipeline, or nothing")
    try:
        return toml.loads(Path(name).read_text(), PipelineConfig, source=name)
    except ValueError as error:
        refuse(str(error))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
