"""The command line. Heavy imports wait until a command needs them, so that help is instant."""

import io
import os
import signal
import sys
from collections.abc import Sequence

from proximo.cli.flags import asks_for_help, nearest, refuse
from proximo.version import __version__

USAGE = """usage: proximo COMMAND ...

  proximo train [PRESET | run.toml] [--algorithm NAME] [--reward-model DIR] [--run DIR] [--steps N] [--field VALUE ...]
                       train a model; with nothing given, a small one that comes with Proximo
  proximo train pipeline-demo [--run DIR] [--seed N] [--field VALUE ...]
                       fine-tuning, reward model, PPO, GRPO and DPO, where the true reward is known: is it hacked?
  proximo eval MODEL [--field VALUE ...]
                       held-out accuracy of a model folder on a task
  proximo sft [DATA.jsonl | DATA.parquet | config.toml] [--run DIR] [--skip-bad] [--field VALUE ...]
                       fine-tune on a file's completions, or on a task's reference answers
  proximo reward-model DATA.jsonl|DATA.parquet|config.toml [--model MODEL] [--run DIR] [--skip-bad] [--field VALUE ...]
                       a model that scores completions, from ranked ones; runs can be rewarded by it
  proximo dpo DATA.jsonl|DATA.parquet|config.toml [--model MODEL] [--run DIR] [--skip-bad] [--field VALUE ...]
                       a model that prefers what was ranked higher, without a reward model
  proximo pairs RUN --out PAIRS.jsonl [--steps A:B] [--by outcome|reward] [--old FILE --old-share X] [--seed N]
                       rank what a run said: data for the next reward-model or dpo
  proximo selfcheck [PRESET | run.toml] [--algorithm NAME] [--field VALUE ...]
                       do model, task and algorithm hold together? a minute before a run
  proximo chat MODEL [--chat] [--temperature X] [--max-tokens N]
                       what a model says to each line of the terminal or of a pipe
  proximo view [RUN | DIR] [--port N] [--no-browser]
                       a page of one run or of many: curves, every token of every rollout, any algorithm's view of it
  proximo replay RUN --step N [--as NAME ...] [--model DIR] [--out TOKENS.parquet]
                       what other algorithms would have done with a stored step, token by token
  proximo compare [five | PRESET | run.toml ...] [--algorithms A,B] [--seeds N] [--tokens N | --updates N] [--run DIR]
                       algorithms or configs × seeds on equal terms, with a report that says what is within noise
  proximo doctor [RUN]
                       what is wrong with a run, and what to do first; alone: what this machine can use
  proximo report RUN [--out FILE.html]
                       one page that opens from disk: curves, completions before and after, findings, how to repeat it
  proximo bench TABLE [--only ROW ...] [--steps N] [--peers SETTING ... | none] [--ablate] [--field VALUE ...]
                       rollout, train, step, memory or growth: times beside TRL's and beside the machine's limit
  proximo tasks        the tasks there are, with an example of each
  proximo explain NAME [--stage.field VALUE ...]
  proximo explain --all
                       what an algorithm is, choice by choice

Every command takes --help, and proximo --version says which this is. train, eval, selfcheck and what learns from
files take --json: data on stdout, progress on stderr. train takes --dry-run: the resolved run, and nothing is
started. The same command with the same --run goes on with a run that ended early; --allow-change FIELD lets a field
be another than it began with, --accept-lost-rows resumes one whose metrics.jsonl or ledger.jsonl has lost rows.
"""

EXPLAIN_USAGE = """usage: proximo explain NAME [--stage.field VALUE ...] [--stage.type PIECE ...]
       proximo explain --all

What an algorithm is, choice by choice: its objective, its stages, where each choice comes from and what TRL and verl
do. Any choice can be changed by a flag (proximo explain grpo --gate.high 0.28); proximo explain NAME --help lists them.
--all prints a table of all algorithms.
"""

STAGES = ("sft", "reward-model", "dpo")
"""They learn from files."""
INSIGHT = ("view", "replay", "compare", "doctor", "report")
"""They read run folders."""
COMMANDS = ("train", "eval", *STAGES, "pairs", "selfcheck", "chat", *INSIGHT, "bench", "tasks", "explain")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0 done, 1 failed, 2 bad input, 129 its terminal was closed, 130 interrupted, 141 nobody reads
    it, 143 terminated."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _make_streams_patient()
    try:
        status = _answer(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `proximo ... | head`, which has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (what is still to be flushed goes nowhere)
        return 141


def _make_streams_patient() -> None:
    """Output that cannot be encoded is spelled out, output that was closed from the start goes nowhere."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _answer(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(f"proximo {__version__}")
        return 0
    command, *rest = arguments
    if command == "tasks" and asks_for_help(rest):
        print("usage: proximo tasks\n\nThe tasks there are, with an example of each.")
        return 0
    if command == "explain" and (not rest or (rest[0].startswith("-") and asks_for_help(rest))):
        print(EXPLAIN_USAGE, end="")
        return 0
    if command not in COMMANDS:
        refuse(f"no command is called {command!r}{nearest(command, COMMANDS)}; there are: {', '.join(COMMANDS)}")
    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(each, lambda number, _: sys.exit(128 + number))
    try:
        return _run(command, rest)
    except KeyboardInterrupt:
        kept = "; what was written so far is in the run folder" if command in ("train", *STAGES) else ""
        print(f"interrupted{kept}", file=sys.stderr)
        return 130


def _run(command: str, arguments: list[str]) -> int:
    if command == "explain":
        from proximo.cli.commands import explain as explaining

        return explaining.run(arguments)
    if command == "selfcheck":
        from proximo.cli.commands import selfcheck as checking

        return checking.run(arguments)
    if command == "chat":
        from proximo.cli.commands import chat as chatting

        return chatting.run(arguments)
    if command == "bench":
        from proximo.cli.commands import bench as benching

        return benching.run(arguments)
    if command == "pairs":
        from proximo.cli.commands import pairs as pairing

        return pairing.run(arguments)
    if command in INSIGHT:
        return _look(command, arguments)
    if command in STAGES:
        from proximo.cli.commands import stages

        return stages.run(command, arguments)
    from proximo.cli.commands import train as running

    return running.run(command, arguments)


def _look(command: str, arguments: list[str]) -> int:
    if command == "view":
        from proximo.cli.commands import view as viewing

        return viewing.run(arguments)
    if command == "replay":
        from proximo.cli.commands import replay as replaying

        return replaying.run(arguments)
    if command == "compare":
        from proximo.cli.commands import compare as comparing

        return comparing.run(arguments)
    if command == "doctor":
        from proximo.cli.commands import doctor as doctoring

        return doctoring.run(arguments)
    from proximo.cli.commands import report as reporting

    return reporting.run(arguments)
