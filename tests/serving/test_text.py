"""Text that grows token by token: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proximo.serving.text import StopString, TextStream


def of_bytes(prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(tokens).decode(errors="replace")


def streamed(data: bytes, stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    stream, parts = TextStream(of_bytes, (), stop), []
    for byte in data:
        stream.add(byte)
        parts.append(stream.take())
        if stream.stopped:
            break
    return [*parts, stream.take(end=True)], stream


def test_a_character_of_several_tokens_comes_whole():
    assert streamed("aé€b".encode())[0] == ["a", "", "é", "", "", "€", "b", ""]


def test_bytes_that_are_no_text_come_at_the_end():
    assert "".join(streamed(b"a\xff")[0]) == "a\N{REPLACEMENT CHARACTER}"


def test_what_may_be_a_stop_string_is_held_back():
    parts, stream = streamed(b"ab\n\nc", ["\n\n"])
    assert parts == ["a", "b", "", "", ""]
    assert stream.stopped
    assert streamed(b"ab\nc", ["\n\n"])[0] == ["a", "b", "", "\nc", ""]
    assert "".join(streamed(b"ab\n", ["\n\n"])[0]) == "ab\n"


@pytest.mark.parametrize("stop", [["cd", "bcd"], ["bcd", "cd"]])
def test_the_earliest_of_several_stop_strings_counts(stop: list[str]):
    assert "".join(streamed(b"abcd", stop)[0]) == "a"


@given(st.text(alphabet="aé€b\n", max_size=12), st.lists(st.sampled_from(["ab", "é", "a\n", "bb"]), max_size=2))
def test_the_parts_are_the_text_up_to_the_first_stop_string(text: str, stop: list[str]):
    ends = [place for each in stop if (place := text.find(each)) >= 0]
    assert "".join(streamed(text.encode(), stop)[0]) == text[: min(ends, default=len(text))]


def held(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of a text that is the beginning of a stop string, the naive way."""
    return max((size for each in stop for size in range(1, len(each)) if text.endswith(each[:size])), default=0)


FEW = st.text(alphabet="aab€", min_size=1, max_size=6)
"""Texts of few letters overlap with themselves and with each other."""


@given(st.lists(FEW, max_size=12), st.lists(FEW, max_size=4))
def test_parts_and_what_is_held_back_are_those_of_naive_matching(parts: list[str], stop: list[str]):
    """Tokens of several characters: of stop strings that end in the same one, the earliest beginning counts."""
    stream, text, taken = TextStream(lambda prompt, tokens: "".join(parts[token] for token in tokens), (), stop), "", ""
    for token, part in enumerate(parts):
        stream.add(token)
        text += part
        starts = [text.index(each) for each in stop if each in text]
        assert stream.stopped == bool(starts)
        taken += stream.take()
        assert taken == (text[: min(starts)] if starts else text[: len(text) - held(text, stop)])
        if starts:
            return
    assert taken + stream.take(end=True) == text


@given(st.text(alphabet="aé€😀\n", max_size=12), st.lists(st.integers(1, 3), min_size=1), st.lists(FEW, max_size=3))
def test_characters_that_tokens_cut_are_matched_whole(text: str, sizes: list[int], stop: list[str]):
    """Tokens of one to three bytes."""
    data, tokens = text.encode(), []
    while data:
        size = sizes[len(tokens) % len(sizes)]
        tokens.append(data[:size])
        data = data[size:]
    stream = TextStream(
        lambda prompt, numbers: b"".join(tokens[each] for each in numbers).decode(errors="replace"), (), stop
    )
    taken = ""
    for number in range(len(tokens)):
        stream.add(number)
        taken += stream.take()
        if stream.stopped:
            break
    starts = [text.index(each) for each in stop if each in text]
    assert taken + stream.take(end=True) == text[: min(starts, default=len(text))]


class Counted(str):
    """A string that counts how often one of its characters is looked at."""

    __slots__ = ("looks",)

    def __getitem__(self, place):
        self.looks = getattr(self, "looks", 0) + 1
        return super().__getitem__(place)


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        ("a" * 250_000, "a" * 20_000, 20_000),  # all of it may be the beginning
        ("a" * 5_000 + "b", "a" * 20_000, 5_000),  # and falls back by one each time
        ("ab" * 2_000 + "c", "ab" * 10_000, 4_000),
        ("x" * 250_000, "a" * 20_000, 0),
    ],
    ids=["all", "one back", "two back", "none"],
)
def test_a_stop_string_costs_what_was_generated_however_long_it_is(stop: str, text: str, matched: int):
    counted = Counted(stop)
    search = StopString(counted)
    for start in range(0, len(text), 5):
        assert search.search(text[start : start + 5]) is None
    assert search.matched == matched
    assert counted.looks < 8 * len(text)


def test_bytes_that_are_no_text_are_not_read_again_with_each_token():
    read = []

    def reading(prompt: Sequence[int], tokens: Sequence[int]) -> str:
        read.append(len(tokens))
        return of_bytes(prompt, tokens)

    stream = TextStream(reading, ())
    for _ in range(2000):
        stream.add(0xFF)
        assert stream.take() == ""
    for byte in b"ok":
        stream.add(byte)
    assert stream.take() == "\N{REPLACEMENT CHARACTER}" * 2000 + "ok"
    assert sum(read) < 20 * 2000
