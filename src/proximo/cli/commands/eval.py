"""`proximo eval`: measure a model's accuracy on held-out problems."""

import json
from dataclasses import replace

from transformers.utils.logging import disable_progress_bar

from proximo.cli.data import take_task
from proximo.cli.flags import changed, refuse, say, take_model, take_switch
from proximo.door.evaluating import evaluated, own_evaluation
from proximo.storage.lines import plain
from proximo.training.rl.progress import measure, share

HELP = """arguments of the command itself:
  MODEL   folder, run folder, checkpoint, hub id or model name; a run folder brings the settings of its run
  --data DATA  evaluate on all rows of a file, folder or hub id; see proximo train --help
  --json  print the result as JSON on stdout
examples:
  proximo eval tiny-arithmetic
  proximo eval runs/a --problems 200 --samples 8
  proximo eval DIR --data problems.jsonl
"""


def run(arguments: list[str]) -> int:
    disable_progress_bar()
    as_json = take_switch(arguments, "--json")
    name = take_model(arguments, "proximo eval")
    try:
        own, source = own_evaluation(name)
    except ValueError as error:
        refuse(str(error))
    if source is not None:
        say(source)
    task = take_task(arguments, name, own.rewards, held_out=1.0)
    config = changed(
        own if task is None else replace(own, task=task),
        arguments,
        prog="proximo eval",
        usage="MODEL [--json]",
        description="Measure a model's accuracy on a task's held-out problems.",
        help_more=HELP,
    )
    try:
        result, failures = evaluated(name, config)
    except ValueError as error:
        refuse(str(error))
    for failure in failures:
        say(f"warning: {failure}")
    facts = {"model": name, **plain(result.floats())}
    print(json.dumps(facts) if as_json else f"held-out {measure(result)} {share(result)}")
    return 0
