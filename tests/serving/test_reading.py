"""Requests are read under a bound that is checked first, and in processes that end with them."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from proximo.models import tiny_tokenizer
from proximo.serving.errors import Refusal
from proximo.serving.requests import Asking


def conversation(*texts: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": each} for each in texts]}).encode()


def prompt(text: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": text}).encode()


def test_a_question_read_elsewhere_is_the_same(reader):
    for kind, data in (("chat", conversation("1+2=")), ("text", prompt(["1+2=", "3"]))):
        here = getattr(reader.asking, kind)(data)
        there = reader.read(kind, data)
        assert [each.prompt for each in there.requests] == [each.prompt for each in here.requests]
        assert there.is_chat == here.is_chat


@pytest.mark.slow("waits for processes")
def test_a_template_that_never_ends_ends_its_request_and_blocks_no_other(reader):
    with ThreadPoolExecutor(3) as threads:
        endless = [threads.submit(reader.read, "chat", conversation("LOOP")) for _ in range(3)]
        time.sleep(0.1)  # they are under way
        assert reader.read("chat", conversation("1+2=")).requests
        assert reader.read("text", prompt("1+2=")).requests
        for each in endless:
            with pytest.raises(Refusal, match="takes more than 0.5 s"):
                each.result(timeout=60)
    assert reader.read("chat", conversation("1+2=")).requests


@pytest.mark.slow("waits for processes")
def test_readers_start_again_after_their_first_process_has_died(reader):
    reader._first.kill()
    reader._first.wait()
    while not reader._lines.empty():  # those that were forked live on
        reader._lines.get().close()
    assert reader.read("text", prompt("1")).requests


class Counted:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self) -> None:
        self.inner, self.characters = tiny_tokenizer(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def encode(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self.inner.encode(text, **options)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("text", prompt("1" * 100_000)),
        ("text", prompt(["1" * 100_000] * 100)),
        ("chat", conversation("1" * 60_000, "2" * 60_000)),
        ("chat", json.dumps({"model": "m", "messages": [{"role": "1" * 100_000, "content": ""}]}).encode()),
    ],
    ids=["text", "texts", "messages", "role"],
)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(kind, data):
    tokenizer: Any = Counted()
    asking = Asking(tokenizer, context=100, model="m", max_tokens=6)
    with pytest.raises(Refusal, match="characters.*context of 100 tokens.*shorten it") as refused:
        getattr(asking, kind)(data)
    assert refused.value.code == "context_length_exceeded"
    assert tokenizer.characters <= 16 * 100


def test_a_prompt_that_fits_is_never_refused_for_its_characters():
    tokenizer = tiny_tokenizer()
    asking = Asking(tokenizer, context=100, model="m", max_tokens=6)
    [asked] = asking.text(json.dumps({"model": "m", "prompt": "1" * 90, "max_tokens": 10}).encode()).requests
    assert len(asked.prompt) == 90
    with pytest.raises(Refusal, match="the prompt has 91 tokens"):
        asking.text(json.dumps({"model": "m", "prompt": "1" * 91, "max_tokens": 10}).encode())
    # Many characters of few tokens: the tokenizer writes its end-of-sequence token as several letters.
    end = str(tokenizer.eos_token)
    [asked] = asking.text(json.dumps({"model": "m", "prompt": end * 80, "max_tokens": 10}).encode()).requests
    assert len(asked.prompt) == 80


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": [[5] * 900] * 128, "echo": True, "logprobs": 20, "max_tokens": 0},
        {"prompt": "1", "n": 128, "logprobs": 20, "max_tokens": 900},
    ],
    ids=["prompts", "completions"],
)
def test_log_probs_that_would_not_fit_into_memory_are_refused(more):
    asking = Asking(tiny_tokenizer(), context=1000, model="m", max_tokens=6)
    with pytest.raises(Refusal, match=r"2,[0-9,]* log-probs.*2,097,152: ask for fewer"):
        asking.text(json.dumps({"model": "m", **more}).encode())
    assert asking.text(json.dumps({"model": "m", **more, "logprobs": 1}).encode()).requests
