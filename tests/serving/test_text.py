"""Text that grows token by token: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proximo.serving.text import TextStream


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
