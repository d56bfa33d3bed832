"""A conversation that keeps the tokens of its replies exactly as they were sampled."""

from collections.abc import Callable

from proximo.models import prompt_tokens
from proximo.models.model_types import PreTrainedTokenizerBase
from proximo.models.tokens.tokenizing import ReplyReader, asked_text, reply_tokens
from proximo.types import Completion, Message, Problem


class Conversation:
    """The prompt of each turn continues that of the turn before, token by token.

    Encoding all of the text again could split a reply into other tokens than those that the model wrote. Where a chat
    template does not repeat earlier turns as they were (some leave out a reply's thoughts), its own text counts.

    Example: prompt = conversation.ask("Hello"); conversation.answer(completion)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, asked_as: Callable[[str], Problem] | None = None) -> None:
        """`asked_as` makes a problem of what a user types: its system message counts at the start alone. None: what is
        typed is the message."""
        self._tokenizer, self._read = tokenizer, ReplyReader(tokenizer)
        self._asked_as = asked_as or (lambda text: Problem("question", ({"role": "user", "content": text},), None))
        self.messages: list[Message] = []
        self._before: list[Message] = []
        """The messages without the last one that was asked."""
        self._prompt: tuple[int, ...] = ()
        """The last prompt."""
        self._asked = ""
        """The same as the chat template writes it."""
        self._known: list[tuple[tuple[int, ...], str]] = []
        """The last prompt with its reply, as tokens and as the text that the template has to begin with."""

    def ask(self, text: str) -> tuple[int, ...]:
        """Add a user's message; the prompt of the reply. ValueError if the template refuses it, with nothing added."""
        problem = self._asked_as(text)
        assert not isinstance(problem.prompt, str)
        turns = [turn for turn in problem.prompt if turn["role"] != "system" or not self.messages]
        messages, arguments = [*self.messages, *turns], problem.chat_template_kwargs
        asked = asked_text(self._tokenizer, messages, arguments)
        prompt = prompt_tokens(self._tokenizer, messages, arguments)
        for tokens, before in self._known:
            if asked.startswith(before):
                prompt = (*tokens, *reply_tokens(self._tokenizer, before, asked.removeprefix(before)))
                break
        self._before, self.messages, self._prompt, self._asked = self.messages, messages, prompt, asked
        return prompt

    def answer(self, completion: Completion) -> None:
        """Add the reply to the last message."""
        self.messages = [*self.messages, {"role": "assistant", "content": completion.text}]
        self._known = []
        tokens, text = completion.tokens, self._asked + completion.text
        if self._read(self._prompt, tokens) != completion.text:
            return  # its tokens hold a stop string, too, which is no part of the message
        if tokens and tokens[-1] in self._read.special:  # the end, which most templates write after a reply
            end = self._tokenizer.decode([tokens[-1]])
            assert isinstance(end, str)
            self._known.append(((*self._prompt, *tokens), text + end))
            tokens = tokens[:-1]
        self._known.append(((*self._prompt, *tokens), text))

    def take_back(self) -> None:
        """Forget the last message, which got no reply."""
        self.messages = self._before

    def reset(self) -> None:
        """Forget everything."""
        self.messages, self._known = [], []
