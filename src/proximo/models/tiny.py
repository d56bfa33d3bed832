"""A model and tokenizer small enough to learn arithmetic on a laptop, in every respect a Hugging Face folder.

Example: tiny_model().save_pretrained(folder); tiny_tokenizer().save_pretrained(folder)
"""

import re
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from proximo.models.model_types import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from proximo.models.packing.attention import registered
from proximo.models.torch_globals import guarded

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SYMBOLS = (PAD, EOS, UNKNOWN, "\n", " ", *string.digits, *string.ascii_letters, *string.punctuation)
"""The vocabulary in the order of its ids: every printable ASCII character is a token of its own."""
PAD_ID, EOS_ID = SYMBOLS.index(PAD), SYMBOLS.index(EOS)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per character, and one for each of `words`; a character it does not know is <unk>."""
    import transformers

    vocabulary = {symbol: index for index, symbol in enumerate((*SYMBOLS, *words))}
    characters = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    pattern = "|".join([*map(re.escape, sorted(words, key=len, reverse=True)), r"[\s\S]"])
    characters.pre_tokenizer = Split(Regex(pattern), behavior="isolated")
    characters.decoder = Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def tiny_model(
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 384,
    seed: int = 0,
    words: int = 0,
) -> Qwen3ForCausalLM:
    """A Qwen3 of `tiny_tokenizer`'s vocabulary with random float32 weights, 0.8 million by default.

    `words` is the number of words that the tokenizer has. The same seed gives the same weights; the caller's random
    numbers are left as they were.
    """
    import transformers

    shape = _shape(hidden, heads, kv_heads, words)
    config = transformers.Qwen3Config(**shape, num_hidden_layers=layers, intermediate_size=intermediate)
    with _seeded(seed):
        # from_config, not the constructor: the weights must not depend on torch's default dtype.
        kind = transformers.Qwen3ForCausalLM
        model = kind._from_config(config, dtype=torch.float32, attn_implementation=registered())
    model.generation_config = transformers.GenerationConfig(pad_token_id=PAD_ID, eos_token_id=EOS_ID)
    return model.eval()


def tiny_moe(
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    experts: int = 8,
    chosen: int = 2,
    intermediate: int = 96,
    seed: int = 0,
) -> Qwen3MoeForCausalLM:
    """A mixture of experts like `tiny_model`: each token goes to `chosen` of the `experts` in every layer.

    `intermediate` is one expert's width; 0.7 million weights by default, of which a token uses a third.
    """
    import transformers

    if not 1 <= chosen <= experts:
        raise ValueError(f"chosen is {chosen} of {experts} experts: give at least 1 and at most all of them")
    config = transformers.Qwen3MoeConfig(
        **_shape(hidden, heads, kv_heads),
        num_hidden_layers=layers,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=True,
    )
    with _seeded(seed):
        kind = transformers.Qwen3MoeForCausalLM
        model = kind._from_config(config, dtype=torch.float32, attn_implementation=registered())
    model.generation_config = transformers.GenerationConfig(pad_token_id=PAD_ID, eos_token_id=EOS_ID)
    return model.eval()


def _shape(hidden: int, heads: int, kv_heads: int, words: int = 0) -> dict[str, Any]:
    """Settings that both kinds of model have in common."""
    if hidden % heads or heads % kv_heads:
        raise ValueError(
            f"hidden is {hidden}, heads {heads}, kv_heads {kv_heads}: make each a multiple of the one that follows"
        )
    return {
        "vocab_size": len(SYMBOLS) + words,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
    }


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with guarded():
        torch.default_generator.manual_seed(seed)
        yield
