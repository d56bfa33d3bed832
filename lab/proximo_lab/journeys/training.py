"""Journeys 1, 2 and 12: models, data and rewards of one's own; several sources."""

import json

from proximo_lab.journeys.belongings import MODEL, SMALL, architectures, gsm8k, model, rows, sums
from proximo_lab.journeys.user import User

REWARD = """
def my_reward(completions, answer, **columns):
    right = [text.rsplit("#### ", 1)[-1] for text in answer]
    return [float(text.strip() == wanted) for text, wanted in zip(completions, right)]
"""
CALL = """from my_reward import my_reward
import proximo
run = proximo.train("my-model", "runs/p", data="gsm8k.jsonl", rewards=my_reward, algorithm="dapo", steps=1)
print(run.metrics().num_rows, run.rollouts(1).num_rows, run.findings(), type(run.model), run.checkpoint)
"""
TRL = """
def correct(completions, solution, **kwargs):
    return [1.0 if text.strip() == right else 0.0 for text, right in zip(completions, solution)]


async def brief(prompts, completions, **kwargs):
    return [-0.1 * len(text) if text else None for text in completions]
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.strip() == ground_truth), "acc": solution_str.strip() == ground_truth}
"""
VERIFIERS = """
def exact(completion, answer, **kwargs):
    return 1.0 if completion[-1]["content"].strip() == answer else 0.0
"""
PARQUET = """
import json, pyarrow as pa, pyarrow.parquet as pq
pq.write_table(pa.Table.from_pylist([json.loads(line) for line in open("verl.jsonl")]), "verl.parquet")
"""
FUNCTION = "--task.reward.type PythonFunction --task.reward.path"


def own_model(user: User) -> None:
    """1."""
    model(user)
    gsm8k(user)
    user.has("my_reward.py", REWARD)
    with user.wants("his own model on a GSM8K file") as goal:
        done = goal.types(f"proximo train --model {MODEL} --data gsm8k.jsonl {SMALL} --run runs/a")
        goal.sees(done.err, r"GSM8K's shape")
        goal.sees(done.err, r"comparing last numbers")
        goal.sees(done.err, r"sampling\.max_tokens \d+")
        goal.sees(done.text, r"held-out accuracy\s+before \S+")
    with user.wants("his own reward function, by flag") as goal:
        done = goal.types(
            f"proximo train --model {MODEL} --data gsm8k.jsonl --algorithm dapo {FUNCTION} my_reward.py:my_reward "
            f"{SMALL} --run runs/b"
        )
        goal.sees(done.err, r"my_reward is called as TRL calls it|called as [^\n]*TRL[^\n]*")
        goal.sees(done.text, r"held-out accuracy\s+before \S+")
    architectures(user, "Llama", "Gemma3", "Qwen2")
    for name in ("Llama", "Gemma3", "Qwen2"):
        with user.wants(f"a {name} model whose tokenizer has no pad token") as goal:
            limit = "--sampling.max-tokens 8"
            done = goal.types(f"proximo train --model {name} --data gsm8k.jsonl {SMALL} {limit} --run runs/{name}")
            goal.sees(done.text, r"the model\s+(runs/\S+)")
    with user.wants("the same in Python, and a look at metrics, rollouts and the model", lines=2) as goal:
        goal.writes("train.py", CALL)
        done = goal.types("python train.py")
        goal.sees(done.err, r"GSM8K's shape")
        goal.sees(done.out, r"\d+ \d+ .*ForCausalLM.*runs/p/checkpoints/\S+")


