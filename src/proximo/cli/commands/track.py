"""`proximo track`: send a run to experiment trackers."""

import json

from proximo.cli.arguments import refuse, refusing, take_several, take_switch
from proximo.runs.tracking.sending import Sent, track
from proximo.runs.tracking.trackers import CHOICES

USAGE = f"""usage: proximo track RUN --to TRACKER ... [--json]

Send a run folder to experiment trackers: metrics, config, findings, held-out results, completions and measurements of
the machine. What was sent before, also by `--track` of train, sft, reward-model and dpo, is not sent again.

--to TRACKER ...  {CHOICES}, a class of your own; any number
--json            print what was sent as JSON

examples:
  proximo track runs/a --to tensorboard
  proximo track runs/a --to wandb mlflow
"""


def run(arguments: list[str]) -> int:
    as_json, names = take_switch(arguments, "--json"), take_several(arguments, "--to") or []
    if len(arguments) != 1 or arguments[0].startswith("-") or not names:
        refuse("track takes one run folder and at least one tracker: proximo track RUN --to TRACKER ...")
    with refusing(OSError):
        sent = track(arguments[0], names)
    if as_json:
        print(json.dumps([{"tracker": each.tracker, "items": each.items, "folder": str(each.folder)} for each in sent]))
    else:
        print("\n".join(map(_line, sent)))
    return 0


def _line(sent: Sent) -> str:
    what = f"{sent.items} items sent" if sent.items else "everything was sent before"
    return f"{sent.tracker}: {what}; its files: {sent.folder}"
