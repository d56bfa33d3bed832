"""Programs that nobody has read, run where they can do no harm, or not at all.

A trainer starts servers, small interpreters of their own. A server forks a keeper for each program, and the keeper
forks the program's process behind walls of its own: namespaces, an empty root, Landlock, limits, a filter of system
calls. Only what it printed comes back, and the verdict is the trainer's.
"""

from proximo.sandbox.limits import Calls, Job, Limits, NoSandbox, Result, SandboxFailed
from proximo.sandbox.running import Sandbox, missing_mechanisms

__all__ = ["Calls", "Job", "Limits", "NoSandbox", "Result", "Sandbox", "SandboxFailed", "missing_mechanisms"]
