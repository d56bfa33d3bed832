"""Words on the command line: each stands for the flag of one field, and a name of another library is answered."""

from collections.abc import Sequence

from proximo.config.vocabulary import BY_NAME, WORDS, Word, field_of, foreign, kind_of, words_of

TABLES = {field.partition(".")[0] for word in WORDS for field in word.fields.values()} | {
    "algorithm",
    "sampler",
    "ahead",
}
"""Tables of configs whose fields may be called as something else is elsewhere."""
WITHOUT_TABLE = (
    "model",
    "data",
    "eval-data",
    "run",
    "algorithm",
    "steps",
    "track",
    "ranks",
    "seed",
    "dtype",
    "reward",
    "tools",
)
"""Flags of a command itself, and fields without a table, which need no word."""
LORA, ENVIRONMENT, TOOLS = (BY_NAME[name] for name in ("lora", "environment", "tools"))


def spelled_out(command: str, arguments: Sequence[str]) -> list[str]:
    """The arguments with each word's flag in the place of the word.

    Example: spelled_out("sft", ["--lr", "1e-5"]) == ["--fit.learning-rate", "1e-5"]
    """
    kind, written = kind_of(command), list[str]()
    if kind is None:
        return list(arguments)
    for number, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        name = _name(flag)
        field = field_of(kind, name.removeprefix("no_")) if flag.startswith("--") else None
        if not field:
            written.append(argument)
            continue
        following = value if equals else next(iter(arguments[number + 1 : number + 2]), "--")
        written += _flags(BY_NAME[name.removeprefix("no_")], field, name, following, equals)
    return written


def _flags(word: Word, field: str, name: str, following: str, equals: str) -> list[str]:
    if word is LORA and not equals and following.startswith("-"):
        return ["--adapter.type", "Lora"]
    if word is ENVIRONMENT and ":" not in following:
        return [f"--environment={following}" if equals else "--environment"]
    table, dot, last = field.rpartition(".")
    last = f"no-{last}" if name.startswith("no_") else last
    flag = f"--{table}{dot}{last}".replace("_", "-")
    begins = ["--environment.type", "MultiTurn"] * (word in (ENVIRONMENT, TOOLS))
    return [*begins, f"{flag}={following}" if equals else flag]


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def about_foreign(command: str, arguments: Sequence[str]) -> str | None:
    """Complaint about the first flag that is another library's, with ours; None where there is none. What begins with
    the name of a table may be ours: whoever knows its fields asks for the answer."""
    kind = kind_of(command)
    for argument in arguments:
        flag = argument.partition("=")[0]
        head, dot, _ = _name(flag).partition(".")
        if kind is None or not flag.startswith("--") or (dot and head in TABLES) or field_of(kind, head) is not None:
            continue
        if (answer := answer_to(kind, flag)) is not None:
            return f"{flag}: {answer}"
    return None


def answer_to(kind: str, flag: str) -> str | None:
    """Answer to a flag of another library; None where nothing is known, or this kind of run has no such thing."""
    known = foreign(flag)
    if known is None:
        return None
    ours = _as_flag(kind, known.ours)
    if known.ours and ours is None:
        return None
    return known.remark if ours is None else f"here it is {ours}{known.remark and ', ' + known.remark}"


def _as_flag(kind: str, ours: str) -> str | None:
    """The flag of a word or a field; None where the kind has none."""
    plain = ours.replace("_", "-")
    if ours in BY_NAME:
        return None if field_of(kind, ours) is None else BY_NAME[ours].flag
    if kind != "train" and plain.startswith("training."):
        return f"--fit.{plain.removeprefix('training.')}"
    is_there = kind == "train" or plain in WITHOUT_TABLE
    return f"--{plain}" if plain and is_there else None


def word_lines(command: str) -> list[str]:
    """Lines of a help page: the words of a command, with the fields that they stand for."""
    kind = kind_of(command)
    if kind is None:
        return []
    lines = ["settings by one word (each stands for the field behind it):"]
    for word, field in words_of(kind):
        flags = ", ".join(f"{flag} {word.takes}".rstrip() for flag in word.flags)
        meaning = word.of_stages if word.of_stages and kind != "train" else word.meaning
        lines.append(f"  {flags:<34} {meaning}{f' ({field})' if field else ''}")
    return [*lines, ""]
