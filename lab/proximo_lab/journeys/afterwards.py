"""Journeys 5 and 6: trackers, and what is done with a model after training."""

import json
import socket
import subprocess
import time
import urllib.request
from urllib.error import HTTPError

from proximo_lab.journeys.belongings import MODEL, SMALL, gsm8k, model
from proximo_lab.journeys.user import User

TRACKERS = ("wandb", "trackio", "tensorboard", "mlflow")
READ_BACK = """
import glob, json, pathlib, sqlite3, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
run = sys.argv[1]
rows = [json.loads(line) for line in open(f"{run}/metrics.jsonl")]
wanted = {(name, row["step"]) for row in rows for name, value in row.items() if name != "step" and value is not None}
events = EventAccumulator(f"{run}/tracking/tensorboard", size_guidance={"scalars": 0})
events.Reload()
found = {"tensorboard": {(tag, each.step) for tag in events.Tags()["scalars"] for each in events.Scalars(tag)}}
with sqlite3.connect("runs/mlflow.db") as base:
    found["mlflow"] = set(base.execute("select key, step from metrics"))
(path,) = pathlib.Path("home").rglob("proximo.db")
with sqlite3.connect(path) as base:
    logs = [(json.loads(text), step) for text, step in base.execute("select metrics, step from metrics")]
found["trackio"] = {(name, step) for values, step in logs for name in values}
for tracker, got in found.items():
    print(tracker, "has", len(wanted & got), "of", len(wanted), "metrics")
sizes = [len(open(each, "rb").read()) for each in glob.glob(f"{run}/**/*.wandb", recursive=True)]
print("wandb has", sum(sizes), "bytes")
"""
LOAD = """
import transformers
tokenizer = transformers.AutoTokenizer.from_pretrained("out")
model = transformers.AutoModelForCausalLM.from_pretrained("out")
ids = tokenizer("12+13=", return_tensors="pt")["input_ids"]
print("says", tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1]:]))
"""


def trackers(user: User) -> None:
    """5."""
    user.has("read_back.py", READ_BACK)
    with user.wants("wandb, trackio, tensorboard and mlflow while a run runs, by one flag") as goal:
        done = goal.types(f"proximo train {SMALL} --run runs/a --track {' '.join(TRACKERS)}")
        goal.sees(done.text, r"the model\s+(runs/\S+)")
        _settled(user, "runs/a")
    with user.wants("a run that is there already, and everything in the trackers") as goal:
        goal.types(f"proximo track runs/a --to {' '.join(TRACKERS)}")
        read = user.run("python read_back.py runs/a").out
        for name in ("tensorboard", "mlflow", "trackio"):
            of = goal.sees(read, rf"{name} has \d+ of \d+ metrics").split()
            assert of[2] == of[4], " ".join(of)
        goal.sees(read, r"wandb has [1-9]\d+ bytes")


def _settled(user: User, run: str) -> None:
    """Trackers have a minute after a run."""
    end = time.monotonic() + 70
    while time.monotonic() < end:
        sent = [user.folder / run / "tracking" / name / "sent.json" for name in TRACKERS]
        if all(each.is_file() and json.loads(each.read_text()).get("is_closed") for each in sent):
            return
        time.sleep(2)


def use(user: User) -> None:
    """6."""
    model(user)
    gsm8k(user)
    user.run(f"proximo train --model {MODEL} --data gsm8k.jsonl {SMALL} --run runs/a")
    with user.wants("the run's own task, evaluated") as goal:
        done = goal.types("proximo eval runs/a --problems 8")
        goal.sees(done.err, r"settings from runs/a/config.toml: File gsm8k.jsonl")
        goal.sees(done.text, r"\d+\.\d% \([^)]*\)")
    with user.wants("base model and run side by side, with pass@k") as goal:
        done = goal.types(f"proximo eval {MODEL} runs/a --problems 8 --samples 4 --data gsm8k.jsonl")
        goal.sees(done.text, r"pass@4")
        goal.sees(done.text, r"difference from the first")
    with user.wants("a folder for transformers, with a model card") as goal:
        goal.types("proximo export runs/a --out out")
        user.has("load.py", LOAD)
        goal.sees(user.run("python load.py").out, r"says \S+")
        goal.sees((user.folder / "out/README.md").read_text(), r"Held-out results")
        assert not list((user.folder / "out").glob("*.pt")), "the folder has state"
    with user.wants("GGUF in 8 bits for llama.cpp") as goal:
        goal.types("proximo export runs/a --to gguf:q8_0")
        goal.sees(str(list((user.folder / "runs").glob("*.gguf"))), r"a\.q8_0\.gguf")
    with user.wants("a LoRA run, merged and exported") as goal:
        lora = "--adapter.type Lora --run runs/lora"
        user.run(f"proximo train --model {MODEL} --data gsm8k.jsonl {SMALL} {lora}")
        done = goal.types("proximo export runs/lora --to gguf:q8_0 --out lora.gguf")
        goal.sees(done.text, r"lora\.gguf")
    with user.wants("an OpenAI-compatible endpoint") as goal:
        goal.sees(_served(user, goal), r'"content": ?"[^"]*"|"text": ?"[^"]*"')
    with user.wants("a chat in a pipe") as goal:
        done = goal.types("echo 12+13= | proximo chat runs/a --temperature 0")
        goal.sees(done.out, r"\d+")
    with user.wants("a push to the hub, which says in a line what it needs") as goal:
        done = goal.types("proximo export runs/a --to hub --out me/sums", 2)
        goal.sees(done.err, r"^error: [^\n]*\n$")


def _served(user: User, goal) -> str:
    """Answers of the endpoint. The command runs until it is stopped, so that it is not waited for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    goal.goal.typed += 1
    command = ["proximo", "serve", "runs/a", "--port", str(port)]
    path = f"{user.environment['PATH'].split(':')[0]}/{command[0]}"
    log = open(user.folder / "serve.txt", "w")  # noqa: SIM115 the process writes to it
    process = subprocess.Popen([path, *command[1:]], cwd=user.folder, env=user.environment, stdout=log, stderr=log)
    body = json.dumps({"model": "a", "prompt": "12+13=", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        for _ in range(300):
            try:
                return urllib.request.urlopen(request, timeout=120).read().decode()
            except HTTPError as refused:
                raise AssertionError(refused.read().decode()) from refused
            except OSError:
                assert process.poll() is None, (user.folder / "serve.txt").read_text()
                time.sleep(1)
        raise AssertionError("no answer")
    finally:
        process.terminate()
        process.wait(60)
        log.close()
