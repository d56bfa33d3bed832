"""Python as a tool, in the sandbox."""

from functools import cache

from proximo.processes.sandbox import Limits, Sandbox, SandboxJob

MAX_CHARACTERS = 4000
"""Characters of output that are returned, half of them from its end."""


def run_python(code: str) -> str:
    """Run a Python program and return what it prints. It has no files, no network and a few seconds.

    Args:
        code: the program
    """
    result = _sandbox().run(SandboxJob(code))
    text = (result.stdout + result.stderr).decode(errors="replace")
    text = text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS // 2]} ... {text[-MAX_CHARACTERS // 2 :]}"
    if not result.finished:
        return f"{text}\nThe program failed: {result.ended} {result.code}"
    return text or "The program printed nothing."


@cache
def _sandbox() -> Sandbox:
    """Make the sandbox with the first call, and keep it: a program at a time for each core."""
    return Sandbox(Limits(seconds=5))


run_python.check = _sandbox  # pyright: ignore[reportFunctionMemberAccess]
"""Check before a run starts; raises NoSandbox where programs cannot be held in."""
