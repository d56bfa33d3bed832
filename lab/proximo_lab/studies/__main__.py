"""`python -m proximo_lab.studies`: what `proximo study` does, without the command line's dependencies, and for several
studies at once."""

import argparse
import sys
from pathlib import Path

from proximo_lab.studies.command import at_a_time, conduct, listed, on_device, publish
from proximo_lab.studies.folder import FOLDER


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proximo_lab.studies", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="studies to run; without any, all are listed")
    parser.add_argument("--quick", action="store_true", help="pilots: few seeds and steps, no tuning")
    parser.add_argument("--processes", type=int, help="runs at a time, each on one thread")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder; what is finished in it is kept")
    parser.add_argument("--minutes", type=float, help="minutes after which no further run is started")
    parser.add_argument("--device", help="where runs are computed (cpu, cuda); they share a GPU")
    parser.add_argument("--dry-run", action="store_true", help="say how many runs there are, and start none")
    parser.add_argument(
        "--publish", type=Path, metavar="DIR", help="then copy finished pages of --out to DIR, with the atlas"
    )
    options = parser.parse_args(arguments)
    asked = (options.processes, options.minutes, options.device)
    if not options.names and (options.quick or options.dry_run or any(each is not None for each in asked)):
        parser.error("--quick, --processes, --device, --minutes and --dry-run need the NAME of a study")
    if options.out == Path():
        parser.error("--out is empty: give a folder")
    options.device = options.device or "cpu"
    if options.processes is not None and options.processes < 1:
        parser.error(f"--processes {options.processes}: give a whole number, at least 1")
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: give more than 0")
    try:
        done = _conducted(options) if options.names else True
        if options.publish is not None:
            publish(options.out, options.publish)
        elif not options.names:
            print("\n".join(listed(options.out)))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if done or options.dry_run else 1


def _conducted(options: argparse.Namespace) -> bool:
    studies = [on_device(name, options.device) for name in options.names]
    return conduct(
        [study.quick() for study in studies] if options.quick else studies,
        options.out,
        processes=options.processes or at_a_time(options.device),
        say=lambda line: print(line, flush=True),
        minutes=options.minutes,
        dry=options.dry_run,
    )


if __name__ == "__main__":
    sys.exit(main())
