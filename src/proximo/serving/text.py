"""The text of a completion while its tokens arrive, and the strings that end it."""

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are not yet a whole character."""


class TextStream:
    """Turns tokens into text that only grows. What may be the start of a stop string is held back.

    Example: stream = TextStream(reader, prompt, ("\\n",)); stream.add(token); stream.take()
    """

    def __init__(
        self, read: Callable[[Sequence[int], Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        """`read` gives the text of tokens behind a prompt, as a `ReplyReader` does."""
        self._read, self._prompt, self._stop = read, prompt[-1:], tuple(stop)
        self._tokens: list[int] = []
        self._from, self._known = 0, ""
        """Start of the last tokens that were read together, and their text: a token is read behind those before it."""
        self._whole = 0
        """Number of tokens whose text is whole."""
        self._text = ""
        self._sent = 0
        self.stopped = False
        """Whether a stop string was found; the text ends before it."""

    def add(self, token: int) -> None:
        self._tokens.append(token)
        text = self._read(self._prompt, self._tokens[self._from :])
        if text.endswith(UNFINISHED):
            return
        self._grow(text.removeprefix(self._known))
        self._from, self._whole = self._whole, len(self._tokens)
        self._known = self._read(self._prompt, self._tokens[self._from : self._whole])

    def take(self, *, end: bool = False) -> str:
        """Text that is new since the last call; with `end`, also what was held back."""
        if end and not self.stopped and self._whole < len(self._tokens):
            self._grow(self._read(self._prompt, self._tokens[self._from :]).removeprefix(self._known))
        limit = len(self._text) if end or self.stopped else len(self._text) - self._held()
        new = self._text[self._sent : limit]
        self._sent = max(self._sent, limit)
        return new

    def _grow(self, new: str) -> None:
        start = len(self._text)
        self._text += new
        found = [self._text.find(stop, max(0, start - len(stop) + 1)) for stop in self._stop]
        if places := [place for place in found if place >= 0]:
            self._text, self.stopped = self._text[: min(places)], True

    def _held(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        return max(
            (count for stop in self._stop for count in range(1, len(stop)) if self._text.endswith(stop[:count])),
            default=0,
        )
