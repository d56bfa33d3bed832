"""Tasks from the data that a person has: one source, several with weights, and data for evaluation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from proximo.data.locating import data_name
from proximo.tasks.file import File
from proximo.tasks.sources.mixture import Mixture, Source
from proximo.tasks.sources.recognising import Chosen, recognise


@dataclass(frozen=True)
class Opened:
    """A task made of data."""

    task: File | Mixture
    lines: tuple[str, ...]
    """Lines that say how each source was read."""


def open_data(
    data: Sequence[str], evaluation: Sequence[str] = (), chosen: Chosen | None = None, *, chat: bool = False
) -> Opened:
    """The task of these data, each PATH or PATH=WEIGHT, and of data for evaluation, each PATH or NAME=PATH. With data
    for evaluation, nothing of the others is held out unless that was chosen.

    Example: open_data(["math.jsonl=0.7", "code.jsonl=0.3"], ["aime=aime.jsonl"]).task
    """
    if not data:
        raise ValueError("data is empty: give a path, a hub id or rows")
    chosen = chosen or Chosen()
    if evaluation and chosen.held_out is None:
        chosen = replace(chosen, held_out=0.0)
    weighted = [_weighted(source) for source in data]
    read = [recognise(path, chosen, chat=chat) for path, _ in weighted]
    judged = [_named(source) for source in evaluation]
    whole = replace(chosen, prompt_column=None, answer_columns=None, held_out=1.0)
    tests = [recognise(path, whole, chat=chat) for _, path in judged]
    lines = (*(line for _, line in read), *(f"for evaluation: {line}" for _, line in tests))
    if len(read) == 1 and not tests:
        return Opened(read[0][0], lines)
    if len(read) == len(tests) == 1 and not judged[0][0] and _alike(read[0][0], tests[0][0]):
        return Opened(replace(read[0][0], held_out=tests[0][0].path), lines)
    names = _names([data_name(path) for path, _ in weighted] + [name or data_name(path) for name, path in judged])
    sources = [Source(next(names), task, weight) for (task, _), (_, weight) in zip(read, weighted, strict=True)] + [
        Source(next(names), task, weight=0.0) for task, _ in tests
    ]
    return Opened(Mixture(tuple(sources)), lines)


def _weighted(given: str) -> tuple[str, float]:
    """Path and weight of PATH=WEIGHT; a path alone has weight 1."""
    path, equals, weight = given.rpartition("=")
    if not equals:
        return given, 1.0
    try:
        return path, float(weight)
    except ValueError:
        raise ValueError(f"data is {given!r}: give PATH, or PATH=WEIGHT with a number") from None


def _named(given: str) -> tuple[str, str]:
    """Name and path of NAME=PATH; a path alone has no name."""
    name, equals, path = given.partition("=")
    return (name, path) if equals else ("", given)


def _alike(one: File, other: File) -> bool:
    """Tell whether the same columns, reward and prompts serve both."""
    return replace(one, path="", held_out=0.0) == replace(other, path="", held_out=0.0)


def _names(wanted: Sequence[str]) -> Iterator[str]:
    """The names, numbered where they repeat."""
    taken: list[str] = []
    for name in wanted:
        numbered = (f"{name}_{number}" for number in range(2, len(wanted) + 2))
        taken.append(next(free for free in (name, *numbered) if free not in taken))
    return iter(taken)
