"""`proximo study`: test a published claim, and say whether it holds here."""

import math

from proximo.cli.arguments import asks_for_help, refuse, refusing, say, take, take_number, take_switch
from proximo.system.opening import without_links
from proximo_lab.studies.command import at_a_time, conduct, listed, on_device
from proximo_lab.studies.folder import FOLDER
from proximo_lab.studies.verdicts import stored_verdicts

USAGE = """usage: proximo study [NAME] [--quick] [--processes N] [--device DEVICE] [--out DIR] [--minutes N]
                     [--dry-run]

Test a published claim: train all arms of a study with paired seeds, and write one page with the verdict, a figure,
intervals, controls and what was fixed before the runs. Without NAME, list all studies with their state.

The design, with what counts as an effect, is stored with its SHA-256 before the first run; a folder whose stored design
differs is refused. The same command continues where an earlier one ended. Runs use one thread each.

--quick        a pilot: few seeds and steps, the main contrast and the controls, no tuning; its page says so
--processes N  runs in parallel (default: one for each core; twelve at most share a GPU)
--device D     where they are computed: cpu (default) or cuda, in float32 too; there a study is a design of its own
--out DIR      folder of designs, results and pages (default: runs/studies)
--minutes N    start no run after this many minutes
--dry-run      print the number of runs and the time they may take, without starting any

examples:
  proximo study                              what there is, and what is known
  proximo study clip-higher --dry-run        how many runs, and how long they may take
  proximo study clip-higher --quick          a pilot of a few minutes
"""


def run(arguments: list[str]) -> int:
    """Exit status: 0 all runs are done, 1 some are not, 2 refused before any was started."""
    if asks_for_help(arguments):
        print(USAGE, end="")
        return 0
    quick, dry = take_switch(arguments, "--quick"), take_switch(arguments, "--dry-run")
    given, processes = take(arguments, "--out"), _number(arguments, "--processes")
    minutes, asked = _minutes(arguments), take(arguments, "--device")
    if len(arguments) > 1 or any(each.startswith("-") for each in arguments):
        refuse(f"study takes one name and flags, not {' '.join(arguments)}: see proximo study --help")
    if not arguments and (quick or dry or processes or minutes or asked is not None):
        refuse("--quick, --processes, --device, --minutes and --dry-run need the NAME of a study: see proximo study")
    if given == "":
        refuse("--out is empty: give a folder")
    out, device = without_links(given or FOLDER), "cpu" if asked is None else asked
    with refusing(OSError):
        if not arguments:
            print("\n".join(listed(out, stored_verdicts())))
            return 0
        study = on_device(arguments[0], device)
        study = study.quick() if quick else study
        done = conduct([study], out, processes=processes or at_a_time(device), say=say, minutes=minutes, dry=dry)
    return 0 if done or dry else 1


def _number(arguments: list[str], flag: str) -> int | None:
    """The whole number of a flag, at least 1."""
    given = take(arguments, flag)
    if given is not None and not (given.isdecimal() and int(given)):
        refuse(f"{flag} {given}: give a whole number, at least 1")
    return None if given is None else int(given)


def _minutes(arguments: list[str]) -> float | None:
    minutes = take_number(arguments, "--minutes", float)
    if minutes is not None and not 0 < minutes < math.inf:
        refuse(f"--minutes {minutes:g}: give a number above 0")
    return minutes
