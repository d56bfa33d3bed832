"""Rows of tokens, and what becomes of those that are too long."""

from dataclasses import dataclass, replace
from typing import Literal, NoReturn


@dataclass(frozen=True)
class Encoded:
    location: str
    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    """Completion tokens: one for an example, all of a ranking with the best first."""
    margin: float | None = None
    """Margin of a ranked pair."""
    closed: int = 0
    """Completions before which the empty thought was closed that the prompt opens."""
    trained: tuple[bool, ...] | None = None
    """Tokens of the one completion that are learned, where it holds several replies with turns between. None: all."""
    is_apart: bool = False
    """True for one of several replies of a conversation that cannot be one row."""

    @property
    def learned(self) -> int:
        """Number of tokens that are learned."""
        return sum(map(len, self.completions)) if self.trained is None else sum(self.trained)


@dataclass
class Limit:
    """Limit of a row's length, and what becomes of longer ones."""

    max_tokens: int
    too_long: Literal["leave_out", "cut", "cut_start"] | None = None
    left_out: int = 0
    """Rows left out, those among them of which a cut would leave nothing to learn."""
    cut: int = 0

    @property
    def line(self) -> str:
        """Number of rows that were too long, for a person; empty where none was."""
        way = "cut at the start" if self.too_long == "cut_start" else "cut"
        hint = " (`data.too_long=cut` cuts them)" if self.too_long == "leave_out" else ""
        words = ((self.left_out, "left out", hint), (self.cut, way, ""))
        return "".join(f", {count} {what} at {self.max_tokens} tokens{more}" for count, what, more in words if count)

    def refuse_most(self, rows: int) -> None:
        """Refuse data of which more than half would be left out: that is no choice, but a limit that is forgotten."""
        if 2 * self.left_out > rows:
            raise ValueError(
                f"data.max_tokens is {self.max_tokens}, and {self.left_out} of {rows} rows are longer: give more, or "
                "cut them, `data.too_long=cut` at the end or `data.too_long=cut_start` at the start"
            )

    def fitted(self, row: Encoded) -> Encoded | None:
        """A row that fits, as it is or cut; None where it is left out."""
        if len(row.prompt) + max(map(len, row.completions)) <= self.max_tokens:
            return row
        if self.too_long is None:
            _refuse_long(len(row.prompt), max(map(len, row.completions)), self.max_tokens)
        cuts = {"leave_out": lambda *_: None, "cut": _cut_end, "cut_start": _cut_start}
        short = cuts[self.too_long](row, self.max_tokens)
        if short is None or not _teaches(short):
            self.left_out += 1
            return None
        self.cut += 1
        return short


def _cut_end(row: Encoded, max_tokens: int) -> Encoded | None:
    room = max_tokens - len(row.prompt)
    if room < 1:
        return None
    completions = tuple(tokens[:room] for tokens in row.completions)
    return replace(row, completions=completions, trained=None if row.trained is None else row.trained[:room])


def _cut_start(row: Encoded, max_tokens: int) -> Encoded | None:
    """Cut the start of the prompt. Where one completion alone is too long, its start is cut, too; several completions
    of one prompt have none of their own to lose."""
    kept = max_tokens - max(map(len, row.completions))
    if kept >= 1:
        return replace(row, prompt=row.prompt[-kept:])
    if len(row.completions) > 1:
        return None
    tokens, trained = next(iter(row.completions)), row.trained
    first, *others = tokens[-max_tokens:]
    behind = None if trained is None else trained[-len(others) :]
    return replace(row, prompt=(first,), completions=(tuple(others),), trained=behind)


def _teaches(row: Encoded) -> bool:
    """True if something is left to learn: a token of a completion, of several completions a difference."""
    return (row.trained is None or any(row.trained)) and len(set(row.completions)) == len(row.completions)


def _refuse_long(prompt: int, longest: int, max_tokens: int) -> NoReturn:
    if prompt >= max_tokens:
        raise ValueError(
            f"the prompt alone has {prompt} tokens, and data.max_tokens is {max_tokens}: shorten it, or give more"
        )
    raise ValueError(
        f"prompt and completion have {prompt + longest} tokens, and data.max_tokens is {max_tokens}: shorten them, "
        "give more, or say what becomes of them, `data.too_long=cut`"
    )
