"""Thoughts that a chat template opens in its generation prompt, so that a reply begins inside one."""

import re
from dataclasses import dataclass

_OPENED = re.compile(r"(<(?P<tag>(?:\w+:)?(?:think|thinking|thought|thoughts|reasoning))>|\[THINK\])(?P<space>\s*)\Z")


@dataclass(frozen=True)
class Thought:
    """One that the prompt has opened."""

    opens: str
    closes: str
    space: str
    """What the prompt writes behind the mark."""

    def is_in(self, reply: str) -> bool:
        """Whether a reply has a thought of its own: opened again, or only closed."""
        return self.closes in reply or reply.lstrip().startswith(self.opens)

    def is_rendered(self, reply: str, rest: str) -> bool:
        """Whether `rest`, which a template writes behind the prompt for this reply, ends the thought as the reply does,
        and does not open it a second time."""
        is_open = self.is_in(reply) and self.closes not in reply
        return self.closes in rest and not is_open and not rest.lstrip().startswith(self.opens)

    def continued(self, reply: str) -> str:
        """What follows the prompt: the reply's own thought, or else the end of an empty one, and the answer."""
        if not self.is_in(reply):
            return f"{'' if self.space else chr(10)}\n{self.closes}\n\n{reply}"
        started = reply.lstrip()
        return started[len(self.opens) :].removeprefix(self.space) if started.startswith(self.opens) else reply


def opened_thought(asked: str) -> Thought | None:
    """The thought that a prompt ends in; None: it opens none.

    Example: opened_thought("<|assistant|><think>\\n").closes == "</think>"
    """
    found = _OPENED.search(asked)
    if found is None:
        return None
    closes = f"</{found['tag']}>" if found["tag"] else "[/THINK]"
    return Thought(found[1], closes, found["space"])
