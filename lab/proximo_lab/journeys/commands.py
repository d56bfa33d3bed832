"""Journeys 7 and 9: algorithms by flag; help and mistakes."""

import json

from proximo_lab.journeys.belongings import MODEL, SMALL, gsm8k, model, rows
from proximo_lab.journeys.user import User

TRICKS = {
    "clip-higher": "--algorithm.gate.high 0.2",
    "dynamic sampling": "--algorithm.keep.type KeepAll",
    "token loss": "--algorithm.weights.type SequenceMean",
    "the overlong penalty": "--algorithm.shape none",
}
MISTAKES = {
    "a misspelt command": ("proximo trian", r"train"),
    "a misspelt flag": ("proximo train --stpes 3", r"--steps"),
    "a misspelt algorithm": ("proximo train --algorithm grop", r"grpo"),
    "a text for a number": ("proximo train --steps many", r"many"),
    "a learning rate below zero": ("proximo train --training.learning-rate -1", r"learning.rate"),
    "a missing data file": (f"proximo train --model {MODEL} --data no.jsonl --dry-run", r"no\.jsonl"),
    "a missing model": ("proximo train --model no-model --data gsm8k.jsonl --dry-run", r"no-model"),
    "a folder that is no model": (
        "proximo train --model home --data gsm8k.jsonl --dry-run",
        r"no tokenizer|config\.json",
    ),
    "a column that is not there": (
        f"proximo train --model {MODEL} --data gsm8k.jsonl --task.answer-columns solutoin --dry-run",
        r"solutoin",
    ),
    "a device that is not there": ("proximo train --device cuda --dry-run", r"cuda"),
    "an empty data file": (f"proximo train --model {MODEL} --data empty.jsonl --dry-run", r"empty\.jsonl"),
    "two hundred bad rows": (f"proximo train --model {MODEL} --data bad.jsonl --dry-run", r"bad\.jsonl"),
    "prompts longer than the model's context": (
        f"proximo train --model {MODEL} --data long.jsonl --dry-run",
        r"\d+ positions",
    ),
    "a reward function that is not in its file": (
        f"proximo train --model {MODEL} --data gsm8k.jsonl --task.reward.type PythonFunction "
        "--task.reward.path mine.py:missing --dry-run",
        r"missing",
    ),
    "a config file with a misspelt key": ("proximo train wrong.toml --dry-run", r"stpes.*steps"),
}
LISTED = ("--algorithm", "--run", "--dry-run", "--json", "--task.type", "--algorithm.gate.type", "--data", "--track")
MEASURE = """
import resource, subprocess
subprocess.run(["proximo", "--help"], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(f"{used.ru_utime + used.ru_stime:.2f} s")
"""


def algorithms(user: User) -> None:
    """7."""
    with user.wants("another algorithm") as goal:
        done = goal.types(f"proximo train --algorithm sapo {SMALL} --dry-run --json")
        goal.sees(json.dumps(json.loads(done.out)["config"]["algorithm"]), r"SoftGate")
    for name, flag in TRICKS.items():
        with user.wants(f"DAPO without {name}") as goal:
            done = goal.types(f"proximo train --algorithm dapo {flag} {SMALL} --dry-run --json")
            algorithm = json.loads(done.out)["config"]["algorithm"]
            stage = flag.split()[0].split(".")[1]
            goal.seen.append(f"{stage} = {algorithm.get(stage, 'none')}")
            wanted = {"gate": "0.2", "keep": "KeepAll", "weights": "SequenceMean", "shape": "none"}[stage]
            assert wanted in str(algorithm.get(stage, "none")), algorithm.get(stage)
    with user.wants("the four dropped one at a time, with intervals") as goal:
        settings = (
            "--training.groups 2 --training.group-size 4 --training.minibatches 1 --training.learning-rate 1e-3 "
            "--evaluation.problems 8"
        )
        done = goal.types(f"proximo compare --ablate dapo --seeds 1 --updates 2 {settings} --run runs/ablation")
        for stage in ("gate", "keep", "weights", "shape"):
            goal.sees(done.out, rf"without-{stage} against dapo: [^;,\n]*")
        goal.sees((user.folder / "runs/ablation/compare.md").read_text(), "95 % interval")


def mistakes(user: User) -> None:
    """9."""
    model(user)
    gsm8k(user)
    user.has("empty.jsonl", "")
    rows("bad.jsonl", ({"question": f"{n}+1="} if n % 2 else {"question": f"{n}+1=", "answer": "1"}
                       for n in range(400)), user)  # fmt: skip
    rows("long.jsonl", ({"prompt": f"{n}+" * 2000, "answer": "1"} for n in range(20)), user)
    user.has("mine.py", "def there(completions, **columns):\n    return [0.0 for _ in completions]\n")
    user.has("wrong.toml", "stpes = 3\n")
    with user.wants("help at once") as goal:
        text = goal.types("proximo --help").out
        goal.sees(text, r"proximo train")
        seconds = user.run(f"python -c '{MEASURE}'").out
        goal.sees(seconds, r"[\d.]+ s")
        assert float(seconds.split()[0]) < 0.5, seconds
    with user.wants("every flag in a command's help") as goal:
        text = goal.types("proximo train --help").out
        assert not (missing := [flag for flag in LISTED if flag not in text]), f"not in the help: {missing}"
        goal.seen.append(f"{len(text.splitlines())} lines with {', '.join(LISTED)}")
    with user.wants("its version") as goal:
        goal.sees(goal.types("proximo --version").out, r"\d+\.\d+\.\d+")
    with user.wants("completion for bash, which bash reads") as goal:
        done = goal.types("source <(proximo --print-completion bash) && complete -p proximo")
        goal.sees(done.out, r"complete -\S+ \S+ proximo|complete [^\n]*proximo")
    for name, (command, pattern) in MISTAKES.items():
        with user.wants(f"{name}, refused once") as goal:
            done = goal.types(command, 2)
            refusal = done.err[max(done.err.find("error: "), 0) :].strip()
            assert "Traceback" not in refusal
            assert len(refusal.splitlines()) <= 1 + (":\n" in refusal), refusal[-800:]  # a heading, then the mistake
            goal.sees(refusal, pattern)
            goal.seen[-1] = " ".join(refusal.removeprefix("error: ").split())[:240]
