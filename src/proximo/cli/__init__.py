"""The command line. Heavy imports happen only when a command needs them, so that --help is instant."""

import gc
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from proximo.cli.arguments import asks_for_help, refuse, say, take_switch
from proximo.cli.help_pages import page_of, unknown_flag, wrong_value
from proximo.cli.mistakes import mistake, no_such_command
from proximo.cli.naming import DEMO, first_line
from proximo.cli.words import spelled_out
from proximo.config.trust.permission import command_line
from proximo.system.opening import UnsafeFile
from proximo.system.slow_work import slow_work_told
from proximo.system.version import __version__

USAGE = """usage: proximo COMMAND ...

Train language models by reinforcement learning, and see what each update did.

  proximo train [PRESET | run.toml] [--algorithm NAME] [--reward-model DIR] [--run DIR] [--steps N] [--field VALUE ...]
                       train by reinforcement learning; by default GRPO on sums with the small model that ships
  proximo train pipeline-demo [--run DIR] [--seed N] [--field VALUE ...]
                       fine-tune, learn a reward model, then PPO, GRPO and DPO, on a task with a known true reward
  proximo init --model MODEL --data DATA [--out run.toml] [--field VALUE ...]
                       write a commented config for a model and data: what was chosen, why, and what else is possible
  proximo eval MODEL ... [--checkpoints all|STEPS] [--data FILE] [--out FILE] [--field VALUE ...]
                       measure the accuracy of models on held-out problems, side by side; pass@k with --samples
  proximo sft [DATA | config.toml] [--model MODEL] [--run DIR] [--skip-bad] [--field VALUE ...]
                       fine-tune on the completions in a file (.jsonl, .csv, .parquet, ...), or on a task's answers
  proximo reward-model DATA|config.toml [--model MODEL] [--run DIR] [--skip-bad] [--field VALUE ...]
                       train a reward model on ranked completions, for use with train --reward-model
  proximo dpo DATA|config.toml [--model MODEL] [--run DIR] [--skip-bad] [--field VALUE ...]
                       train on ranked completions directly (DPO or IPO), without a reward model
  proximo merge ADAPTER OUT [--dtype float32|bfloat16]
                       write the whole model of a LoRA adapter: its base model with the adapter added to the weights
  proximo export RUN|MODEL [--to folder|adapter|gguf:f32|gguf:f16|gguf:q8_0|hub] [--out PLACE] [--dtype DTYPE]
                       write a model for transformers, vLLM, llama.cpp, peft or the hub, with a model card
  proximo pairs RUN --out PAIRS.jsonl [--steps A:B] [--by outcome|reward] [--old FILE --old-share X] [--seed N]
                       rank a run's completions: training data for reward-model or dpo
  proximo rank RUN|FILE --out PAIRS.jsonl [--completions N] [--per-prompt N] [--steps A:B] [--seed N]
                       rank completions yourself, some keys a prompt: training data for reward-model or dpo
  proximo iterate [PRESET | run.toml] --reward-model DIR --pairs FILE [--rounds N] [--run DIR] [--field VALUE ...]
                       train a policy and its reward model in turn: iterative GRPO
  proximo rate DATA --model MODEL --out FILE [--samples N] [--field VALUE ...]
                       measure how often a model solves each row of a data file, to train on those in between
  proximo plan [PRESET | run.toml] [--model MODEL] [--algorithm NAME] [--gpu NAME] [--field VALUE ...]
                       predict memory and seconds per step on a GPU, before any weights, and say what would fit
  proximo job slurm|kubernetes|kuberay run.toml --run DIR [--nodes N] [--gpus N] [--out FILE]
                       write the job file of a run on several nodes of a cluster
  proximo selfcheck [PRESET | run.toml] [--algorithm NAME] [--field VALUE ...]
                       check in about a minute that model, task and algorithm work together
  proximo chat MODEL [--chat] [--remember] [--temperature X] [--max-tokens N]
                       generate a completion for each line of the terminal or of a pipe; with --chat a conversation
  proximo serve MODEL [--host ADDRESS] [--port N] [--slots N] [--max-tokens N]
                       serve a model as an OpenAI-compatible endpoint, with a page to chat with it
  proximo view [RUN | DIR] [--port N] [--no-browser] [--load-code]
                       open a local web page of one or more runs: curves, and every token of every rollout
  proximo runs [DIR] [--json]
                       list the runs below a folder: state, step, score, algorithm and model
  proximo watch RUN [--once] [--every SECONDS]
                       show a run in the terminal: whether it learns, its curves, events and the newest completion
  proximo replay RUN --step N [--as NAME ...] [--model DIR] [--out TOKENS.parquet]
                       show what other algorithms would have done with a stored step, token by token
  proximo compare [five | PRESET | run.toml ...] [--algorithms A,B | --ablate A] [--seeds N] [--tokens N | --updates N]
                       train algorithms or configs with several seeds and an equal budget; report what is noise
  proximo study [NAME] [--quick] [--processes N] [--out DIR] [--minutes N] [--dry-run]
                       test a published claim with paired seeds and controls; without NAME, list all with their state
  proximo resume RUN [--steps N] [--field VALUE ...]
                       go on with a run that ended early, with its own config
  proximo fork RUN [--at STEP] [--algorithm NAME] [--run DIR] [--field VALUE ...]
                       continue a run from one of its checkpoints in another folder, with something changed
  proximo doctor [RUN]
                       diagnose a run and say what to do first; without RUN, check this installation
  proximo track RUN --to NAME|FILE.py:NAME ...
                       send a run to experiment trackers; --track of train and the stages does it while it runs
  proximo report RUN [--out FILE.html] [--load-code]
                       write one self-contained HTML page: curves, completions, findings, how to repeat the run
  proximo bench TABLE [--only ROW ...] [--steps N] [--peers SETTING ... | none] [--ablate]
  proximo bench rollout|train|step|start --shape NAME|SIZES [--groups N] [--siblings N] [--prompt N]
                       [--lengths N|MEAN:LIMIT]
  proximo bench page   measure rollout, train, step, memory, growth or start, next to TRL and the machine's limits;
                       or write the page of all measurements
  proximo tasks        list the tasks, with an example of each
  proximo explain NAME [--stage.field VALUE ...]
  proximo explain --all
                       explain an algorithm choice by choice, or compare all of them in a table

Every command has --help; proximo --version prints the version, and
proximo --print-completion bash|zsh|fish a script that completes commands, flags and their values with the Tab key.
--json (of most commands; their --help says so) prints the result as JSON on stdout, progress on stderr.
--dry-run (train, eval, compare, study) checks and prints what would run without starting it.
Repeating a command with the same --run resumes a run that ended early. On resume, --allow-change FIELD permits a
changed field, and --accept-lost-rows (also of compare) continues although metrics.jsonl or ledger.jsonl has lost rows.
--load-code (of every command that reads a run, a model or a config) permits the code that a run folder's config names:
a run folder may come from anyone, and without it only code that you have run with this run before is executed.
"""

