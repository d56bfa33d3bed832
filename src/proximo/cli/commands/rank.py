"""`proximo rank`: a person ranks completions, with some keys a prompt."""

import shlex
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from proximo.cli import keys
from proximo.cli.arguments import flag_names, no_such_flag, refuse, refusing, say, take, take_number
from proximo.data.rows import Prompt
from proximo.supervised.by_hand import (
    RankConfig,
    RankingFile,
    RankingQuestion,
    RankingSession,
    first_questions,
    questions,
    ties_file,
)
from proximo.system.opening import without_links
from proximo.system.safe_text import counted, visible

USAGE = """usage: proximo rank RUN|FILE --out PAIRS.jsonl [--completions N] [--per-prompt N] [--steps A:B] [--seed N]

Rank completions yourself: training data for reward-model or dpo. Prompts and completions come in random order, without
scores. Each answer is written at once; the same command goes on where it was stopped.

  RUN   run folder of proximo train: of each group of completions some are shown
  FILE  .jsonl, .json, .parquet or .csv file whose rows have a prompt and a list of completions; or rankings, to rank
        them again: chosen and rejected, or a list called ranking. In a cell of .csv a list is written as JSON

--out FILE         .jsonl file that rankings are appended to; ties are kept beside it, in FILE.ties.jsonl
--completions N    completions shown at a time, 2 to 9 (default: 2)
--per-prompt N     times that a group is asked about, each time with others of its completions (default: 1)
--steps A:B        steps of a run, from A up to but not including B
--seed N           random seed of the order of prompts and completions (default: 0)

keys:
  1 2 ...  the better one (of two also the arrow keys); of more the best, then the next best; the last one that is left
           comes last, and Enter leaves out those that are left
  t        tie: none is better; it is not asked again
  s        skip: it is asked again the next time
  u        undo the answer before
  q        quit
In a pipe a line is an answer: 2, or 312 for an order, or t, s, u or q.

examples:
  proximo rank runs/a --out mine.jsonl
  proximo rank pairs.jsonl --out again.jsonl --completions 4
"""
FLAGS = ("--out", "--completions", "--per-prompt", "--steps", "--seed")
PIPE = 80
"""Columns of a pipe."""
MAX_TEXT = 20_000
"""Maximum characters shown of a text."""
DIGITS = "123456789"
LETTERS = ("t", "s", "u", "q")
ERASE = "\x1b[K"
"""Erases a line of the terminal from the cursor on."""
ARROWS = {keys.LEFT: "1", keys.RIGHT: "2"}


def run(arguments: list[str]) -> int:
    with refusing(OSError):
        config = _config(arguments)
        first = first_questions(config)
        everything = _begun(lambda: questions(config)) if first else None
        asked = first or questions(config)
        session = RankingSession(asked, answers := RankingFile(config.out), everything)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE)
    try:
        with refusing(OSError), keys.single_keys() if keys.are_there() else nullcontext():
            _ask(console, session)
    finally:
        with refusing(OSError):
            answers.sync()
        console.print(Text(visible(_summary(session, config, answers.rankings.size > 0))), soft_wrap=True)
    return 0


def _begun(work: Callable[[], list[RankingQuestion]]) -> Callable[[], list[RankingQuestion]]:
    """Begin work that a person need not wait for; what is returned waits for it. A person who quits does not."""
    result: Future[list[RankingQuestion]] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # raised where it is waited for
            result.set_exception(error)

    def wait() -> list[RankingQuestion]:
        if not result.done():
            say("reading the other rows")
        return result.result()

    threading.Thread(target=run, name="proximo-rank", daemon=True).start()
    return wait


def _config(arguments: list[str]) -> RankConfig:
    out = take(arguments, "--out")
    given = {
        "completions": take_number(arguments, "--completions", int),
        "per_prompt": take_number(arguments, "--per-prompt", int),
        "steps": take(arguments, "--steps"),
        "seed": take_number(arguments, "--seed", int),
    }
    for flag in flag_names(arguments):
        refuse(no_such_flag(flag, FLAGS, "proximo rank"))
    if len(arguments) != 1:
        refuse("rank needs one run folder or one file: proximo rank RUN|FILE --out PAIRS.jsonl")
    if out is None:
        refuse("rank needs --out PAIRS.jsonl, the file that rankings are appended to")
    return RankConfig(arguments[0], out, **{name: value for name, value in given.items() if value is not None})


