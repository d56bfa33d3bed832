"""Stop strings in the text of a partial, however its tokens cut it."""

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from proximo.models import prompt_tokens, tiny_tokenizer
from proximo.samplers.partial import PartialCompletion, TokenWriter, partials_of
from proximo.samplers.rng import turn_key
from proximo.samplers.sampler import SamplingOptions
from proximo.types import Request


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: a character may take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def test_a_stop_string_may_span_tokens_and_bytes():
    tokenizer = byte_tokenizer()
    text = "añb → ende €! more"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode())
    options = SamplingOptions(temperature=0.0, max_tokens=100, stop=("€!", "no"))
    pen = TokenWriter(tokenizer, frozenset(), options, seed=0, step=0)
    partial = PartialCompletion(key=0, sample=0, prompt=(0,))
    for token in tokens:
        logits = torch.zeros(1, len(tokenizer))
        logits[0, token] = 1.0
        pen.write([partial], logits)
        if partial.finish:
            break
    assert tokenizer.decode(partial.tokens) == "añb → ende €!"
    assert pen.completion(partial, version=0).text == "añb → ende "


def test_the_earliest_of_several_stop_strings_cuts():
    tokenizer = tiny_tokenizer()
    pen = TokenWriter(tokenizer, frozenset(), SamplingOptions(stop=("cd", "bcd")), seed=0, step=0)
    partial = PartialCompletion(
        0, 0, (0,), tokens=list(prompt_tokens(tokenizer, "abcd")), logprobs=[0.0] * 4, finish="stop"
    )
    assert pen.completion(partial, version=0).text == "a"


def test_special_tokens_between_its_pieces_do_not_hide_a_stop_string():
    """The stop string is looked for in the text that graders read, which has no special tokens."""
    tokenizer = tiny_tokenizer()
    pen = TokenWriter(tokenizer, frozenset(), SamplingOptions(max_tokens=50, stop=("ab",)), seed=0, step=0)
    a, b = prompt_tokens(tokenizer, "ab")
    # More special tokens than the tail of a search for two bytes is long.
    tokens = [b, a, *[0] * 20, b, a]
    partial = PartialCompletion(0, 0, (5,))
    pen.take(partial, tokens, [0.0] * len(tokens), [0.0] * len(tokens))
    assert (partial.finish, partial.tokens) == ("stop", tokens[:-1])
    assert pen.completion(partial, version=0).text == "b"


def test_a_partial_ends_at_its_requests_own_limit():
    """Also where the engine would go on: an engine that asks for its next token would do so for good."""
    tokenizer = tiny_tokenizer()
    pen = TokenWriter(tokenizer, frozenset(), SamplingOptions(max_tokens=5), seed=0, step=0)
    own, shared = (PartialCompletion(0, sample, (5,), max_tokens=limit) for sample, limit in ((0, 2), (1, None)))
    for count in range(1, 6):
        pen.write([each for each in (own, shared) if each.finish is None], torch.zeros(2 if count <= 2 else 1, 40))
        assert own.finish == ("length" if count >= 2 else None)
    assert (len(own.tokens), len(shared.tokens), shared.finish) == (2, 5, "length")


def test_random_numbers_of_a_partial_are_by_its_request_turn_and_sample():
    [partials] = partials_of([Request(7, (5,), 2, turn=3, first_sample=4)])
    assert [(each.key, each.sample) for each in partials] == [(turn_key(7, 3), 4), (turn_key(7, 3), 5)]
    assert turn_key(7, 3) != 7