def other_data(user: User) -> None:
    """2."""
    model(user)
    for name, text in (("trl_rewards", TRL), ("verl_score", VERL), ("verifiers_rubric", VERIFIERS)):
        user.has(f"{name}.py", text)
    rows("trl.jsonl", ({"prompt": f"{a}+{b}=", "solution": str(a + b)} for a, b in sums()), user)
    with user.wants("TRL's data and two of its reward functions, one async, with a weight") as goal:
        done = goal.types(
            f"proximo train --model {MODEL} --data trl.jsonl {FUNCTION} trl_rewards.py:correct --rewards.rules.add "
            "PythonFunction --rewards.rules.0.reward.path trl_rewards.py:brief --rewards.rules.0.weight 0.2 "
            f"{SMALL} --run runs/trl"
        )
        goal.sees(done.err, r"TRL's shape: prompt in prompt, answer in solution")
        goal.sees(done.text, r"the model\s+(runs/\S+)")
    parts = ({"data_source": "sums", "prompt": [{"role": "user", "content": f"{a}+{b}="}],
              "reward_model": {"style": "rule", "ground_truth": str(a + b)}, "extra_info": {"index": a}}
             for a, b in sums())  # fmt: skip
    rows("verl.jsonl", parts, user)
    user.run(f"python -c '{PARQUET}'")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    user.has(f"{MODEL}/chat_template.jinja", template)
    with user.wants("verl's parquet file with nested ground truth, and its score function") as goal:
        done = goal.types(
            f"proximo train --model {MODEL} --data verl.parquet {FUNCTION} verl_score.py:compute_score {SMALL} "
            "--run runs/verl"
        )
        goal.sees(done.err, r"verl's shape: [^;\n]*")
        goal.sees(done.err, r"called as [^\n]*verl[^\n]*")
        goal.sees(done.text, r"the model\s+(runs/\S+)")
    data = ({"question": f"{a}+{b}=", "answer": str(a + b), "info": {"n": a}, "task": "sums"} for a, b in sums())
    rows("verifiers.jsonl", data, user)
    with user.wants("verifiers' data and rubric function") as goal:
        done = goal.types(
            f"proximo train --model {MODEL} --data verifiers.jsonl {FUNCTION} verifiers_rubric.py:exact {SMALL} "
            "--run runs/verifiers"
        )
        goal.sees(done.err, r"verifiers' shape|(?:verifiers[^;\n]*shape)")
        goal.sees(done.text, r"the model\s+(runs/\S+)")
    talk = ({"messages": [{"role": "user", "content": f"{a}+{b}="}], "ground_truth": str(a + b), "dataset": "sums"}
            for a, b in sums())  # fmt: skip
    rows("open_instruct.jsonl", talk, user)
    with user.wants("open-instruct's messages and ground truth") as goal:
        done = goal.types(f"proximo train --model {MODEL} --data open_instruct.jsonl {SMALL} --dry-run")
        goal.sees(done.text, r"open-instruct's shape: [^;\n]*")
    cache = "home/.cache/huggingface/hub/datasets--me--sums"
    rows(f"{cache}/snapshots/{'a' * 40}/train.jsonl", [json.loads(line) for line in _lines(user, "trl.jsonl")], user)
    user.has(f"{cache}/refs/main", "a" * 40)
    with user.wants("a data set of the hub, by its id, here from the hub's cache") as goal:
        done = goal.types(f"proximo train --model {MODEL} --data me/sums {SMALL} --dry-run")
        goal.sees(done.text, r"me/sums\S*: \d+ rows")
    with user.wants("one that is not there is refused in a line") as goal:
        done = goal.types(f"proximo train --model {MODEL} --data openai/gsm8k {SMALL}", 2)
        goal.sees(done.err, r"^train [^\n]*; loading torch\nerror: [^\n]*openai/gsm8k[^\n]*\n$")


def several_sources(user: User) -> None:
    """12."""
    model(user)
    gsm8k(user, "math.jsonl")
    rows("more.jsonl", ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(60, 80) for b in (3, 5)), user)
    with user.wants("pass rates of a model on a file") as goal:
        limit = "--sampling.max-tokens 8"
        done = goal.types(f"proximo rate more.jsonl --model {MODEL} --samples 8 --out rated.parquet {limit}")
        goal.sees(done.text, r"rated\.parquet")
    with user.wants("a filter on pass rates") as goal:
        keep = "--task.keep-pass-rate 0.1 0.9"
        done = goal.types(f"proximo train --model {MODEL} --data rated.parquet {keep} {SMALL} --run runs/kept")
        goal.sees(done.err, r"[^\n]*pass_rate[^\n]*|[^\n]*pass rate[^\n]*")
    with user.wants("two sources by weight") as goal:
        done = goal.types(f"proximo train --model {MODEL} --data math.jsonl=0.7 more.jsonl=0.3 {SMALL} --run runs/mix")
        goal.sees(done.text, r"the model\s+(runs/\S+)")
        goal.sees((user.folder / "runs/mix/metrics.jsonl").read_text(), r"sources/math/outcome")
    with user.wants("a curriculum that follows measured pass rates") as goal:
        curriculum = "--training.curriculum.type Curriculum"
        done = goal.types(f"proximo train --model {MODEL} --data more.jsonl {curriculum} {SMALL} --run runs/learn")
        goal.sees(done.text, r"the model\s+(runs/\S+)")
    with user.wants("data that changed before a resume is refused in a line") as goal:
        path = user.folder / "more.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
        longer = SMALL.replace("--steps 1", "--steps 2") + " --allow-change steps"
        curriculum = "--training.curriculum.type Curriculum"
        done = goal.types(f"proximo train --model {MODEL} --data more.jsonl {curriculum} {longer} --run runs/learn", 2)
        goal.sees(done.err, r"error: [^\n]*more\.jsonl[^\n]*")


def _lines(user: User, name: str) -> list[str]:
    return (user.folder / name).read_text().splitlines()