# Questions and answers


def _ask(console: Console, session: RankingSession) -> None:
    """Show one question after the other until none is left, or the person stops."""
    read = _pressed if keys.are_there() else _line
    complaint = None
    while (question := session.question) is not None:
        _show(console, session, question)
        if complaint is not None:
            say(complaint)
        answer = read(len(question.completions))
        if answer == "q":
            return
        complaint = _apply(session, question, answer)


def _apply(session: RankingSession, question: RankingQuestion, answer: str) -> str | None:
    """Do what an answer says; a complaint where it says nothing that can be done."""
    match answer:
        case "t":
            session.tie()
        case "s":
            session.skip()
        case "u":
            return None if session.take_back() else "there is no answer of this session to undo"
        case _:
            if (order := _order(answer, len(question.completions))) is None:
                return f"{visible(answer, 40)!r} is no answer: {_choices(len(question.completions))}"
            session.rank(order)
    return None


def _order(answer: str, count: int) -> list[int] | None:
    """Numbers from 0, best first; one that is left comes last. None for what is no order.

    Example: _order("31", 3) == [2, 0, 1]
    """
    digits = [each for each in answer if each not in " ,>"]
    if not digits or not all(each in DIGITS[:count] for each in digits) or len({*digits}) < len(digits):
        return None
    order = [int(each) - 1 for each in digits]
    left = [number for number in range(count) if number not in order]
    order += left if len(left) == 1 else []
    return order if len(order) > 1 else None


def _line(count: int) -> str:
    """The next answer of a pipe, a line; its end quits."""
    return line.strip().lower() if (line := sys.stdin.readline()) else "q"


def _pressed(count: int) -> str:
    """The next answer of a keyboard: a letter, or digits until all but one of `count` are ordered, or Enter."""
    typed = ""
    while len(typed) < count - 1:
        key = keys.pressed()
        if key is None:
            return "q"
        key = ARROWS.get(key, key) if count == 2 else key
        if key in LETTERS:
            return key
        if key == keys.ENTER and typed:
            break
        if key == keys.BACKSPACE:
            typed = typed[:-1]
        elif key in DIGITS[:count] and key not in typed:
            typed += key
        print(f"\r{ERASE}{' > '.join(typed)}", end="", flush=True)
    return typed


# What is shown


def _show(console: Console, session: RankingSession, question: RankingQuestion) -> None:
    if keys.are_there():
        console.clear()
    console.print(Rule(Text(_progress(session)), style="dim"))
    console.print(Text(visible(_text(question.prompt), MAX_TEXT)))
    for number, completion in enumerate(question.completions, 1):
        console.print(Rule(Text(str(number), "bold"), align="left", style="dim"))
        console.print(Text(visible(completion, MAX_TEXT)))
    console.print(Rule(style="dim"))
    console.print(Text(_choices(len(question.completions)), "dim"))


def _progress(session: RankingSession) -> str:
    return f"{'' if session.is_complete else 'more than '}{session.left} left, {session.count('ranked')} ranked"


def _choices(count: int) -> str:
    order = "1 or 2 (or ← →): the better one" if count == 2 else f"1 to {count}: the best, then the next best"
    return f"{order}   t tie   s skip   u undo   q quit"


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _summary(session: RankingSession, config: RankConfig, is_written: bool) -> str:
    """Lines on the answers of this session; `is_written`: whether the file holds any ranking, now or from before."""
    ties, skipped = session.count("tie"), session.count("skipped")
    beside = f", {counted(ties, 'tie')} in {ties_file(without_links(config.out)).name}" if ties else ""
    where = f"written to {config.out}" if is_written else f"nothing is written to {config.out}"
    lines = [f"{session.count('ranked')} ranked, {where}{beside}; {skipped} skipped"]
    if session.left + skipped:
        more = "" if session.is_complete else "more than "
        lines.append(f"{more}{session.left + skipped} left: the same command goes on")
    if is_written:
        out = shlex.quote(config.out)
        lines.append(f"next: proximo dpo {out} --model MODEL, or proximo reward-model {out} --model MODEL")
    return "\n".join(lines)
