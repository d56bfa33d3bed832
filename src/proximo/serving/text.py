"""The text of a completion while its tokens arrive, and the strings that end it.

All of it takes time that is linear in what was generated, however long the stop strings are.
"""

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Text that a tokenizer writes for bytes that are not yet a whole character."""
TAIL = 8
"""Tokens whose text shows whether the last character is whole: one has four bytes at most."""


class StopString:
    """Looks for a string in a text that arrives in parts (Knuth, Morris and Pratt).

    The table of fallbacks is as long as the longest match so far: of a long string that never occurs, little is read.

    Example: StopString("bc").search("abc") == 3
    """

    def __init__(self, string: str) -> None:
        self._string = string
        self._fallbacks = [0]
        """The longest shorter match that the same text ends with, for each length of a match."""
        self.matched = 0
        """Length of the longest end of the text that the string begins with."""

    def __len__(self) -> int:
        return len(self._string)

    def search(self, part: str) -> int | None:
        """Read a further part of the text; where in it the string ends for the first time. Nothing is read behind."""
        string, fallbacks, matched = self._string, self._fallbacks, self.matched
        index = 0
        while index < len(part):
            if not matched and (index := part.find(string[0], index)) < 0:
                break
            if part[index] == string[matched]:
                matched += 1
                index += 1
                if matched == len(string):
                    return index
                if matched > len(fallbacks):
                    fallbacks.append(self._fallback(matched))
            else:
                matched = fallbacks[matched - 1]
        self.matched = matched
        return None

    def _fallback(self, length: int) -> int:
        """The longest end of the first `length` characters that they begin with, given those of shorter beginnings."""
        kept, last = self._fallbacks[length - 2], self._string[length - 1]
        while kept and self._string[kept] != last:
            kept = self._fallbacks[kept - 1]
        return kept + (self._string[kept] == last)


class TextStream:
    """Turns tokens into text that only grows. What may be the start of a stop string is held back.

    Example: stream = TextStream(reader, prompt, ("\\n",)); stream.add(token); stream.take()
    """

    def __init__(
        self, read: Callable[[Sequence[int], Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        """`read` gives the text of tokens behind a prompt, as a `ReplyReader` does."""
        self._read, self._prompt, self._stop = read, prompt[-1:], [StopString(each) for each in dict.fromkeys(stop)]
        self._tokens: list[int] = []
        self._from, self._known = 0, ""
        """Start of the last tokens that were read together, and their text: a token is read behind those before it."""
        self._whole = 0
        """Number of tokens whose text is whole."""
        self._text = ""
        """Text that was not taken yet."""
        self.stopped = False
        """True once a stop string was found; the text ends before it."""

    def add(self, token: int) -> None:
        self._tokens.append(token)
        start = max(self._from, len(self._tokens) - TAIL)  # bytes that are no text are not read again with each token
        if self._read(self._prompt, self._tokens[start:]).endswith(UNFINISHED):
            return
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
            self._whole = len(self._tokens)
        held = 0 if end or self.stopped else max((each.matched for each in self._stop), default=0)
        limit = len(self._text) - held
        new, self._text = self._text[:limit], self._text[limit:]
        return new

    def _grow(self, new: str) -> None:
        before = len(self._text)
        self._text += new
        ends = [(each.search(new), len(each)) for each in self._stop]
        if starts := [before + end - length for end, length in ends if end is not None]:
            self._text, self.stopped = self._text[: min(starts)], True
