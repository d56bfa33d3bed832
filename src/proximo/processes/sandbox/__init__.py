"""A sandbox for untrusted programs: they run isolated, or not at all.

A trainer starts servers, small separate interpreters. A server forks a keeper for each program, and the keeper forks
the program's process with its own isolation: namespaces, an empty root, Landlock, limits, a system-call filter. Only
its output comes back; grading happens in the trainer.
"""

from proximo.processes.sandbox.limits import Calls, Limits, NoSandbox, ProgramResult, SandboxFailed, SandboxJob
from proximo.processes.sandbox.running import Sandbox, missing_mechanisms

__all__ = [
    "Calls",
    "Limits",
    "NoSandbox",
    "ProgramResult",
    "Sandbox",
    "SandboxFailed",
    "SandboxJob",
    "missing_mechanisms",
]
