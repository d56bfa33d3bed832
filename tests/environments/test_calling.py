"""Which calls of a reply are made, and how a model is told of its tools."""

from dataclasses import replace

import pytest
from transformers import AddedToken

from proximo.environments.kinds import MultiTurn
from proximo.environments.tool_calls import spoken
from proximo.rewards.grading import Grading
from proximo.types import Message, Problem
from tests.environments.chat_templates import SMOLLM, chat_tokenizer
from tests.environments.scripted import played

HERE = "tests.environments.worlds"
ADDS = MultiTurn(tools=(f"{HERE}:add",), seconds=5.0)
USER = {"role": "user", "content": "What is 3+4?"}
ASKED = Problem("1", (USER,), "7")
HERMES_CALL = '<tool_call>{"name": "add", "arguments": {"first": 3, "second": 4}}</tool_call>'
LLAMA_CALL = '{"name": "add", "parameters": {"first": 3, "second": 4}}'


@pytest.fixture(scope="module", autouse=True)
def workers():
    grading = Grading()
    with grading.active():
        yield grading
    grading.close()


def roles(tokenizer, reply: str, problem: Problem = ASKED) -> list[str]:
    """Who spoke, in an episode whose first reply is given."""
    script = [reply, "It is 7"]
    [(only,)], _ = played(ADDS, tokenizer, lambda *at: script[at[2]], [problem], samples=1, max_tokens=2000)
    return [turn.role for turn in only.turns]


def test_a_call_before_a_second_end_token_is_made():
    tokenizer = chat_tokenizer("llama")
    tokenizer.add_tokens([AddedToken("<|eom_id|>", special=True)])
    assert roles(tokenizer, LLAMA_CALL + "<|eom_id|>") == ["assistant", "tool", "assistant"]


@pytest.mark.parametrize("thought", [f"<think>I could ask {HERMES_CALL}</think>", f"I could ask {HERMES_CALL}</think>"])
def test_a_call_in_a_thought_is_not_made(thought):
    tokenizer = chat_tokenizer("qwen")
    assert roles(tokenizer, f"{thought}It is 7") == ["assistant"]
    assert roles(tokenizer, f"{thought}{HERMES_CALL}") == ["assistant", "tool", "assistant"]


def test_a_call_in_a_thought_without_an_end_is_not_made():
    assert roles(chat_tokenizer("qwen"), f"<think>I could ask {HERMES_CALL}") == ["assistant"]


@pytest.mark.filterwarnings("ignore::proximo.environments.append_turn.RewrittenTurns")
def test_a_thought_that_the_prompt_has_begun_is_one():
    tokenizer = chat_tokenizer("qwen")
    tokenizer.chat_template = SMOLLM.replace("<|im_start|>assistant\n'", "<|im_start|>assistant\n<think>\n'")
    assert roles(tokenizer, f"I could ask {HERMES_CALL}") == ["assistant"]
    assert roles(tokenizer, f"I ask </think>{HERMES_CALL}") == ["assistant", "tool", "assistant"]


def test_thoughts_are_left_out():
    assert spoken("a<think>b</think>c<think>d</think>e", thinking=False) == "ace"
    assert spoken("a</think>b", thinking=True) == "b" == spoken("a</think>b", thinking=False)
    assert (spoken("a", thinking=True), spoken("a", thinking=False), spoken("", thinking=False)) == ("", "a", "")


def told(tokenizer, *messages: Message) -> list[Message]:
    """The messages with which a policy is asked that was to be asked these."""
    prompt = ADDS.prepared(replace(ASKED, prompt=messages), tokenizer).prompt
    assert not isinstance(prompt, str)
    return list(prompt)


SYSTEM = {"role": "system", "content": "Be brief."}
FIRST_ONLY = "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('system comes first') }}{% endfor %}"
NO_SYSTEM = "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system') }}{% endfor %}"


def test_tools_and_a_system_message_are_one_message():
    tokenizer = chat_tokenizer("smollm")
    tokenizer.chat_template = FIRST_ONLY + SMOLLM
    first, second = told(tokenizer, SYSTEM, USER)
    assert (first["role"], second) == ("system", USER)
    assert first["content"].startswith("Be brief.\n\nYou may call these functions:")
    asked = replace(ASKED, prompt=(SYSTEM, USER))
    assert roles(tokenizer, HERMES_CALL, asked) == ["assistant", "tool", "assistant"]


def test_a_template_without_system_messages_tells_of_tools_in_the_question():
    tokenizer = chat_tokenizer("smollm")
    tokenizer.chat_template = NO_SYSTEM + SMOLLM
    [only] = told(tokenizer, USER)
    assert only["role"] == "user"
    assert only["content"].endswith("\n\nWhat is 3+4?")


def test_a_template_that_forgets_tools_beside_a_system_message_is_not_trusted():
    tokenizer = chat_tokenizer("smollm")
    tokenizer.chat_template = "{% if tools and messages[0].role != 'system' %}{{ tools | tojson }}{% endif %}" + SMOLLM
    assert ADDS.prepared(ASKED, tokenizer).chat_template_kwargs["tools"]
    for user in (USER, {"role": "user", "content": "Use add."}):
        assert "You may call these functions:" in told(tokenizer, SYSTEM, user)[0]["content"]
