"""Prompts begin as their tokenizer begins a text, and replies are what a sampler has to say behind them."""

import string
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from proximo.models import problem_tokens, prompt_tokens, tiny_tokenizer
from proximo.models.tokens import tokenizing
from proximo.models.tokens.marks import marks_of
from proximo.models.tokens.tokenizing import (
    ReplyReader,
    each_prompt_tokens,
    encoded_texts,
    reply_tokens,
    special_prefix,
)
from proximo.recipes.selfcheck.checks import prompts_begin_rightly
from proximo.rl.mixed_reward import same_tokens
from proximo.samplers.partial import PartialCompletion, TokenWriter
from proximo.samplers.sampler import SamplingOptions
from proximo.supervised.encoding import completion_tokens
from proximo.types import Problem

CORPUS = [
    "The capital of France is Paris, and foobar is no foo bar.",
    "What is the answer? The answer is 42. Is the sum 19 or 85?",
    "foobar foobar foo bar barfoo answer: 42 answer:42 Paris Paris\n\nParis",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
BOS, EOS = 1, 2


def with_frame(tokenizer: Tokenizer, frame: str, **more: object) -> PreTrainedTokenizerBase:
    """`frame` is what stands around a text, such as `<s> $A`."""
    numbers = [(word, number) for number, word in enumerate(SPECIAL)]
    tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=numbers)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **more
    )


