"""Flags that certainly do not exist, found in the stored help pages: a misspelt one need not wait for torch."""

from collections.abc import Iterator, Sequence

from proximo.cli.helping.completion import FLAG
from proximo.cli.helping.pages import stored_page
from proximo.cli.parsing import no_such_flag


def unknown_flag(command: str, arguments: Sequence[str]) -> str | None:
    """What is wrong with the first flag that the command's page rules out; None where there is none, or no page, or
    another config than the page's is named. Fields of a class that can be chosen are left to who knows the class."""
    page = stored_page(command)
    if page is None or _names_a_preset(command, arguments):
        return None
    known = [name for name, _ in FLAG.findall(page.partition("\nexamples:")[0])]
    tables = {name.rpartition(".")[0] for name in known if name.endswith((".type", ".add"))}
    for flag in arguments:
        name = flag.partition("=")[0].replace("_", "-")
        if name.endswith((".type", ".add")):  # which class a field has there is better said by the config
            continue
        if len(name) > 2 and name.startswith("--") and not any(each in known for each in _spellings(name)):
            is_table = any(each.startswith(f"{name}.") for each in known)
            if not is_table and not any(name.startswith(f"{table}.") for table in tables):
                plain = [each for each in known if not each.endswith((".type", ".add")) and ".N." not in each]
                return no_such_flag(name, plain, f"proximo {command}")
    return None


def _names_a_preset(command: str, arguments: Sequence[str]) -> bool:
    """Whether train's first word is no file: a preset may be a chain of runs, which has other flags."""
    first = arguments[0] if arguments else "-"
    return command == "train" and not first.startswith("-") and not first.endswith(".toml")


def _spellings(name: str) -> Iterator[str]:
    """The flag, and of `--a.no-b` the switch that it turns off."""
    table, dot, field = name.removeprefix("--").rpartition(".")
    yield name
    if field.startswith("no-"):
        yield f"--{table}{dot}{field.removeprefix('no-')}"
