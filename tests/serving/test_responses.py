"""Answers in parts: their text is that of `json`."""

import json

from hypothesis import given
from hypothesis import strategies as st

from proximo.serving.responses import in_pieces

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(LEAVES, lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=20)


@given(VALUES, st.integers(0, 6))
def test_parts_are_the_whole(value, depth):
    assert "".join(in_pieces(value, depth)) == json.dumps(value)


def test_each_token_is_a_part():
    tokens = [{"token": "a", "top_logprobs": [{"token": "b"}] * 20} for _ in range(100)]
    parts = in_pieces({"choices": [{"logprobs": {"content": tokens}}]})
    assert max(map(len, parts)) < 400
