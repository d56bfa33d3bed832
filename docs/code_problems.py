"""A small world of programs, for the pictures and the gallery: problems with tests, and examples often wrong."""

import json
import random
from pathlib import Path


def write_problems(home: Path) -> None:
    """Small programs, as in guides/code.md: the examples forget a part of most."""
    draw = random.Random(0)
    problems, examples = [], []
    for a, b in draw.sample([(a, b) for a in range(2, 100) for b in range(1, 10)], 600):
        prompt, right, careless = f"{a}*n+{b}:", f"print(int(input())*{a}+{b})", f"print(int(input())*{a})"
        tests = [{"input": str(n), "output": str(a * n + b)} for n in (0, 3, 17)]
        problems.append({"prompt": prompt, "tests": tests, "solution": right})
        examples.append({"prompt": prompt, "completion": right if draw.random() < 0.4 else careless})
    for name, rows in (("problems", problems), ("examples", examples)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
