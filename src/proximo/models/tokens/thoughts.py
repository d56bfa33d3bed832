"""Thoughts that a chat template opens in its generation prompt, so that a reply begins inside one."""

import re
from dataclasses import dataclass

_OPENED = re.compile(
    r"(<(?P<tag>(?:\w+:)?(?:think|thinking|thought|thoughts|reasoning))>|\[THINK\]|<\|START_THINKING\|>)"
    r"(?P<space>\s*)\Z"
)
_CLOSED = {"[THINK]": "[/THINK]", "<|START_THINKING|>": "<|END_THINKING|>"}
"""Marks that are no tags, with their ends."""


@dataclass(frozen=True)
class Thought:
    """One that the prompt has opened."""

    opens: str
    closes: str
    space: str
    """Text that the prompt writes behind the mark."""

    def is_in(self, reply: str) -> bool:
        """True if a reply has a thought of its own: opened again, or only closed."""
        return self.closes in reply or reply.lstrip().startswith(self.opens)

    def is_rendered(self, reply: str, rest: str) -> bool:
        """True if `rest`, which a template writes behind the prompt for this reply, ends the thought as the reply does,
        and neither opens it a second time nor closes an empty one before the reply's own."""
        is_open = self.is_in(reply) and self.closes not in reply
        is_once = 1 <= rest.count(self.closes) <= max(1, reply.count(self.closes))
        return is_once and not is_open and not rest.lstrip().startswith(self.opens)

    def continued(self, reply: str) -> str:
        """Text that follows the prompt: the reply's own thought, or else the end of an empty one, and the answer."""
        if not self.is_in(reply):
            return f"{'' if self.space else chr(10)}\n{self.closes}\n\n{reply}"
        started = reply.lstrip()
        return started[len(self.opens) :].removeprefix(self.space) if started.startswith(self.opens) else reply


def opened_thought(asked: str) -> Thought | None:
    """The thought that a prompt ends in; None: it opens none.

    Example: opened_thought("<|assistant|><think>\\n").closes == "</think>"
    """
    match = _OPENED.search(asked)
    if match is None:
        return None
    closes = f"</{match['tag']}>" if match["tag"] else _CLOSED[match[1]]
    return Thought(match[1], closes, match["space"])