STAGES = ("sft", "reward-model", "dpo")
"""Commands that train on files."""
LOAD_CODE = "--load-code"
"""The flag that permits the code that a run names."""
WITHOUT_RUNS = ("bench", "tasks", "explain")
"""Commands that read no run folder; all others take --load-code."""
WITH_BARS = ("merge", "export")
"""Commands that show the progress bars of transformers."""
COMMANDS = tuple(dict.fromkeys(re.findall(r"^  proximo ([a-z-]+)", USAGE, re.MULTILINE)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 bad input, 129 terminal closed, 130 interrupted,
    141 output closed by the reader, 143 terminated."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _make_streams_patient()
    try:
        status = _answer(arguments, owns_process=argv is None)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader is gone, as in `proximo ... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (discards what is still to be flushed)
        return 141


def _make_streams_patient() -> None:
    """Escape output that cannot be encoded, and discard output to a stream that was closed from the start."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _answer(arguments: list[str], *, owns_process: bool) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(f"proximo {__version__}")
        return 0
    command, *rest = arguments
    if command.partition("=")[0] == "--print-completion":
        return _print_completion([*command.split("=")[1:], *rest])
    if command == "tasks" and asks_for_help(rest):
        print("usage: proximo tasks\n\nList the tasks, with an example of each.")
        return 0
    if command == "explain" and not rest:
        rest = ["--help"]
    if command not in COMMANDS:
        refuse(no_such_command(command, COMMANDS))
    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(each, lambda number, _: sys.exit(128 + number))
    try:
        if (page := page_of(command, rest)) is not None:
            print(page, end="")
            return 0
        _refuse_unknown(command, rest)
        if (line := first_line(command, rest)) is not None and (owns_process or line == DEMO):
            say(line)
        if owns_process:
            _import_for_good(command)
        with slow_work_told(say), command_line(command not in WITHOUT_RUNS and take_switch(rest, LOAD_CODE), rest):
            return run_command(command, rest)
    except UnsafeFile as error:
        refuse(str(error))
    except KeyboardInterrupt:
        kept = (
            "; what was written so far is in the run folder"
            if command in ("train", "resume", "fork", "iterate", *STAGES)
            else ""
        )
        print(f"interrupted{kept}", file=sys.stderr)
        return 130


def _refuse_unknown(command: str, arguments: Sequence[str]) -> None:
    """Refuse what is certainly wrong before torch is imported: flags that do not exist, a value that one does not take,
    what is not there."""
    if asks_for_help(arguments):
        return
    flags = [each for each in arguments if each != LOAD_CODE or command in WITHOUT_RUNS]
    wrong = unknown_flag(command, flags) or wrong_value(command, flags) or mistake(command, flags)
    if wrong is not None:
        refuse(wrong)


def _print_completion(shells: list[str]) -> int:
    from proximo.cli.help_pages import SHELLS, script

    if len(shells) != 1 or shells[0] not in SHELLS:
        refuse(f"--print-completion {' '.join(shells)}: give one of {', '.join(SHELLS)}".replace("  ", " "))
    print(script(shells[0], COMMANDS), end="")
    return 0


def run_command(command: str, arguments: list[str]) -> int:
    """Each command is the function `run` of its module; those that learn from files share one. A help text that needs
    no config is the module's `USAGE`."""
    run = _function_of(command)
    if (transformers := sys.modules.get("transformers.utils.logging")) is not None and command not in WITH_BARS:
        transformers.disable_progress_bar()  # its bars would mix with our lines
    if asks_for_help(arguments) and (usage := getattr(sys.modules[run.__module__], "USAGE", None)) is not None:
        print(usage, end="")
        return 0
    arguments = spelled_out(command, arguments)
    return run(command, arguments) if command in STAGES else run(arguments)


def _function_of(command: str) -> Callable[..., int]:
    if command in LABORATORY:
        return laboratory(command, f"proximo {command}")
    return import_module(f"proximo.cli.commands.{'stages' if command in STAGES else command}").run


def _import_for_good(command: str) -> None:
    """Import without garbage collection, and leave what was imported out of it from then on: thousands of modules stay
    until the end, and looking through them again and again takes a fifth of the start."""
    gc.disable()
    try:
        _function_of(command)
    finally:
        gc.freeze()
        gc.enable()


# The laboratory

LABORATORY = ("bench", "study")
"""Commands that stand there."""
INSTALL = "in a checkout of Proximo, pip install ./lab"


def laboratory(name: str, asked: str) -> Callable[..., Any]:
    """The function of an entry point; refused where the laboratory is not installed. `asked` is what the user gave."""
    from importlib.metadata import entry_points  # only these commands need it

    entries = entry_points(group="proximo.commands", name=name)
    if not entries:
        refuse(f"{asked} is in the package proximo-lab, which is not installed: {INSTALL}")
    return next(iter(entries)).load()
