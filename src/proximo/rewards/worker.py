"""The process of a reward function, a script: loads the function, then calls it as often as it is asked."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # a script that is started in isolation finds no package
from proximo.processes import channel, worker

calling = worker.module_at(str(Path(__file__).with_name("calling.py")), "proximo_rewards_calling")
"""The module calling.py, by its file: importing the package would take seconds."""


def serve(requests: int, answers: int) -> None:
    """Load the function of the first message, then call it with each of the others."""
    job = channel.receive(requests)
    if job is None:
        return
    worker.begin(job)
    called = _loaded(job)
    if isinstance(called, str):
        channel.send(answers, {"refused": called})
        return
    runner = os.getpid()
    channel.send(answers, {"ready": True, "form": called.described if job["user"] else ""})
    while (request := channel.receive(requests)) is not None:
        before = worker.computed()
        answer = _measured(called, request) if job["measures"] else _answered(called, request, is_users=job["user"])
        if os.getpid() != runner:  # the function forked, and this is the copy coming back
            os._exit(0)
        spent = {"id": request["id"], "computed": worker.computed() - before}
        channel.send(answers, answer | spent | worker.health())


def _loaded(job: Mapping[str, Any]) -> Any:
    """The function as it is called, or in a text why there is none."""
    try:
        module = worker.load(job["place"])
    except BaseException as error:  # a user's module may raise anything while it is imported
        return f"{job['place']} cannot be imported, {worker.described(error)}"
    function = vars(module).get(job["name"])
    if function is None or not (callable(function) or job["user"]):
        known = ", ".join(worker.functions(module)) or "none"
        return f"{job['place']} has no function {job['name']}; it has {known}"[:500]
    try:
        return calling.adapted(function) if job["user"] else function
    except (TypeError, ValueError) as error:
        return f"{job['name']} cannot be called: {error}"


def _measured(function: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a metric's function, or how it failed."""

    def numbers() -> dict[str, Any]:
        named = function.measured(request["arguments"], request["count"])
        return {"measured": {name: [calling.to_number(item) for item in items] for name, items in named.items()}}

    return worker.guarded(numbers, request["seed"])


def _answered(function: Any, request: Mapping[str, Any], *, is_users: bool) -> dict[str, Any]:
    """The scores, or how the function failed."""

    def scored() -> dict[str, Any]:
        arguments, count = request["arguments"], request["count"]
        log = calling.MetricLog()
        # A function of Proximo's own takes its arguments as they are.
        scores = function.scored(arguments, count, log) if is_users else calling.listed(function(**arguments), count)
        return {"scores": [calling.to_number(score) for score in scores], "logged": log.means}

    return worker.guarded(scored, request["seed"])


if __name__ == "__main__":
    worker.main(sys.argv[1:5], serve)
