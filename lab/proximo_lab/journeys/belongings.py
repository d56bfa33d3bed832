"""Belongings of a user before a journey begins: a model, data and reward functions."""

import json
from collections.abc import Iterable
from typing import Any

from proximo_lab.journeys.user import User

MODEL = "my-model"
SMALL = "--steps 1 --training.groups 4 --training.group-size 4 --training.minibatches 1 --evaluation.problems 8"
"""Flags of a small run, for a machine that is busy."""
PROGRAM = """
import shutil, pathlib, proximo
shutil.copytree(pathlib.Path(proximo.__file__).parent / "models/weights/tiny-arithmetic", "my-model")
pathlib.Path("my-model/chat_template.jinja").unlink()  # a base model
"""
ARCHITECTURES = """
import json, pathlib, sys, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained("my-model")
sizes = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
             eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None)
for name in sys.argv[1:]:
    config = getattr(transformers, name + "Config")
    config = getattr(transformers, name + "TextConfig", config)(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(name)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(name)
"""


def rows(path: str, given: Iterable[dict[str, Any]], user: User) -> None:
    user.has(path, "".join(json.dumps(row) + "\n" for row in given))


def model(user: User) -> None:
    user.run(f"python -c '{PROGRAM}'")


def architectures(user: User, *names: str) -> None:
    """Models of other families with random weights, whose tokenizers have no pad token."""
    user.has("make.py", ARCHITECTURES)
    user.run(f"python make.py {' '.join(names)}")


def sums() -> list[tuple[int, int]]:
    return [(a, b) for a in range(10, 50) for b in range(10, 40, 6)]


def gsm8k(user: User, path: str = "gsm8k.jsonl") -> None:
    rows(path, ({"question": f"{a}+{b}=", "answer": f"They make {a + b}.\n#### {a + b}"} for a, b in sums()), user)
