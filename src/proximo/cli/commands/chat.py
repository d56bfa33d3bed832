"""`proximo chat`: generate a completion for each input line."""

import sys
from collections.abc import Iterator

from transformers.utils.logging import disable_progress_bar

from proximo.cli.flags import changed, refuse, take_model, take_switch
from proximo.cli.models import open_model
from proximo.models import prompt_tokens
from proximo.plain_text import MAX_SHOWN, visible
from proximo.samplers import SamplingOptions
from proximo.samplers.embedded import local_sampler
from proximo.types import Request

HELP = """arguments of the command itself:
  MODEL   folder, run folder, checkpoint, hub id or model name
  --chat  put each line into the tokenizer's chat template as a user's turn; without it a line is the prompt as it is
examples:
  proximo chat tiny-arithmetic --max-tokens 8
  proximo chat runs/a --chat --temperature 0 < questions.txt
"""


def run(arguments: list[str]) -> int:
    """Complete each line independently until the input ends; exit status 1 if a line could not be completed."""
    disable_progress_bar()
    as_chat = take_switch(arguments, "--chat")
    name = take_model(arguments, "proximo chat")
    options = changed(
        SamplingOptions(),
        arguments,
        prog="proximo chat",
        usage="MODEL [--chat]",
        description="Generate a completion for each line of the input. Lines are independent of each other.",
        help_more=HELP,
    )
    model, tokenizer = open_model(name)
    if as_chat and tokenizer.chat_template is None:
        refuse(f"--chat: the tokenizer of {name} has no chat template; leave --chat out to send lines as they are")
    sampler, status = local_sampler(model, tokenizer), 0
    for number, line in enumerate(_lines()):
        try:
            tokens = prompt_tokens(tokenizer, ({"role": "user", "content": line},) if as_chat else line)
            # The line's number is the key: equal lines may get different completions, equal inputs always the same.
            [[completion]] = sampler.sample([Request(number, tokens, num_samples=1)], options, seed=0, step=0)
        except ValueError as error:
            print(f"error: {visible(str(error), MAX_SHOWN)}", file=sys.stderr)
            status = 1
        else:
            print(visible(completion.text), flush=True)
    return status


def _lines() -> Iterator[str]:
    """Input lines that are not blank."""
    mark = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            line = input(mark)
        except EOFError:
            return
        if line.strip():
            yield line
