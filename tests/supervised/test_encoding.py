"""From texts to rows: exactly the tokens a sampler would have to say, in the order the model scores them."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from proximo.data import DataFile, Example, Mistakes, Ranking, read_examples, read_rankings
from proximo.models import prompt_tokens, tiny_model, tiny_tokenizer
from proximo.runs.log import RunLog
from proximo.supervised.encoding import Encoded, Limit, completion_tokens, encode, prepare, to_rows
from tests.rows import write_rows

TINY = tiny_tokenizer()
EOS = 1
HI = ({"role": "user", "content": "hi"},)
TWO_TURNS = (*HI, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "so?"})

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chatml(template: str = CHATML) -> PreTrainedTokenizerBase:
    """The tiny vocabulary with the special tokens of ChatML, whose end of a turn is the end of a completion."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


def spelled(text: str) -> tuple[int, ...]:
    return tuple(TINY.encode(text, add_special_tokens=False))


# Completions.


def test_a_completion_of_a_text_ends_once():
    assert spelled("19") == (6, 14)
    assert completion_tokens(TINY, "12+7=", "19") == (6, 14, EOS)
    assert completion_tokens(TINY, "12+7=", "19<eos>") == (6, 14, EOS)
    with pytest.raises(ValueError, match="contains '<eos>' before its end"):
        completion_tokens(TINY, "12+7=", "1<eos>9")


def test_a_reply_whose_template_writes_no_end():
    # `user: hi\nassistant: ` is continued by `yo\n`, which no sampler could end with.
    assert prompt_tokens(TINY, HI) == spelled("user: hi\nassistant: ")
    assert completion_tokens(TINY, HI, "yo") == (*spelled("yo"), EOS)
    assert completion_tokens(TINY, TWO_TURNS, "ok") == (*spelled("ok"), EOS)


def test_a_reply_is_what_the_template_makes_of_it():
    tokenizer = chatml()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert completion_tokens(tokenizer, HI, "yo") == (*spelled("yo"), end)
    # Prompt and reply together are the conversation as it is rendered, up to the end of the turn.
    for prompt, reply in ((HI, "yo"), (TWO_TURNS, "well\n\nok")):
        whole = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": reply}], tokenize=False)
        assert isinstance(whole, str)
        said = prompt_tokens(tokenizer, prompt) + completion_tokens(tokenizer, prompt, reply)
        assert tokenizer.decode(list(said)) == whole.removesuffix("\n")
        assert said[-1] == end
        assert said[len(prompt_tokens(tokenizer, prompt)) :].count(end) == 1


