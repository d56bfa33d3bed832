"""`proximo tasks`: list the tasks, with an example of each."""

from proximo.cli.arguments import refuse
from proximo.tasks import Arithmetic, Chain, Countdown, Echo, Guessing, Sorting


def run(arguments: list[str]) -> int:
    if arguments:
        refuse(f"tasks takes nothing, not {' '.join(arguments)}")
    for task in (Arithmetic(), Countdown(), Echo(), Sorting(), Chain(), Guessing()):
        problem = task.problem(0, "train", 0)
        print(f"{type(task).__name__:<11} {problem.prompt!r} → {task.reference(problem)!r}")
    print('Gym         any reasoning-gym task by its name: task.type = "Gym", task.name = "chain_sum"')
    print('File        data with a prompt and an answer column: --data PATH, or task.type = "File", task.path = "…"')
    print('Code        the same with tests, for answers that are programs: task.type = "Code", task.path = "…"')
    return 0
