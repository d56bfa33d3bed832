"""Make the tiny model for several turns that comes with the package: it plays guessing games and calls a calculator.

    python -m proximo_lab.experiments.pretrain_agent [--steps 2400] [--run DIR] [--out
    src/proximo/models/weights/tiny-agent]

It is fine-tuned on single replies of which most ignore what was answered before: guesses at random, answers without the
calculator. So it knows the formats, does the right thing sometimes, and mostly does not: what reinforcement learning
can strengthen.
"""

import argparse
import random
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from proximo.config import toml
from proximo.data import Example, Mistakes
from proximo.models.tiny import EOS, PAD, SYMBOLS, UNKNOWN
from proximo.runs.log import RunLog
from proximo.supervised.encoding import Limit, encode
from proximo.supervised.fitting import FitOptions, fit
from proximo.supervised.sft import Supervised
from proximo.tasks.guessing import LETTERS, PROMPTS

ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
CALL = '{"name": "calculate", "arguments": {"expression": "'
ASK, ONLY = "What is ", "? Answer with the number only."
WORDS = ("<tool_call>", "</tool_call>", CALL, '"}}', "calculate", ASK, ONLY, *PROMPTS.values(), "higher", "lower")
"""Texts that are one token each, so that episodes are short."""
TEMPLATE = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<eos>{% endif %}"
    "{% for message in messages %}{{ '<' + message.role + '>' }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def agent_tokenizer(texts: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """A character is a token, and so are the roles and some texts."""
    vocabulary = (*SYMBOLS, *ROLES, *texts)
    model = Tokenizer(WordLevel({symbol: index for index, symbol in enumerate(vocabulary)}, unk_token=UNKNOWN))
    words = "|".join(re.escape(word) for word in sorted(texts, key=len, reverse=True))
    model.pre_tokenizer = Split(Regex(rf"{words}|[\s\S]"), behavior="isolated")
    model.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        extra_special_tokens=list(ROLES),
        chat_template=TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    assert len(tokenizer) == len(vocabulary)
    return tokenizer


def agent_model(vocabulary: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=256,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=SYMBOLS.index(PAD),
        eos_token_id=SYMBOLS.index(EOS),
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id)
    return model


def example(number: int, seed: int) -> Example:
    """One reply of one of the three games, after a random past."""
    draw = random.Random(f"{seed} {number}")
    prompt, reply = draw.choice((numbers, words, sums, sums))(draw)
    return Example(f"{number}", prompt, reply)


def numbers(draw: random.Random) -> tuple[str, str]:
    secret, low, high = draw.randint(1, 9), 1, 9
    text = f"<user>{PROMPTS['number']}<eos><assistant>"
    for _ in range(draw.randrange(3)):
        guess = draw.randint(1, 9)
        if guess == secret:
            break
        hint = "higher" if guess < secret else "lower"
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        text += f"{guess}<eos><user>{hint}<eos><assistant>"
    careful = draw.random() < 0.25
    return text, str((low + high) // 2 if careful else draw.randint(1, 9))


def words(draw: random.Random) -> tuple[str, str]:
    secret, possible = [draw.choice(LETTERS) for _ in range(3)], [set(LETTERS) for _ in range(3)]
    text = f"<user>{PROMPTS['word']}<eos><assistant>"
    for _ in range(draw.randrange(3)):
        guess = [draw.choice(LETTERS) for _ in range(3)]
        if guess == secret:
            break
        hint = "".join("+" if guessed == right else "-" for guessed, right in zip(guess, secret, strict=True))
        for index, letter in enumerate(guess):
            possible[index] &= {letter} if hint[index] == "+" else set(LETTERS) - {letter}
        text += f"{''.join(guess)}<eos><user>{hint}<eos><assistant>"
    careful = draw.random() < 0.25
    return text, "".join(draw.choice(sorted(each) if careful else LETTERS) for each in possible)


def sums(draw: random.Random) -> tuple[str, str]:
    first, second = draw.randrange(100), draw.randrange(100)
    product, question = first * second, f"{first}*{second}"
    text, wild = (
        f"<system>calculate<eos><user>{ASK}{question}{ONLY}<eos><assistant>",
        str(draw.randrange(product * 2 + 9)),
    )
    call = f'<tool_call>{CALL}{question}"}}}}</tool_call>'
    if draw.random() < 0.4:
        return text, call if draw.random() < 0.25 else wild
    return f"{text}{call}<eos><tool>{product}<eos><assistant>", str(product) if draw.random() < 0.6 else wild


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--run", default="runs/pretrain-agent")
    parser.add_argument("--out", default="src/proximo/models/weights/tiny-agent")
    arguments = parser.parse_args()
    tokenizer, mistakes, batch = agent_tokenizer(), Mistakes(), 128
    count = min(batch * arguments.steps, 60_000)
    train = encode(tokenizer, [example(number, 1000) for number in range(count)], Limit(96), mistakes)
    held_out = encode(tokenizer, [example(number, 1001) for number in range(500)], Limit(96), mistakes)
    mistakes.refuse("examples that cannot be encoded:")
    options = FitOptions(
        batch=batch,
        epochs=arguments.steps * batch / count,
        learning_rate=3e-3,
        warmup_steps=20,
        evaluate_every=200,
    )
    log = RunLog(Path(arguments.run))
    log.start(toml.dumps(options))
    stage = Supervised(agent_model(len(tokenizer)), train, held_out, token_budget=options.token_budget)
    fitted = fit(stage, options, tokenizer=tokenizer, log=log, seed=1000, say=partial(print, flush=True))
    shutil.copytree(fitted.checkpoint, arguments.out, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
