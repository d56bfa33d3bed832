"""Journeys 4 and 11: an environment and tools of his own, and judges, waiting rewards and weights."""

from proximo_lab.journeys.belongings import SMALL, gsm8k, model
from proximo_lab.journeys.training import FUNCTION
from proximo_lab.journeys.user import User

LOWER = """
from proximo import Done, Environment, Observation

class Lower(Environment):
    def reset(self, problem):
        self.last, self.left = int(problem["answer"]), 3

    def step(self, reply):
        self.left -= 1
        if not reply.strip().isdigit() or int(reply) >= self.last:
            return Done(reward=0.0)
        self.last = int(reply)
        return Observation(f"{self.last}>", reward=0.25) if self.left else Done(reward=1.0)
"""
RAISES = LOWER.replace("self.left -= 1", 'raise KeyError("score")')
TOOLS = '''
def days_in(month: int, leap_year: bool = False) -> int:
    """Count the days of a month.

    Args:
        month: its number, from 1
        leap_year: whether it is a leap year
    """
    return [31, 28 + leap_year, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][month - 1]
'''
IN_PYTHON = """
import proximo
from lower import Lower
from tools import days_in
from proximo.environments.examples import run_python
rows = [{"prompt": f"{number}>", "answer": str(number)} for number in range(20, 90)]
proximo.train("my-model", "runs/python", data=rows, environment=Lower, max_turns=3, steps=1)
proximo.train("tiny-agent", "runs/both", data=proximo.presets.CALCULATOR.task, tools=[days_in, run_python], steps=1)
"""
JUDGE = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Judge(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"data": [{"id": "stand-in"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.5)
        self.answer({"choices": [{"message": {"content": json.dumps({"reason": "so", "score": 7})}}]})

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
"""
PORT = 18474
JUDGED = f"""
[[rewards.rules]]
weight = 0.5
reward = {{ type = "Judge", url = "http://127.0.0.1:{PORT}/v1", model = "stand-in", rubric = "Is it right?" }}
"""
WAITS = """
import asyncio

async def waits(prompts, completions, **columns):
    await asyncio.sleep(0.5)
    return [float("4" in each) for each in completions]

def short(prompts, completions, **columns):
    return [float(len(each) < 9) for each in completions]
"""
MIXED = """
import proximo
from waits import short, waits
run = proximo.train("my-model", "runs/mixed", data="gsm8k.jsonl", rewards=[waits, (short, 0.25)], steps=2)
print("parts", sorted(name for name in run.metrics().column_names if name.startswith("rewards/")))
"""


def acting(user: User) -> None:
    """4."""
    model(user)
    user.has("lower.py", LOWER)
    user.has("raises.py", RAISES)
    user.has("tools.py", TOOLS)
    playing = "--environment.type MultiTurn --environment.max-turns 3 --sampling.max-tokens 24"
    with user.wants("an environment of his own, by flag") as goal:
        done = goal.types(f"proximo train {SMALL} {playing} --environment.path lower.py:Lower --run runs/lower")
        goal.sees(done.text, r"the model\s+(runs/\S+)")
    with user.wants("who said what, what each reply earned, turns and seconds of an episode") as goal:
        done = goal.types("proximo report runs/lower --json")
        goal.sees(done.out, r'"replies": [\d.]+')
        goal.sees(done.out, r'"earned": \[[^\]]+\]')
        goal.sees(done.out, r'"seconds": [\d.]+')
    with user.wants("tools: a function of his own, and Python in the sandbox, by flag") as goal:
        tools = "--environment.tools tools.py:days_in proximo.environments.examples:run_python"
        task = "--model tiny-agent --task.type Arithmetic --task.chat True --sampling.max-tokens 48"
        done = goal.types(f"proximo train {SMALL} {task} --environment.type MultiTurn {tools} --run runs/tools")
        goal.sees(done.text, r"the model\s+(runs/\S+)")
    with user.wants("both in Python", lines=3) as goal:
        goal.writes("train.py", IN_PYTHON)
        goal.types("python train.py")
        goal.sees(user.run("ls runs/python/checkpoints runs/both/checkpoints").out, r"step-000001")
    with user.wants("to be told in a line of an environment that raises") as goal:
        command = f"proximo train {SMALL} {playing} --environment.path raises.py:Lower --run runs/raises"
        done = goal.types(command, code=None)
        goal.sees(done.text, r"KeyError[^\n]*score")
        assert "Traceback" not in done.text, "it ends with a traceback"


def judged(user: User) -> None:
    """11."""
    model(user)
    gsm8k(user)
    user.has("judge.py", JUDGE)
    user.has("judged.toml", JUDGED)
    user.has("waits.py", WAITS)
    user.run(f"(python judge.py {PORT} >/dev/null 2>&1 & echo $! >judge.pid); sleep 3")
    small = SMALL.replace("--training.groups 4", "--training.groups 8")
    try:
        with user.wants("a judge at half weight, from one table of three lines") as goal:
            done = goal.types(f"proximo train judged.toml {small} --run runs/judged")
            goal.sees(done.text, r"the model\s+(runs/\S+)")
            goal.sees((user.folder / "runs/judged/timings.jsonl").read_text(), r'"judge_requests": \d+')
        with user.wants("eight groups that wait half a second each, judged at once") as goal:
            goal.types(f"proximo train judged.toml {small} --seed 5 --run runs/again")
            text = (user.folder / "runs/again/timings.jsonl").read_text()
            waited = float(goal.sees(text, r'"grade": [\d.]+').split()[-1])
            assert waited < 4.0, f"the step waited {waited} s: groups are judged one after another"
    finally:
        user.run("kill $(cat judge.pid)")
    with user.wants("an async reward by flag") as goal:
        done = goal.types(
            f"proximo train {SMALL} --model my-model --data gsm8k.jsonl {FUNCTION} waits.py:waits --run runs/w"
        )
        goal.sees(done.text, r"called as [^\n]+")
    with user.wants("several rewards with weights, in Python", lines=2) as goal:
        goal.writes("mixed.py", MIXED)
        done = goal.types("python mixed.py")
        goal.sees(done.out, r"parts \[[^\]]+\]")
