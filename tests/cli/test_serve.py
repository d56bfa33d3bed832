"""`proximo serve`: what a model is called, and the first lines."""

import json
import shlex

import pytest

from proximo.cli.commands.serve import ServeOptions, first_lines, served_name
from proximo.models import tiny_tokenizer
from proximo.serving.requests import Asking


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("runs/X", "X"),
        ("runs/X/", "X"),
        ("../d1/runs/X", "X"),
        (".", "d1"),
        ("runs/X/checkpoints/step-100", "X-step-100"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("tiny-arithmetic", "tiny-arithmetic"),
    ],
)
def test_a_model_is_called_after_its_folder(tmp_path, monkeypatch, model, name):
    home = tmp_path / "d1"
    (home / "runs" / "X" / "checkpoints" / "step-100").mkdir(parents=True)
    monkeypatch.chdir(home)
    assert served_name(model) == name


def test_a_name_is_not_empty():
    with pytest.raises(ValueError, match="name is ' ': give a name for clients"):
        ServeOptions(name=" ")


@pytest.mark.parametrize("token", [None, "secret"])
@pytest.mark.parametrize("has_template", [True, False])
def test_the_first_lines_say_how_to_ask(token, has_template):
    tokenizer = tiny_tokenizer()
    if not has_template:
        tokenizer.chat_template = None
    asking = Asking(tokenizer, context=4096, model="it's", max_tokens=6)
    page, endpoint, example, _ = first_lines("http://127.0.0.1:80", token, asking)
    assert page.startswith("chat page  http://127.0.0.1:80/")
    assert '"it\'s"' in endpoint
    command = shlex.split(example.removeprefix("try it"))
    assert command[:2] == ["curl", f"http://127.0.0.1:80/v1/{'chat/' * has_template}completions"]
    assert ("Authorization: Bearer secret" in command) == (token is not None)
    body = json.loads(command[-1])
    assert body["model"] == "it's"
    query = (asking.chat if has_template else asking.text)(command[-1].encode())
    assert query.requests[0].max_tokens == 6
