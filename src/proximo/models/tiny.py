"""A model and tokenizer small enough to learn arithmetic on a laptop, in every respect a Hugging Face folder.

Example: tiny_model().save_pretrained(folder); tiny_tokenizer().save_pretrained(folder)
"""

import string

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from proximo.models.attention import NAME

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SYMBOLS = (PAD, EOS, UNKNOWN, "\n", " ", *string.digits, *string.ascii_letters, *string.punctuation)
"""The vocabulary in the order of its ids: every printable ASCII character is a token of its own."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a character it does not know is <unk>."""
    characters = Tokenizer(WordLevel({symbol: index for index, symbol in enumerate(SYMBOLS)}, unk_token=UNKNOWN))
    characters.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def tiny_model(
    hidden: int = 128, layers: int = 4, heads: int = 4, kv_heads: int = 2, intermediate: int = 384, seed: int = 0
) -> Qwen3ForCausalLM:
    """A Qwen3 of `tiny_tokenizer`'s vocabulary with random float32 weights, 0.8 million by default.

    The same seed gives the same weights; the caller's random numbers are left as they were.
    """
    if hidden % heads or heads % kv_heads:
        raise ValueError(
            f"hidden is {hidden}, heads {heads}, kv_heads {kv_heads}: make each a multiple of the one that follows"
        )
    pad, eos = SYMBOLS.index(PAD), SYMBOLS.index(EOS)
    config = Qwen3Config(
        vocab_size=len(SYMBOLS),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=pad,
        eos_token_id=eos,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # from_config, not the constructor: the weights must not depend on torch's default dtype.
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.float32, attn_implementation=NAME)
    model.generation_config = GenerationConfig(pad_token_id=pad, eos_token_id=eos)
    return model.eval()
