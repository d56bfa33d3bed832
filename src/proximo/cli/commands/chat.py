"""`proximo chat`: generate a completion for each input line, or hold a conversation."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from proximo.api.evaluating import own_file
from proximo.cli.arguments import refuse, refusing, say, take_model, take_switch
from proximo.cli.flags import changed
from proximo.cli.models import open_model
from proximo.data.rows import is_text
from proximo.models.context_length import Reach, reach_of
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.tokens.tokenizing import ReplyReader, problem_tokens
from proximo.samplers.embedded import EmbeddedSampler, local_sampler
from proximo.samplers.partial import PartialCompletion
from proximo.samplers.plain import PlainSampler
from proximo.samplers.sampler import SamplingOptions
from proximo.serving.conversation import Conversation
from proximo.serving.text import TextStream
from proximo.system.safe_text import visible
from proximo.tasks import File
from proximo.types import Completion, Request

RESET = "/reset"
HELP = """arguments of the command itself:
  MODEL       folder, run folder, checkpoint, hub id or model name
  --chat      put each line into the tokenizer's chat template as a user's message; without it a line is the prompt as
              it is. In a terminal the conversation is remembered: the line /reset starts a new one
              A run that was trained on a file is asked as in training: its system prompt, template, chat and
              chat_template_kwargs come from its config
  --remember  remember the conversation in a pipe, too
examples:
  proximo chat tiny-arithmetic --max-tokens 8
  proximo chat runs/a --chat
  proximo chat runs/a --chat --temperature 0 < questions.txt
"""


def run(arguments: list[str]) -> int:
    """Complete each line until the input ends; exit status 1 if a line could not be completed."""
    as_chat, remember = take_switch(arguments, "--chat"), take_switch(arguments, "--remember")
    name = take_model(arguments, "proximo chat")
    options = changed(
        SamplingOptions(),
        arguments,
        prog="proximo chat",
        usage="MODEL [--chat] [--remember]",
        description="Generate a completion for each line of the input.",
        help_more=HELP,
    )
    with refusing():
        task = own_file(name) or File("")
    as_chat = as_chat or task.chat or bool(task.system)
    if remember and not as_chat:
        refuse("--remember needs --chat: only a chat template says where messages begin and end")
    model, tokenizer = open_model(name)
    if as_chat and tokenizer.chat_template is None:
        refuse(f"--chat: the tokenizer of {name} has no chat template; leave --chat out to send lines as they are")
    task = replace(task, chat=as_chat)
    conversation = Conversation(tokenizer, task.ask) if as_chat and (remember or _is_terminal()) else None
    session = Session(local_sampler(model, tokenizer), tokenizer, options, task, conversation, reach_of(model.config))
    status = 0
    for number, line in enumerate(_lines()):
        if conversation is not None and line.strip() == RESET:
            conversation.reset()
            continue
        try:
            session.complete(number, line)
        except ValueError as error:
            say(f"error: {error}")
            status = 1
    return status


@dataclass(frozen=True)
class Session:
    """Completes lines and prints the completions."""

    sampler: EmbeddedSampler | PlainSampler
    tokenizer: PreTrainedTokenizerBase
    options: SamplingOptions
    task: File
    """Task that decides how a line is asked."""
    conversation: Conversation | None
    """Conversation so far; None: each line stands alone."""
    reach: Reach | None
    """Maximum tokens of a prompt and its completion."""

    def complete(self, number: int, line: str) -> None:
        """Complete a line; ValueError if that is not possible, and then the conversation is as it was."""
        if not is_text(line):  # bytes that are not UTF-8 arrive as lone surrogates, which no tokenizer takes
            raise ValueError("the line is not UTF-8: convert it")
        if self.conversation is None:
            self._sample(number, problem_tokens(self.tokenizer, self.task.ask(line)))
            return
        prompt = self.conversation.ask(line)
        try:
            self.conversation.answer(self._sample(number, prompt))
        except ValueError:
            self.conversation.take_back()
            raise

    def _sample(self, number: int, prompt: tuple[int, ...]) -> Completion:
        # The line's number is the key: equal lines may get different completions, equal inputs always the same.
        request, options = Request(number, prompt, num_samples=1), self.options
        room = options.max_tokens if self.reach is None else self.reach.tokens - len(prompt)
        if 0 < room < options.max_tokens:  # where there is none at all, the sampler says so
            options = replace(options, max_tokens=room)
        writer = Writer(self.tokenizer, prompt, options) if _is_terminal() else None
        [(_, (completion,))] = self.sampler.stream([request], options, seed=0, step=0, listener=writer)
        if writer is None:
            print(visible(completion.text), flush=True)
        else:
            writer.end(completion)
        return completion


class Writer:
    """Shows a completion in the terminal while it is sampled."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: tuple[int, ...], options: SamplingOptions) -> None:
        self._stream = TextStream(ReplyReader(tokenizer), prompt, options.stop)
        self._shown = ""

    def __call__(self, partial: PartialCompletion) -> bool:
        self._stream.add(partial.tokens[-1])
        self._show(self._stream.take())
        return True

    def end(self, completion: Completion) -> None:
        self._show(completion.text.removeprefix(self._shown))
        print(flush=True)

    def _show(self, text: str) -> None:
        self._shown += text
        print(visible(text), end="", flush=True)


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _lines() -> Iterator[str]:
    """Input lines that are not blank."""
    mark = "> " if _is_terminal() else ""
    while True:
        try:
            line = input(mark)
        except EOFError:
            return
        if line.strip():
            yield line
