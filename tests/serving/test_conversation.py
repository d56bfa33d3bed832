"""Conversations: a later prompt begins with the tokens of the earlier ones, as they were sampled."""

import pytest

from proximo.models import prompt_tokens, tiny_tokenizer
from proximo.serving.conversation import Conversation
from proximo.tasks import File
from proximo.types import Completion
from tests.supervised.test_encoding import CHATML, chatml


def reply(tokenizer, text: str, *, ends: bool = True) -> Completion:
    """The text as other tokens than the tokenizer would choose: letter by letter, backwards decoded the same."""
    tokens = [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]
    tokens += [tokenizer.eos_token_id] * ends
    return Completion(tuple(tokens), (0.0,) * len(tokens), text, "stop" if ends else "length")


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("make", [chatml, tiny_tokenizer], ids=["chatml", "no end in the template"])
def test_prompts_continue_what_was_sampled(make, ends: bool):
    tokenizer = make()
    conversation = Conversation(tokenizer)
    first = conversation.ask("hi")
    assert first == prompt_tokens(tokenizer, [{"role": "user", "content": "hi"}])
    said = reply(tokenizer, "yo", ends=ends)
    conversation.answer(said)
    second = conversation.ask("more")
    kept = said.tokens if ends and make is chatml else tuple(tokenizer.encode("yo", add_special_tokens=False))
    assert second[: len(first) + len(kept)] == (*first, *kept)
    # With one token to a letter, it is also what the template's text encodes to.
    assert second == prompt_tokens(tokenizer, conversation.messages)
    assert [message["content"] for message in conversation.messages] == ["hi", "yo", "more"]


def test_sampled_tokens_stay_although_the_text_has_others():
    tokenizer = chatml()
    conversation = Conversation(tokenizer)
    first = conversation.ask("hi")
    # The tokenizer writes `<unk>` for what it does not know; such a token in a reply is no part of its text.
    unknown = tokenizer.convert_tokens_to_ids("<unk>")
    assert isinstance(unknown, int)
    said = reply(tokenizer, "yo")
    odd = Completion((unknown, *said.tokens), (0.0, *said.logprobs), "yo", "stop")
    conversation.answer(odd)
    second = conversation.ask("more")
    assert second[: len(first) + len(odd.tokens)] == (*first, *odd.tokens)


def test_a_template_that_changes_earlier_turns_counts():
    loud = CHATML.replace("message['content']", "(message['content'] | upper)")
    tokenizer = chatml(loud)
    conversation = Conversation(tokenizer)
    conversation.ask("hi")
    conversation.answer(reply(tokenizer, "yo"))
    assert conversation.ask("more") == prompt_tokens(tokenizer, conversation.messages)


def test_a_stop_string_is_no_part_of_a_message():
    tokenizer = chatml()
    conversation = Conversation(tokenizer)
    conversation.ask("hi")
    tokens = reply(tokenizer, "yo!", ends=False).tokens
    conversation.answer(Completion(tokens, (0.0,) * 3, "yo", "stop"))
    assert conversation.ask("more") == prompt_tokens(tokenizer, conversation.messages)


def test_what_got_no_reply_is_forgotten():
    tokenizer = chatml()
    conversation = Conversation(tokenizer)
    conversation.ask("hi")
    conversation.answer(reply(tokenizer, "yo"))
    conversation.ask("too long")
    conversation.take_back()
    second = conversation.ask("more")
    assert second == prompt_tokens(tokenizer, conversation.messages)
    assert len(conversation.messages) == 3
    conversation.reset()
    assert conversation.ask("hi") == prompt_tokens(tokenizer, [{"role": "user", "content": "hi"}])


def test_messages_are_asked_as_in_training():
    tokenizer = chatml()
    task = File("x.jsonl", template="{question}=", system="Add.", chat=True)
    conversation = Conversation(tokenizer, task.ask)
    conversation.ask("1+2")
    conversation.take_back()
    assert conversation.messages == []
    conversation.ask("1+2")
    conversation.answer(reply(tokenizer, "3"))
    conversation.ask("3+4")
    assert [message["content"] for message in conversation.messages] == ["Add.", "1+2=", "3", "3+4="]
