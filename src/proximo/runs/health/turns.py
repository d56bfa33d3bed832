"""Rules about episodes of several turns: loops, and tools that are not used, fail, or are called in no format."""

from dataclasses import dataclass
from typing import ClassVar

from proximo.runs.health.history import EARLY, History
from proximo.runs.health.rule import Rule, Severity


@dataclass(frozen=True)
class Loops:
    """A policy that says the same again learns nothing from what it was answered."""

    window: int = 10
    max_share: float = 0.5
    name: ClassVar[str] = "loops"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "repeated_turns"
    show: ClassVar[str] = "duplicates"
    why: ClassVar[str] = "a reply that was given before, after the same question, gets the same answer and costs a turn"
    remedy: ClassVar[str] = (
        "read some episodes; reward each turn a little less than the one before, end an episode that repeats itself "
        "in the environment's step, or lower environment.max_turns"
    )

    @property
    def when(self) -> str:
        share = f"over {self.window} steps more than {self.max_share:.0%}"
        return f"{share} of the later replies say the same as the one before"

    def evidence(self, history: History) -> str | None:
        same = history.typical(self.reads, self.window)
        if not same > self.max_share:
            return None
        return f"over {self.window} steps {same:.0%} of the later replies say the same as the one before"


@dataclass(frozen=True)
class ToolsUnused:
    """A policy that has tools and calls none."""

    window: int = 10
    name: ClassVar[str] = "tools-unused"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "calls"
    show: ClassVar[str] = "worst"
    why: ClassVar[str] = "what no completion does is never rewarded, so the policy cannot learn to use its tools"
    remedy: ClassVar[str] = (
        "read a prompt: the tools and the format of a call must be in it; ask for them in task.system, fine-tune on a "
        "few examples first, or leave the tools out"
    )

    @property
    def when(self) -> str:
        return f"no completion of {self.window} steps calls a tool"

    def evidence(self, history: History) -> str | None:
        calls = history.last(self.reads, self.window)
        if not calls or any(calls):
            return None
        return f"no completion of the last {self.window} steps called a tool"


@dataclass(frozen=True)
class ToolsFail:
    """Calls that are made and fail, for whatever reason."""

    window: int = 10
    max_share: float = 0.9
    name: ClassVar[str] = "tools-fail"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "failed_calls"
    show: ClassVar[str] = "worst"
    why: ClassVar[str] = "a tool that never helps is a cost that the policy learns to avoid"
    remedy: ClassVar[str] = (
        "read the answers of tools in some episodes: what they raise, whether a server is there, whether "
        "environment.seconds is too short; then call the tool by hand"
    )

    @property
    def when(self) -> str:
        return f"over {self.window} steps more than {self.max_share:.0%} of the calls fail"

    def evidence(self, history: History) -> str | None:
        failed = history.typical(self.reads, self.window)
        if not failed > self.max_share or FormatCollapse(self.window).evidence(history) is not None:
            return None
        return f"over {self.window} steps {failed:.0%} of the calls failed"


@dataclass(frozen=True)
class FormatCollapse:
    """Calls that cannot be read, where they could be at the start."""

    window: int = 10
    max_share: float = 0.5
    name: ClassVar[str] = "format-collapse"
    severity: ClassVar[Severity] = "warning"
    reads: ClassVar[str] = "malformed_calls"
    show: ClassVar[str] = "worst"
    why: ClassVar[str] = "a call that is no JSON, or of a tool that does not exist, is made in vain"
    remedy: ClassVar[str] = (
        "go back to a checkpoint from before, with a smaller training.learning_rate or a KL penalty; if it was so "
        "from the start, show the format in task.system or fine-tune on a few examples"
    )

    @property
    def when(self) -> str:
        return f"over {self.window} steps more than {self.max_share:.0%} of the calls cannot be read"

    def evidence(self, history: History) -> str | None:
        broken = history.typical(self.reads, self.window)
        if not broken > self.max_share:
            return None
        first = history.first(self.reads)
        before = f", {sum(first) / len(first):.0%} in the first {EARLY}" if first else ""
        return f"over {self.window} steps {broken:.0%} of the calls could not be read{before}"


RULES: tuple[Rule, ...] = (Loops(), ToolsUnused(), ToolsFail(), FormatCollapse())