def bpe(pieces: pre_tokenizers.PreTokenizer, decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pieces, decoder
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet()
        if isinstance(pieces, pre_tokenizers.ByteLevel)
        else ["▁", *string.printable]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def llama2(frame: str = "<s> $A", **more: object) -> PreTrainedTokenizerBase:
    """A space is put before every text, and nothing splits it into words."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer = bpe(pre_tokenizers.Metaspace(), decoders.Sequence(parts))
    tokenizer.normalizer, tokenizer.pre_tokenizer = spaces, None
    return with_frame(tokenizer, frame, **more)


def metaspace(scheme: str) -> PreTrainedTokenizerBase:
    pieces = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    spaces = decoders.Sequence([decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()])
    return with_frame(bpe(pieces, spaces), "<s> $A")


def byte_level(*, space: bool, frame: str = "$A") -> PreTrainedTokenizerBase:
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=space)
    return with_frame(bpe(pieces, decoders.ByteLevel()), frame)


def unigram() -> PreTrainedTokenizerBase:
    """As T5's: an end is appended to every text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    letters = sorted(set("".join(CORPUS)) | set("0123456789"))
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return with_frame(tokenizer, "$A </s>")


TOKENIZERS = {
    "llama-2": llama2(),
    "metaspace always": metaspace("always"),
    "metaspace first": metaspace("first"),
    "metaspace never": metaspace("never"),
    "byte level": byte_level(space=False),
    "byte level with a space": byte_level(space=True),
    "llama-3": byte_level(space=False, frame="<s> $A"),
    "unigram": unigram(),
    "tiny": tiny_tokenizer(),
}
each = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: tuple[int, ...]) -> str:
    """Without the space that comes from the tokenizer alone."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text.removeprefix(" ") if tokenizer is TOKENIZERS["byte level with a space"] else text


# Prompts


@pytest.mark.parametrize(
    ("name", "prefix"),
    {
        "llama-2": (BOS,),
        "metaspace first": (BOS,),
        "llama-3": (BOS,),
        "byte level": (),
        "unigram": (),
        "tiny": (),
    }.items(),
)
def test_a_text_begins_with_the_tokenizers_own_special_tokens_and_stays_open(name, prefix):
    tokenizer = TOKENIZERS[name]
    assert special_prefix(tokenizer) == prefix
    assert prompt_tokens(tokenizer, "The answer is") == (*prefix, *encoded(tokenizer, "The answer is"))


def test_an_end_or_separator_that_the_tokenizer_appends_is_no_part_of_a_prompt():
    framed = llama2("<s> $A </s>")
    assert framed.encode("foo")[-1] == EOS
    assert prompt_tokens(framed, "foo") == (BOS, *encoded(framed, "foo"))
    several = llama2("<unk> <s> $A </s>")  # as ChatGLM's, which begin with two
    assert prompt_tokens(several, "foo") == (0, BOS, *encoded(several, "foo"))


@pytest.mark.parametrize("tokenizer", [llama2(), llama2("<s> $A </s>"), byte_level(space=False)])
def test_a_prompt_is_encoded_twice_whatever_stands_before_it(tokenizer, monkeypatch):
    asked, encode = [], tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda *given, **more: asked.append(given) or encode(*given, **more))
    tokens = prompt_tokens(tokenizer, "ab a")
    assert asked == [("ab a",), ("ab a",)]
    assert tokens == special_prefix(tokenizer) + encoded(tokenizer, "ab a")


def test_there_is_never_a_second_bos():
    tokenizer = llama2(chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}?")
    assert prompt_tokens(tokenizer, "<s>foo") == encoded(tokenizer, "<s>foo")
    said = prompt_tokens(tokenizer, ({"role": "user", "content": "foo"},))
    assert (said[0], said.count(BOS)) == (BOS, 1)
    # A template that writes none was trained with none.
    tokenizer.chat_template = "{{ messages[0]['content'] }}?"
    assert prompt_tokens(tokenizer, ({"role": "user", "content": "foo"},)) == encoded(tokenizer, "foo?")


def test_a_judge_with_another_beginning_reads_text():
    assert same_tokens(llama2(), llama2())
    assert not same_tokens(llama2(), llama2("$A"))


# Replies


def test_a_llama_2_reply_has_no_space_of_its_own():
    tokenizer = TOKENIZERS["llama-2"]
    words = tokenizer.convert_ids_to_tokens
    assert words(list(encoded(tokenizer, "bar"))) == ["▁bar"]  # alone: the fault
    assert words(list(reply_tokens(tokenizer, "foo: ", "bar")))[0] in ("bar", "b")
    assert words(list(reply_tokens(tokenizer, "The capital of France is", " Paris"))) == ["▁Paris"]
    # One token together, `▁foobar`; behind `▁foo`, which the model has read, only `bar` can be said.
    assert words(list(encoded(tokenizer, "foobar"))) == ["▁foobar"]
    assert "".join(words(list(reply_tokens(tokenizer, "foo", "bar")))) == "bar"
    assert "".join(words(list(completion_tokens(tokenizer, "foo", "bar")))) == "bar</s>"


def test_a_reply_in_a_conversation_has_no_space_of_its_own_either():
    ended = "{{ eos_token if m['role'] == 'assistant' }}"
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}" + ended + "{% endfor %}"
    asked, tokenizer = ({"role": "user", "content": "answer: "},), llama2(chat_template=template)
    words = tokenizer.convert_ids_to_tokens(list(completion_tokens(tokenizer, asked, "bar")))
    assert "".join(words) == "bar</s>"


def test_a_space_that_would_merge_with_the_reply_stays_the_prompts():
    tokenizer = TOKENIZERS["byte level"]
    words = tokenizer.convert_ids_to_tokens
    assert words(list(encoded(tokenizer, "is Paris")))[-1] == "ĠParis"
    assert words(list(encoded(tokenizer, "is ")))[-1] == "Ġ"
    assert "".join(words(list(reply_tokens(tokenizer, "is ", "Paris")))) == "Paris"


ASKED = "The capital of France is", "foo", "answer:", "answer: ", "What?\n", "12+7=", "Is the sum 19 or "
REPLIES = " Paris", "bar", "42", " 42", "\n\nParis", "foobar foo", "19", "no."
pieces = st.text(st.sampled_from("foobar ansWPi42.?:+=Tt"), min_size=1, max_size=10).filter(lambda text: text.strip())


@pytest.mark.slow("tries many texts")
@each
@given(asked=st.sampled_from(ASKED) | pieces, reply=st.sampled_from(REPLIES) | pieces)
@example(asked="foo", reply="bar")
@example(asked="answer: ", reply="42")
@settings(max_examples=40, deadline=None)
def test_prompt_and_reply_read_as_they_were_written(tokenizer, asked, reply):
    prompt, said = prompt_tokens(tokenizer, asked), reply_tokens(tokenizer, asked, reply)
    lossless = encoded(tokenizer, asked + reply).count(0) == 0  # <unk>
    if lossless:
        assert text_of(tokenizer, prompt + said) == text_of(tokenizer, encoded(tokenizer, asked)) + reply
        assert ReplyReader(tokenizer)(prompt, said) == reply


def test_a_vocabulary_without_letters_keeps_its_bos():
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "1": 3, "2": 4, "+": 5, "=": 6}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))  # what it cannot spell has no token at all
    digits = with_frame(tokenizer, "<s> $A </s>")
    assert digits.encode("a", add_special_tokens=False) == []
    assert prompt_tokens(digits, "1+2=") == (BOS, 3, 5, 4, 6)
    assert prompt_tokens(digits, "<s>1+2=") == (BOS, 3, 5, 4, 6)


# What a sampler said


def test_a_sampled_space_is_part_of_the_text():
    tokenizer = TOKENIZERS["llama-2"]
    said = reply_tokens(tokenizer, "The capital of France is", " Paris")
    assert tokenizer.decode(list(said)) == "Paris"  # alone, the space is lost
    prompt = prompt_tokens(tokenizer, "The capital of France is")
    draft = PartialCompletion(0, 0, prompt, [*said, EOS], [0.0] * (len(said) + 1), [0.0] * (len(said) + 1), "stop")
    completion = TokenWriter(tokenizer, frozenset([EOS]), SamplingOptions(), seed=0, step=0).completion(
        draft, version=0
    )
    assert completion.text == " Paris"
    # Rollouts become pairs as text, and DPO then learns the very tokens that were said.
    assert completion_tokens(tokenizer, "The capital of France is", completion.text) == completion.tokens
    # Behind a special token the tokenizer puts a space of its own, which is not part of the text.
    assert ReplyReader(tokenizer)((*prompt, EOS), said) == "Paris"


# The self-check


def begun(tokenizer: PreTrainedTokenizerBase, prompt: str | tuple) -> tuple[float | None, bool, str]:
    check = prompts_begin_rightly(tokenizer, [Problem("x", prompt, None)])
    assert check.ok  # it may be meant so
    return check.value, check.warns, check.detail


def test_the_self_check_shows_how_a_prompt_begins():
    value, warns, detail = begun(TOKENIZERS["llama-2"], "foo bar")
    assert (value, warns) == (0.0, False)
    assert detail.startswith("a prompt begins with 1:'<s>' ")
    user = ({"role": "user", "content": "foo"},)
    without = llama2(chat_template="{{ messages[0]['content'] }}?")
    assert "does not begin with the tokenizer's BOS '<s>'" in begun(without, user)[2]
    assert begun(TOKENIZERS["byte level"], "foo")[1]
    twice = llama2(chat_template="{{ bos_token + bos_token }}{{ messages[0]['content'] }}?")
    assert "begins with two BOS '<s>'" in begun(twice, user)[2]
    closed = llama2(chat_template="{{ bos_token + messages[0]['content'] + eos_token }}")
    assert "ends with the end-of-sequence token '</s>'" in begun(closed, user)[2]
    assert begun(tiny_tokenizer(), "12")[1:] == (False, "a prompt begins with 6:'1' 7:'2'")


def test_arguments_of_the_chat_template_reach_it():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ '=' if enable_thinking else '' }}"
    asked = Problem("sum", ({"role": "user", "content": "1+2"},), "3", chat_template_kwargs={"enable_thinking": True})
    plain = Problem("sum", asked.prompt, "3")
    assert problem_tokens(tokenizer, asked) == prompt_tokens(tokenizer, "1+2=")
    assert problem_tokens(tokenizer, plain) == prompt_tokens(tokenizer, "1+2")


def test_many_prompts_have_the_tokens_of_each():
    for frame in ("$A", "<s> $A", "$A </s>"):
        tokenizer = with_frame(bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()), frame)
        tokenizer.chat_template = (
            "{{ '<s>' }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "{{ m.content }}{% endfor %}"
        )
        talk = ({"role": "user", "content": "foobar 42"},)
        prompts = ["foo bar", talk, "<s>The answer", ({"role": "system", "content": "x"},), "Paris\n\n", ""]
        problems = [Problem(f"{number}", prompt, None) for number, prompt in enumerate(prompts)]
        alone = []
        for problem in problems:
            try:
                alone.append(problem_tokens(tokenizer, problem))
            except ValueError as error:
                alone.append(str(error))
        together = [
            str(each) if isinstance(each, ValueError) else each for each in each_prompt_tokens(tokenizer, problems)
        ]
        assert together == alone
        assert "no system" in str(together[3])
        assert frame.startswith("<s>") or "has no tokens" in str(together[5])


# Texts that share their beginnings


def with_token(text: str, **more: bool) -> PreTrainedTokenizerBase:
    tokenizer = byte_level(space=True)
    added: Any = [AddedToken(text, **{"normalized": False, **more}), AddedToken("oo", normalized=False)]
    tokenizer.add_tokens(added)
    return tokenizer


MARKED = {
    **TOKENIZERS,
    "overlapping": with_token("<s>foo"),
    "takes spaces before": with_token("<x>", lstrip=True),
    "takes spaces behind": with_token("<x>", rstrip=True),
    "a word of its own": with_token("<x>", single_word=True),
    "normalized": with_token("<x>", normalized=True),
}
TEXTS = [
    *(
        "<s>foo bar</s>\n<s>answer: 42</s>",
        "<s>foo bar</s>\n<s>answer: 42</s> Paris",
        "<s>",
        "</s><s>",
        " <s> foo <s> ",
    ),
    *("<x>foo", "a <x>  foo<x>\n", "foo<x>bar", "<s>foo<s>foo bar", "<s", "is is oo foobar", "é<s>é", "\n"),
]


@pytest.mark.parametrize("tokenizer", MARKED.values(), ids=MARKED.keys())
def test_texts_with_marks_have_the_tokens_that_each_has_alone(tokenizer):
    assert encoded_texts(tokenizer, TEXTS) == [encoded(tokenizer, text) for text in TEXTS]
    assert encoded_texts(tokenizer, ["", "foo"]) == [encoded(tokenizer, ""), encoded(tokenizer, "foo")]
    framed = encoded_texts(tokenizer, TEXTS, framed=True)
    assert framed == [tuple(tokenizer.encode(text)) for text in TEXTS]


def test_what_texts_share_between_marks_is_encoded_once(monkeypatch):
    given, together = [], tokenizing._together
    monkeypatch.setattr(
        tokenizing,
        "_together",
        lambda tokenizer, texts, *more: given.extend(texts) or together(tokenizer, texts, *more),
    )
    encoded_texts(byte_level(space=False), ["<s>system</s>foo", "<s>system</s>foo bar", "foo<s>system</s>"])
    assert given == ["system", "foo", "foo bar"]


@pytest.mark.parametrize("name", ["metaspace first", "takes spaces before", "takes spaces behind", "a word of its own"])
def test_texts_whose_parts_depend_on_each_other_are_encoded_whole(name):
    assert marks_of(MARKED[name]) is None
    assert marks_of(MARKED["byte level"]) is not None


def test_marks_are_none_where_they_are_split_or_a_text_is_changed_before():
    tokenizer = byte_level(space=False)
    tokenizer.split_special_tokens = True
    assert marks_of(tokenizer) is None

    class Changes(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *arguments, **more):
            return super()._encode_plus(text, *arguments, **more)

    assert marks_of(Changes(tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>")) is None
    assert marks_of(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))) is None
