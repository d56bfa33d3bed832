"""`proximo report`: one page about a run, from its folder."""

import json
from pathlib import Path

from proximo.cli.arguments import refuse, refusing, take, take_switch
from proximo.config.trust.permission import is_everything_permitted
from proximo.insight.folder import RunFolder
from proximo.insight.report import summary, write_report

USAGE = """usage: proximo report RUN [--out FILE.html] [--load-code] [--json]

Write one self-contained HTML page about a run of train, sft, reward-model or dpo: finished, ended early or still
running. The page goes to RUN/report.html, or to FILE.html, and its path is printed.

--out FILE.html  where to write the page
--load-code      load the classes of your own that the run's config names, which executes their files; without it
                 such a config is shown as text
--json           print the run's results as JSON instead of the path

examples:
  proximo report runs/a
  proximo report runs/a --out a.html
"""


def run(arguments: list[str]) -> int:
    as_json, out = take_switch(arguments, "--json"), take(arguments, "--out")
    if len(arguments) != 1 or arguments[0].startswith("-"):
        given = f", not {' '.join(arguments)}" if arguments else ""
        refuse(f"report takes the folder of one run{given}: proximo report RUN [--out FILE.html] [--load-code]")
    with refusing(OSError):
        run = RunFolder(Path(arguments[0]), load_code=is_everything_permitted())
        path, details = write_report(run, None if out is None else Path(out))
    print(json.dumps({**summary(details), "report": str(path)}) if as_json else path)
    return 0