def test_a_turn_may_end_otherwise_than_a_text():
    """Models of conversations name two ends; the one that the template writes is learned where the model ends there."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert isinstance(turn, int)
    assert completion_tokens(tokenizer, HI, "yo")[-1] == EOS  # a model that knows no other end would not stop there
    assert completion_tokens(tokenizer, HI, "yo", {EOS, turn}) == (*spelled("yo"), turn)
    assert completion_tokens(tokenizer, "12+7=", "19", {EOS, turn}) == (*spelled("19"), EOS)
    with pytest.raises(ValueError, match=r"contains '<\|im_end\|>' before its end"):
        completion_tokens(tokenizer, HI, "y<|im_end|>o", {EOS, turn})


def test_a_template_may_write_more_than_the_reply():
    # As reasoning models do: an empty thought before every last reply.
    thought = "('<think></think>' if loop.last and message['role'] == 'assistant' else '')"
    tokenizer = chatml(CHATML.replace("message['content']", f"{thought} + message['content']"))
    said = completion_tokens(tokenizer, TWO_TURNS, "ok")
    assert tokenizer.decode(list(said)) == "<think></think>ok<|im_end|>"


@pytest.mark.parametrize("between", ["", " ", "\n<think></think>\n"])
@pytest.mark.parametrize("behind", ["", "\n\n"])
def test_what_a_template_without_ends_writes_before_a_reply_is_learned_too(between: str, behind: str):
    """As GLM-4.6, whose turns end where the next begins, and RWKV."""
    tokenizer = tiny_tokenizer()
    said = f"'{between}' + (message['content'] | trim)".replace("\n", "\\n")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '#' + message['role'] + "
        f"({said} + '{behind}' if message['role'] == 'assistant' else message['content'])".replace("\n", "\\n")
        + " }}{% endfor %}{% if add_generation_prompt %}{{ '#assistant' }}{% endif %}"
    )
    for prompt in (HI, TWO_TURNS):
        assert completion_tokens(tokenizer, prompt, "yo \n") == (*spelled(f"{between}yo"), EOS)


def test_a_template_that_does_not_go_on_from_its_question():
    tokenizer = chatml(CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>Assistant:'"))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert completion_tokens(tokenizer, HI, "yo") == (*spelled("yo"), end)


# Templates that open a thought.

OPENS = CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
"""As DeepSeek-R1: a finished turn is written without the mark, and without its thought."""
DROPS = OPENS.replace("message['content']", "message['content'].split('</think>')[-1]")
QWEN_3 = OPENS.replace(
    "message['content']",
    "('' if message['role'] == 'user' else '<think>\\n' + (message['content'].split('</think>')[0].split('<think>')[-1]"
    ".strip('\\n') if '</think>' in message['content'] else '') + '\\n</think>\\n\\n')"
    " + message['content'].split('</think>')[-1].lstrip('\\n')",
)
"""As Qwen3-Thinking: a finished turn has its thought, or an empty one."""
DEEPSEEK_3 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|im_start|>' + m['content'] }}{% else %}"
    "{{ '~' + '</think>' + m['content'].split('</think>')[-1] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '~' + '<think>' }}{% endif %}"
)
"""As DeepSeek-V3.1: a finished turn has the end of a thought only."""
KEEPS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|im_start|>' + m['content'] }}{% else %}"
    "{{ '~' + '<think></think>' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '~' + '<think>' }}{% endif %}"
)
"""As Laguna: a reply stands behind an empty thought, also one that has its own."""
COHERE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|im_start|>' + m['content'] }}{% else %}"
    "{{ '~(' + m['content'] + ')<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '~<|START_THINKING|>' }}{% endif %}"
)
"""As Command A: its mark is no tag, and a reply has marks of its own."""


@pytest.mark.parametrize(
    ("template", "empty"),
    [
        (OPENS, "\n</think>\n\n"),
        (DROPS, "\n</think>\n\n"),
        (QWEN_3, "\n</think>\n\n"),
        (DEEPSEEK_3, "</think>"),
        (DROPS.replace("<think>\\n", "<think>"), "\n\n</think>\n\n"),
        (DROPS.replace("think>", "seed:think>"), "\n</seed:think>\n\n"),
        (DROPS.replace("<think>", "[THINK]").replace("</think>", "[/THINK]"), "\n[/THINK]\n\n"),
        (KEEPS, "</think>"),
    ],
)
def test_an_answer_never_stands_inside_a_thought_that_the_prompt_opens(template, empty):
    tokenizer = chatml(template)
    close = empty.strip()
    opens = close.replace("/", "")

    def reply(text: str) -> str:
        tokens = list(completion_tokens(tokenizer, HI, text))
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    assert reply("yo") == f"{empty}yo<|im_end|>"
    assert reply("yo<|im_end|>") == f"{empty}yo<|im_end|>"
    own = f"hm\n{close}\n\nyo"
    space = "\n" if f"{opens}\\n" in template else ""
    for text in (own, f"{opens}{space}{own}", f"  {opens}{space}{own}"):
        assert reply(text) == f"{own}<|im_end|>"
    assert reply(f"{opens}{space}cut off") == "cut off<|im_end|>"
    sampled = completion_tokens(tokenizer, HI, "yo", sampled=True)
    assert close in tokenizer.decode(list(sampled)) or tokenizer.decode(list(sampled)) == "yo<|im_end|>"


def test_what_a_template_writes_around_a_reply_stands_behind_the_thought_once():
    def reply(template: str, text: str) -> str:
        tokenizer = chatml(template)
        tokens = list(completion_tokens(tokenizer, HI, text))
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    assert reply(COHERE, "yo") == "\n\n<|END_THINKING|>\n\n(yo)<|im_end|>"
    assert reply(DROPS, "yo \n") == "\n</think>\n\nyo \n<|im_end|>"
    assert reply(DROPS, "hm</think>yo \n") == "hm</think>yo \n<|im_end|>"


def test_thoughts_that_were_closed_are_counted_and_told(tmp_path: Path):
    rows = [
        {"prompt": list(HI), "completion": "yo"},
        {"prompt": list(HI), "completion": "<think>\nhm\n</think>\n\nyo!"},
        {"prompt": "a text <think>", "completion": "b"},
    ]
    data = DataFile(write_rows(tmp_path / "x.jsonl", rows), held_out=0.0)
    told: list[str] = []
    (tmp_path / "run").mkdir()
    prepare(data, read_examples, chatml(OPENS)).report(RunLog(tmp_path / "run"), told.append)
    assert told == [
        "the chat template opens a thought in its prompt, which 1 of 3 completions do not have: it is closed, empty, "
        "before them"
    ]
    pairs = [{"prompt": list(HI), "chosen": "b", "rejected": "c"}]
    ranked = prepare(DataFile(write_rows(tmp_path / "y.jsonl", pairs), held_out=0.0), read_rankings, chatml(OPENS))
    assert [item.closed for item in ranked.train] == [2]
    plain = prepare(data, read_examples, chatml())
    assert sum(item.closed for item in plain.train) == 0


def test_a_tokenizer_without_an_end_is_refused_once():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        encode(tokenizer, [Example("x", "a", "b")], Limit(10), Mistakes())


# EncodedRows.


def test_what_is_too_long_is_told():
    items = [
        Example("x:1", "12+7=", "19"),  # 5 + 3
        Example("x:2", "12+7=", "119"),
        Example("x:3", "12345678", "1"),
        Ranking("x:4", "12+7=", ("19", "1")),
        Ranking("x:5", "12+7=", ("1", "190")),
    ]
    mistakes = Mistakes()
    assert [item.location for item in encode(TINY, items, Limit(8), mistakes)] == ["x:1", "x:4"]
    assert [line[:52] for line in str(mistakes).splitlines()] == [
        "x:2: prompt and completion have 9 tokens, and data.m",
        "x:3: the prompt alone has 8 tokens, and data.max_tok",
        "x:5: prompt and completion have 9 tokens, and data.m",
    ]


def test_what_a_tokenizer_refuses_is_told():
    strict = tiny_tokenizer()
    strict.chat_template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}?"
    )
    bare = tiny_tokenizer()
    bare.chat_template = None
    mistakes = Mistakes()
    assert encode(strict, [Example("x:1", ({"role": "system", "content": "a"},), "b")], Limit(99), mistakes) == []
    assert encode(bare, [Example("x:2", HI, "b")], Limit(99), mistakes) == []
    # Two characters that this vocabulary does not know.
    assert encode(TINY, [Ranking("x:3", "a", ("é", "è"))], Limit(99), mistakes) == []
    assert str(mistakes).splitlines() == [
        "x:1: the chat template refuses it: begin with the user",
        "x:2: prompt is a conversation, but the tokenizer has no chat template: give the prompt as text",
        "x:3: two of its completions are the same tokens: there is no preference to learn",
    ]


def test_rows_by_hand():
    items = [Encoded("x:1", (7, 8), ((3, 4, 1), (5, 1))), Encoded("x:2", (9,), ((6, 1),))]
    rows = to_rows(items)
    assert rows.prompts == ((7, 8), (9,))
    assert rows.tokens.tolist() == [[3, 4, 1], [5, 1, 0], [6, 1, 0]]
    assert rows.lengths.tolist() == [3, 2, 2]
    assert rows.mask.tolist() == [[True, True, True], [True, True, False], [True, True, False]]
    assert rows.group.tolist() == [0, 0, 1]
    some = rows.at(torch.tensor([2, 0]))
    assert (some.tokens.tolist(), some.group.tolist(), some.prompts) == ([[6, 1, 0], [3, 4, 1]], [1, 0], rows.prompts)
    # 2 + 3 + 2 tokens of the first prompt's rows, 1 + 2 of the second's.
    assert [part.tolist() for part in rows.parts(10)] == [[0, 1, 2]]
    assert [part.tolist() for part in rows.parts(9)] == [[0, 1], [2]]


# Files.


SUMS = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(40)]


def test_a_file_is_split_and_encoded(tmp_path: Path):
    data = DataFile(write_rows(tmp_path / "x.jsonl", SUMS), held_out=0.2)
    prepared = prepare(data, read_examples, TINY)
    assert len(prepared.train) + len(prepared.held_out) == 40
    assert 2 <= len(prepared.held_out) <= 16
    assert len(prepared.mistakes) == 0
    [seven] = [item for item in prepared.train + prepared.held_out if item.location.endswith(":8")]
    assert (seven.prompt, seven.completions) == (spelled("7+1="), ((*spelled("8"), EOS),))

    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5}]
    ranked = prepare(DataFile(write_rows(tmp_path / "y.jsonl", pairs), held_out=0.0), read_rankings, TINY)
    [pair] = ranked.train
    assert (pair.completions, pair.margin) == (((*spelled("b"), EOS), (*spelled("c"), EOS)), 0.5)


def test_bad_rows_are_refused_together_or_left_out(tmp_path: Path):
    bad = [{"prompt": "9" * 60, "completion": "1"}, {"prompt": "a", "completion": ""}]
    path = write_rows(tmp_path / "x.jsonl", [*SUMS, *bad])
    with pytest.raises(ValueError, match="with bad rows .`data.skip_bad=True` leaves them out.:") as caught:
        prepare(DataFile(path, max_tokens=50, too_long=None), read_examples, TINY)
    assert [line[:30] for line in str(caught.value).removeprefix("data").replace(f"{path}:", "").splitlines()[1:]] == [
        "41: the prompt alone has 60 to",
        "42: completion is empty",
    ]
    prepared = prepare(DataFile(path, max_tokens=50, too_long=None, skip_bad=True), read_examples, TINY)
    assert (len(prepared.train) + len(prepared.held_out), len(prepared.mistakes)) == (40, 2)


def test_nothing_left_is_an_error(tmp_path: Path):
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": "a", "completion": ""}])
    with pytest.raises(ValueError, match="no row is left for train"):
        prepare(DataFile(path, skip_bad=True), read_examples, TINY)
    path = write_rows(tmp_path / "y.jsonl", SUMS[:1])
    with pytest.raises(ValueError, match="held_out, give a larger share, a file, or 0 for none"):
        prepare(DataFile(path, held_out=1e-9), read_examples, TINY)
    assert prepare(DataFile(path, held_out=0.0), read_examples, TINY).held_out == []


def test_a_row_must_fit_into_the_model(tmp_path: Path):
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": "9" * 30, "completion": "1"}])
    prepared = prepare(DataFile(path, held_out=0.0), read_examples, TINY)
    model = tiny_model(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16)
    prepared.check_room(model)
    model.config.max_position_embeddings = 31
    with pytest.raises(ValueError, match="32 tokens.*31 positions: set it to 31"):
        prepared.check_room(model)


def test_rows_that_are_too_long_are_refused_left_out_or_cut(tmp_path):
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+1=", "completion": "2" * 20}]
    write_rows(tmp_path / "x.jsonl", rows)

    def prepared(**options):
        data = DataFile(str(tmp_path / "x.jsonl"), held_out=0.0, max_tokens=10, **options)
        return prepare(data, read_examples, TINY)

    with pytest.raises(ValueError, match="x.jsonl:2: prompt and completion have 25 tokens.*data.too_long=cut"):
        prepared(too_long=None)
    assert [len(each.completions[0]) for each in prepared().train] == [2]  # left out and counted, as nobody said it
    assert [len(each.completions[0]) for each in prepared(too_long="leave_out").train] == [2]
    cut = prepared(too_long="cut")
    assert [len(each.completions[0]) for each in cut.train] == [2, 6]
    assert cut.train[1].completions[0] == tuple(TINY.encode("222222", add_special_tokens=False))
    assert cut.counts == "2 to train on, 0 held out, 1 cut at 10 tokens"


def test_rows_are_cut_at_their_start():
    items = [Example("x:1", "12345678", "19"), Example("x:2", "12+7=", "1234567890"), Example("x:3", "1=", "1")]
    limit, mistakes = Limit(6, "cut_start"), Mistakes()
    first, second, third = encode(TINY, items, limit, mistakes)
    assert (first.prompt, first.completions) == (spelled("678"), ((*spelled("19"), EOS),))
    # The completion alone is too long: the first token that is left stands before the others.
    assert (second.prompt, second.completions) == (spelled("6"), ((*spelled("7890"), EOS),))
    assert (third.prompt, third.completions) == (spelled("1="), ((*spelled("1"), EOS),))
    assert (limit.cut, limit.left_out, limit.line) == (2, 0, ", 2 cut at the start at 6 tokens")
    assert not mistakes


def test_nothing_is_cut_to_what_teaches_nothing():
    """Without a token of the completion, or where the cut makes two completions equal."""
    items = [
        Example("x:1", "12345678", "19"),
        Ranking("x:2", "1234", ("1234", "1235")),
        Ranking("x:3", "1234", ("1234", "2234")),
    ]
    limit, mistakes = Limit(7, "cut"), Mistakes()
    [kept] = encode(TINY, items, limit, mistakes)
    assert kept.completions == (spelled("123"), spelled("223"))
    assert (limit.cut, limit.left_out) == (1, 2)
    assert not mistakes


def test_a_limit_that_would_leave_out_most_rows_is_refused(tmp_path: Path):
    path = write_rows(
        tmp_path / "x.jsonl", [*SUMS, *({"prompt": f"{i}+1=", "completion": "9" * 60} for i in range(41))]
    )
    with pytest.raises(ValueError, match="data.max_tokens is 50, and 41 of 81 rows are longer: .*data.too_long=cut"):
        prepare(DataFile(path, max_tokens=50), read_examples, TINY)
    assert len(prepare(DataFile(path, max_tokens=50, too_long="cut"), read_examples, TINY).train) > 60


# Conversations.


def talk(*texts: str) -> Example:
    """A conversation as it is read, the user first."""
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
    replies = [Example(f"x, turn {n + 1}", tuple(turns[:n]), texts[n]) for n in range(1, len(turns), 2)]
    return Example("x", replies[-1].prompt, replies[-1].completion, tuple(replies[:-1]))


def test_all_replies_of_a_conversation_are_learned_in_one_row():
    tokenizer = chatml()
    start, end = (tokenizer.convert_tokens_to_ids(word) for word in ("<|im_start|>", "<|im_end|>"))
    [row] = encode(tokenizer, [talk("hi", "yo", "so?", "ok")], Limit(99), Mistakes())
    # <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n...
    opened, asked = (start, *spelled("assistant\n")), (end, *spelled("\n"))
    assert row.prompt == (start, *spelled("user\nhi"), *asked, *opened)
    between = (*spelled("\n"), start, *spelled("user\nso?"), *asked, *opened)
    assert row.completions == ((*spelled("yo"), end, *between, *spelled("ok"), end),)
    # What a sampler would say, with the end of each turn, and nothing else.
    assert row.trained == (True,) * 3 + (False,) * len(between) + (True,) * 3
    assert (row.learned, row.is_apart) == (6, False)
    assert row.trained is not None
    rows = to_rows([row, Encoded("y", (1,), ((2, 3),))])
    assert rows.mask[0].tolist() == list(row.trained)
    assert rows.mask[1].tolist() == [True, True] + [False] * (len(row.trained) - 2)
    # It is the conversation as the template writes it, up to the last end.
    words = [*talk("hi", "yo", "so?", "ok").prompt, {"role": "assistant", "content": "ok"}]
    whole = tokenizer.apply_chat_template(words, tokenize=False)
    assert tokenizer.decode([*row.prompt, *row.completions[0]]) == str(whole).removesuffix("\n")


def test_a_template_that_rewrites_earlier_replies_has_each_learned_by_itself(tmp_path: Path):
    """A thought is dropped once more follows, so no row could have all replies as they are sampled."""
    drops = CHATML.replace(
        "message['content']", "(message['content'] if loop.last else message['content'].split('</think>')[-1])"
    )
    item = talk("hi", "<think>a</think>yo", "so?", "<think>b</think>ok")
    tokenizer = chatml(drops)
    rows = encode(tokenizer, [item], Limit(99), Mistakes())
    assert [row.is_apart for row in rows] == [True, True]
    for row, each in zip(rows, (*item.earlier, item), strict=True):
        assert row.prompt == prompt_tokens(tokenizer, each.prompt)
        assert row.completions == (completion_tokens(tokenizer, each.prompt, each.completion),)
    # One without thoughts is written alike, and stays one row.
    assert len(encode(tokenizer, [talk("hi", "yo", "so?", "ok")], Limit(99), Mistakes())) == 1
    turns = [dict(message) for message in item.prompt if not isinstance(message, str)]
    path = write_rows(tmp_path / "x.jsonl", [{"messages": [*turns, {"role": "assistant", "content": item.completion}]}])
    told: list[str] = []
    prepare(DataFile(path, held_out=0.0), read_examples, tokenizer).report(RunLog(tmp_path / "run"), told.append)
    assert told[0].startswith("2 replies are trained as rows of their own")


def test_a_long_conversation_is_cut_between_and_within_replies():
    tokenizer, item = chatml(), talk("hi", "yo", "so?", "ok")
    [whole] = encode(tokenizer, [item], Limit(99), Mistakes())
    assert whole.trained is not None
    size = len(whole.prompt) + len(whole.completions[0])
    for room in range(2, size):
        for way in ("cut", "cut_start"):
            limit = Limit(room, way)
            rows = encode(tokenizer, [item], limit, Mistakes())
            kept = slice(0, room) if way == "cut" else slice(size - room, size)
            tokens = (*whole.prompt, *whole.completions[0])[kept]
            learned = ((False,) * len(whole.prompt) + whole.trained)[kept]
            if not any(learned[1:]):
                assert (rows, limit.left_out) == ([], 1)
                continue
            [row] = rows
            assert row.prompt + row.completions[0] == tokens
            assert (*(False for _ in row.prompt[1:]), *(row.trained or ())) == learned[1:]


# Plain texts.


def test_a_plain_text_is_learned_whole():
    [row] = encode(TINY, [Example("x", "", "12+7=19")], Limit(99), Mistakes())
    assert (row.prompt, row.completions) == (spelled("1"), ((*spelled("2+7=19"), EOS),))
    [again] = encode(TINY, [Example("x", "", "12+7=19<eos>")], Limit(99), Mistakes())
    assert again == row
    [short] = encode(TINY, [Example("x", "", "1")], Limit(99), Mistakes())
    assert (short.prompt, short.completions) == (spelled("1"), ((EOS,),))


def test_a_plain_text_may_hold_ends_and_begins_once():
    """A conversation that somebody has rendered, of a tokenizer with a BOS."""
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    tokenizer = chatml()
    [row] = encode(tokenizer, [Example("x", "", text)], Limit(99), Mistakes())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert row.prompt + row.completions[0] == (*tokenizer.encode(text, add_special_tokens=False), end)


# Tools.

CALLS = "{% if tools %}{{ '<|im_start|>' + tools[0].function.name + '<|im_end|>\\n' }}{% endif %}" + CHATML.replace(
    "message['content']",
    "message['content'] + (('~' + message.tool_calls[0].function.name + '(' + "
    "(message.tool_calls[0].function.arguments | tojson) + ')') if message.tool_calls else '')",
)


def test_tool_calls_are_learned_as_the_template_writes_them(tmp_path: Path):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "messages": [
            *HI,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "It is 3."},
        ],
    }
    tokenizer = chatml(CALLS)
    [encoded] = prepare(DataFile(write_rows(tmp_path / "x.jsonl", [row]), held_out=0.0), read_examples, tokenizer).train
    text = str(tokenizer.decode([*encoded.prompt, *encoded.completions[0]]))
    assert text.startswith("<|im_start|>add<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert encoded.trained is not None
    learned = [token for token, is_learned in zip(encoded.completions[0], encoded.trained, strict=True) if is_learned]
    assert tokenizer.decode(learned) == '~add({"a": 1})<|im_end|>It is 3.<|im_end|>'
    with pytest.raises(ValueError, match="x.jsonl:1: the chat template does not write the call of add"):
        prepare(DataFile(write_rows(tmp_path / "x.jsonl", [row]), held_out=0.0), read_examples, chatml())
