"""Make the tiny models of the worlds `words` and `python`: one guesses words, the other writes small programs.

    python -m proximo_lab.experiments.pretrain_player words|python [--steps 600 150] [--rate R] [--out DIR]

Each is fine-tuned on whole episodes. In the first ones every reply uses what was answered before: guesses that fit all
hints, programs that print the answer, and the number that a program printed. In the second most replies do not, so that
the model knows how and mostly does otherwise: what reinforcement learning can strengthen. Episodes of the second kind
alone do not suffice: letters that fit the hints were too rare in tiny-agent's to be learned at all, and so no reward
could find them. Nor does a high learning rate: at 2e-3 the first model read no hint in 2,500 steps (its loss was 0.824,
that of guessing), at 7e-4 it does after 300 and wins 98 % of its games after 600.

The second model begins as tiny-agent, which copies numbers into calls and out of answers already.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from proximo.models import load_model
from proximo.models.shipped import resolve
from proximo.models.tiny import PAD, SYMBOLS
from proximo.tasks.arithmetic import Arithmetic
from proximo.tasks.guessing import LETTERS, PROMPTS
from proximo_lab.experiments import pretrain_agent
from proximo_lab.experiments.pretrain_agent import ASK, ONLY, agent_model, agent_tokenizer
from proximo_lab.experiments.pretraining import SEED

CALL, END = '<tool_call>{"name": "run_python", "arguments": {"code": "', '"}}</tool_call>'
TEXTS = (*pretrain_agent.WORDS, CALL, END, "run_python", "print")
"""Texts that are one token each, so that episodes are short; those of tiny-agent come first and keep their tokens."""
PROGRAM = Arithmetic(operations=("+", "-", "*"), digits=2, terms=3, held_out=200, chat=True)
CARELESS = 0.6
"""Share of replies in the second lesson that ignore what was answered, or call nothing."""
BATCH, WARMUP = 128, 50
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Turns = list[tuple[str, str]]
"""Turns of an episode: what is read, and the reply to it."""
Write = Callable[[random.Random, float], Turns]


def word(draw: random.Random, careless: float) -> Turns:
    """Guess three times, each after the hints to those before it; the last may be right."""
    secret, possible = [draw.choice(LETTERS) for _ in range(3)], [set(LETTERS) for _ in range(3)]
    turns, read = [], f"<user>{PROMPTS['word']}<eos><assistant>"
    for _ in range(3):
        wild = draw.random() < careless
        guess = [draw.choice(LETTERS if wild else sorted(each)) for each in possible]
        turns.append((read, "".join(guess)))
        if guess == secret:
            break
        hint = "".join("+" if guessed == right else "-" for guessed, right in zip(guess, secret, strict=True))
        for index, letter in enumerate(guess):
            possible[index] &= {letter} if hint[index] == "+" else set(LETTERS) - {letter}
        read = f"<user>{hint}<eos><assistant>"
    return turns


def program(draw: random.Random, careless: float) -> Turns:
    """A call that prints the answer and the answer after it, or an answer at once, or a program that prints nothing."""
    problem = PROGRAM.problem(draw.randrange(10**9), "train", SEED)
    question = problem.id.removeprefix("arithmetic-")
    asked = f"<system>run_python<eos><user>{ASK}{question}{ONLY}<eos><assistant>"
    wild = str(draw.randint(-200, 9999))
    if draw.random() < careless:
        return [(asked, draw.choice((wild, wild, f"{CALL}print({question}{END}", f"{CALL}{question}{END}")))]
    answer = str(problem.answer) if draw.random() >= careless * 0.7 else wild
    return [(asked, f"{CALL}print({question}){END}"), (f"<tool>{problem.answer}\n<eos><assistant>", answer)]


def batch(tokenizer: PreTrainedTokenizerFast, episodes: list[Turns]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, padded, and the same tokens as labels where the policy wrote them."""
    rows = []
    texts = [text for turns in episodes for read, reply in turns for text in (read, f"{reply}<eos>")]
    ids = iter(tokenizer(texts).input_ids)
    for turns in episodes:
        tokens, labels = [], []
        for _ in turns:
            seen, written = next(ids), next(ids)
            tokens += seen + written
            labels += [-100] * len(seen) + written
        rows.append((torch.tensor(tokens), torch.tensor(labels)))
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([each for each, _ in rows], batch_first=True, padding_value=SYMBOLS.index(PAD))
    labels = pad([each for _, each in rows], batch_first=True, padding_value=-100)
    return tokens.to(DEVICE), labels.to(DEVICE)


def learn(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    write: Write,
    steps: tuple[int, int],
    rates: tuple[float, float],
) -> None:
    """The two lessons, each with a learning rate that rises and then falls to 0."""
    draw = random.Random(SEED)
    for count, rate, careless in zip(steps, rates, (0.0, CARELESS), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step, count=count: min((step + 1) / WARMUP, 1 - step / count)
        )
        for step in range(1, count + 1):
            tokens, labels = batch(tokenizer, [write(draw, careless) for _ in range(BATCH)])
            loss = model(input_ids=tokens, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 50 == 0:
                print(f"careless {careless}: step {step}/{count}  loss {loss.item():.3f}", flush=True)


def begun_as_agent(vocabulary: int) -> PreTrainedModel:
    model = load_model(resolve("tiny-agent"), device="cpu", dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    model.resize_token_embeddings(vocabulary)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=("words", "python"))
    parser.add_argument("--steps", type=int, nargs=2, default=(600, 150), help="of the two lessons")
    parser.add_argument("--rate", type=float, help="learning rate of the first lesson; 7e-4, or 2e-3 for python")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.world == "words":
        tokenizer, write, rate = agent_tokenizer(), word, 7e-4
        model = agent_model(len(tokenizer))
    else:
        tokenizer, write, rate = agent_tokenizer(TEXTS), program, 2e-3
        model = begun_as_agent(len(tokenizer))
    torch.nn.Module.to(model, DEVICE)
    learn(model, tokenizer, write, tuple(arguments.steps), (arguments.rate or rate, 1e-3))
    out = arguments.out or Path(f"src/proximo/models/weights/tiny-{arguments.world}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
