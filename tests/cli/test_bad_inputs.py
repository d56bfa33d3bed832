"""Malformed configs, data files, model folders and commands: each gets one clear message before anything trains.

Every case names what the message must say; all run through the command line, as a user would meet them.
"""

import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from proximo.cli import main
from proximo.models import loading, tiny_model, tiny_tokenizer

FILE_TASK = ["--model", "tiny-arithmetic", "--task.type", "File", "--task.path"]
GOOD_ROWS = "".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(40))
GOOD_PAIRS = "".join(f'{{"prompt": "{i}+1=", "completion": "{i + 1}"}}\n' for i in range(40))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(hidden=16, layers=1, heads=1, kv_heads=1, intermediate=16).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def no_model(monkeypatch) -> None:
    """Whoever loads weights now has looked at the input too late."""

    def too_late(*_, **__):
        raise AssertionError("a model was loaded before the input was refused")

    monkeypatch.setattr(loading, "load_weights", too_late)


def refusal(arguments: list[str], capsys) -> str:
    """The one message on stderr; exit 2, nothing on stdout, no traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert len(printed.err) < 12_000
    return printed.err


# Configs


CONFIGS = {
    "unknown key": ("steps = 3\nwibble = 1\n", [":2: wibble = 1 is unknown", "RunConfig knows"]),
    "typo": ("[training]\nlearning_rat = 0.1\n", [":2: training.learning_rat", "perhaps learning_rate"]),
    "wrong type": ('steps = "many"\n', [':1: steps is "many": give an integer']),
    "a float for a count": ("steps = 2.5\n", [":1: steps is 2.5: give an integer"]),
    "true for a number": ("seed = true\n", [":1: seed is true: give an integer"]),
    "negative": ("steps = -4\n", ["steps is -4", "at least 1"]),
    "zero groups": ("[training]\ngroups = 0\n", ["training.groups is 0: it must be at least 1"]),
    "not a number": ("[training]\nlearning_rate = nan\n", [":2: training.learning_rate is nan: give a finite number"]),
    "infinite": ("[training]\nlearning_rate = inf\n", [":2: training.learning_rate is inf: give a finite number"]),
    "minus infinite": ("[sampling]\ntemperature = -inf\n", ["temperature", "-inf"]),
    "duplicate key": ("steps = 3\nsteps = 4\n", ["this is not TOML", "line 2"]),
    "duplicate table": ("[training]\n[training]\n", ["this is not TOML", "line 2"]),
    "incompatible pair": ("[training]\ngroups = 2\nminibatches = 3\n", ["minibatches is 3, training.groups 2"]),
    "a gate without its ratio": ('[algorithm.ratio]\ntype = "NoRatio"\n', ["gate Clip"]),
    "a value model that is not needed": ("[value]\npretrain_steps = 1\n", ["uses no value model"]),
    "a field of TRL": ("num_generations = 8\n", [":1: num_generations = 8 is unknown"]),
    "a table of verl": ("[actor_rollout_ref.actor]\nclip_ratio = 0.2\n", ["actor_rollout_ref", "is unknown"]),
    "a class to import": ('[task]\n_target_ = "os.system"\n', ["task.type is missing: give one of Arithmetic"]),
    "unknown piece": ('[algorithm.gate]\ntype = "Klip"\n', [':2: algorithm.gate.type is "Klip"', "perhaps Clip"]),
    "a piece of another field": ('[algorithm.gate]\ntype = "TokenMean"\n', [":2:", "give one of"]),
    "scalar for a table": ("training = 3\n", [":1: training is 3: give a table"]),
    "table for a scalar": ("[steps]\nx = 1\n", [":1: steps is", "give an integer"]),
    "a date": ("steps = 2026-01-01\n", [":1: steps is 2026-01-01: give an integer"]),
    "not TOML": ("steps: 3\n", ["this is not TOML", "line 1"]),
    "JSON": ('{"steps": 3}\n', ["this is not TOML", "line 1"]),
    "half a file": ('[training]\nlearning_rate = "', ["this is not TOML"]),
    "NUL": ("steps\0 = 3\n", ["this is not TOML"]),
    "deep nonsense": ("x = " + "[" * 5000, ["this is not TOML"]),
    "deep tables": ("x" + ".x" * 400 + " = 1", ["nested too deeply"]),
    "huge integer": (f"seed = {'9' * 40}\n", ["seed is 9999"]),
    "a password": ('model = "https://me:hunter2@host/model"\n[task]\ntype = "Echo"\n', ["model is", "with a secret"]),
    "device": ('device = "warp"\nmodel = "tiny-copy"\n[task]\ntype = "Echo"\n', ["device is 'warp'"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_bad_configs(case, tmp_path, capsys, no_model):
    text, said = CONFIGS[case]
    file = tmp_path / "run.toml"
    file.write_text(text)
    error = refusal(["train", str(file), "--run", str(tmp_path / "run")], capsys)
    assert error.startswith("error: ")
    assert all(part in error for part in said), error
    assert "hunter2" not in error
    assert not (tmp_path / "run").exists()


CONFIG_FILES = {
    "missing": (lambda file: None, "there is no such file"),
    "a folder": (lambda file: file.mkdir(), "there is no such file, but a folder"),
    "five megabytes": (lambda file: file.write_text("# x\n" * 1_250_000), "which is no config"),
    "not UTF-8": (lambda file: file.write_bytes(b"steps = 3\n# caf\xe9\n"), ":2: not UTF-8"),
    "UTF-16": (lambda file: file.write_bytes("steps = 3".encode("utf-16")), ":1: not UTF-8"),
}


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize("case", CONFIG_FILES)
def test_bad_config_files(case, command, tmp_path, capsys, no_model):
    make, said = CONFIG_FILES[case]
    file = tmp_path / "run.toml"
    make(file)
    error = refusal([command, str(file)], capsys)
    assert error.startswith(f"error: {file}")
    assert said in error


def test_every_problem_of_a_config_is_told_at_once(tmp_path, capsys, no_model):
    file = tmp_path / "run.toml"
    file.write_text('step = 3\nseed = "one"\n[training]\ngroups = -1\n[task]\ntype = "Arithmetik"\n')
    assert len(refusal(["train", str(file)], capsys).splitlines()) == 4


def test_an_empty_config_is_all_defaults(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf\r\n")
    assert main(["train", str(file), "--dry-run"]) == 0
    assert "steps = 40" in capsys.readouterr().out


# Data


def _parquet(**columns) -> Callable[[Path], None]:
    return lambda file: pq.write_table(pa.table(columns), file)


def _truncated(file: Path) -> None:
    pq.write_table(pa.table({"prompt": ["1+1="] * 50, "answer": ["2"] * 50}), file)
    file.write_bytes(file.read_bytes()[:-40])


def _flipped(file: Path) -> None:
    pq.write_table(pa.table({"prompt": [f"{i}+1=" for i in range(500)], "answer": ["2"] * 500}), file)
    data = bytearray(file.read_bytes())
    data[10:60] = bytes(50)
    file.write_bytes(data)


DATA: dict[str, tuple[str, str | bytes | Callable[[Path], object], list[str]]] = {
    "missing": ("x.jsonl", lambda file: None, ["task.path is", "there is no such file"]),
    "an empty folder": ("x.jsonl", Path.mkdir, ["task.path is", "it holds no .jsonl"]),
    "empty": ("x.jsonl", "", ["no row is left for train"]),
    "blank lines": ("x.jsonl", "\n\n \n", ["no row is left for train"]),
    "one row": ("x.jsonl", '{"prompt": "1+1=", "answer": "2"}\n', ["no row is left for", "give a larger share"]),
    "too long for the model": (
        "x.jsonl",
        GOOD_ROWS + json.dumps({"prompt": "1" * 5000, "answer": "2"}),
        [":41: the prompt has 5000 tokens"],
    ),
    "a line of 200 kilobytes": (
        "x.jsonl",
        GOOD_ROWS + json.dumps({"prompt": "1" * 200_000, "answer": "2"}),
        [":41: the prompt has"],
    ),
    "empty prompt": ("x.jsonl", GOOD_ROWS + '{"prompt": "", "answer": "2"}', [':41: the prompt is "": give a text']),
    "NUL in a prompt": ("x.jsonl", GOOD_ROWS + r'{"prompt": "1\u0000", "answer": "2"}', [":41: the prompt", "NUL"]),
    "NUL in the file": ("x.jsonl", GOOD_ROWS.encode() + b'{"prompt": "1\x00", "answer": "2"}', [":41: not JSON"]),
    "half a surrogate pair": (
        "x.jsonl",
        GOOD_ROWS + r'{"prompt": "\ud800", "answer": "2"}',
        [":41: not JSON, a text has half of a surrogate pair"],
    ),
    "not UTF-8": ("x.jsonl", GOOD_ROWS.encode() + b'{"prompt": "caf\xe9", "answer": "2"}', [":41: not UTF-8"]),
    "UTF-16": ("x.jsonl", GOOD_ROWS.encode("utf-16"), ["it is UTF-16: save it as UTF-8"]),
    "not JSON": ("x.jsonl", GOOD_ROWS + '{"prompt": 1+1=}', [":41: not JSON"]),
    "half a line": ("x.jsonl", GOOD_ROWS + '{"prompt": "1+', [":41: not JSON"]),
    "one JSON array": (
        "x.jsonl",
        json.dumps([json.loads(line) for line in GOOD_ROWS.splitlines()]),
        [":1:", "not an object", "one object to a line"],
    ),
    "a printed JSON array": ("x.jsonl", json.dumps([{"prompt": "1", "answer": "2"}], indent=1), [":1: not JSON"]),
    "CSV": ("x.jsonl", "prompt,answer\n1+1=,2\n", [":1: not JSON", ":2: not JSON"]),
    "text by name": ("x.txt", "prompt,answer\n1+1=,2\n", [".txt is not a known format, use .jsonl"]),
    "CSV with a short row": (
        "x.csv",
        "prompt,answer\n" + "1+1=,2\n" * 40 + "1+2=\n",
        ["line 42: 1 values for 2 columns"],
    ),
    "numbers for rows": ("x.jsonl", "1\n2\n", [":1: 1 is not an object with columns", ":2:"]),
    "NaN for a row": ("x.jsonl", "NaN\n", [":1:"]),
    "no prompt": (
        "x.jsonl",
        '{"question": "1+1=", "answer": "2"}\n',
        ["in the column 'prompt', only in question, answer: choose with --task.prompt-column NAME"],
    ),
    "no answers": (
        "x.jsonl",
        '{"prompt": "1+1="}\n',
        ["in any of the columns answer, solution", "only in prompt: choose with --task.answer-columns NAME"],
    ),
    "a number for a prompt": (
        "x.jsonl",
        GOOD_ROWS + '{"prompt": 3, "answer": "2"}',
        [":41: the prompt is 3: give a text"],
    ),
    "messages without a role": (
        "x.jsonl",
        GOOD_ROWS + '{"prompt": [{"content": "1"}], "answer": "2"}',
        [":41: prompt[0] has null as its role", "give a text"],
    ),
    "no messages": ("x.jsonl", GOOD_ROWS + '{"prompt": [], "answer": "2"}', [":41: prompt is []", "role and content"]),
    "deep nonsense": ("x.jsonl", GOOD_ROWS + "[" * 100_000, [":41: not JSON"]),
    "escapes in a value": (
        "x.jsonl",
        GOOD_ROWS + '{"prompt": ["\x9b31m\u202e"], "answer": "2"}',
        [":41: prompt[0] is", r"\x9b31m\u202e"],
    ),
    "truncated Parquet": ("x.parquet", _truncated, ["not Parquet"]),
    "text named Parquet": ("x.parquet", GOOD_ROWS, ["not Parquet"]),
    "empty Parquet file": ("x.parquet", "", ["not Parquet"]),
    "flipped bytes in Parquet": ("x.parquet", _flipped, ["it cannot be read"]),
    "Parquet without rows": (
        "x.parquet",
        _parquet(prompt=pa.array([], pa.string()), answer=pa.array([], pa.string())),
        ["no row is left"],
    ),
    "Parquet of another kind": (
        "x.parquet",
        _parquet(question=["1"] * 3),
        ["no row has a value in the column 'prompt', only in question"],
    ),
    "Parquet of numbers": (
        "x.parquet",
        _parquet(prompt=[1, 2], answer=[1, 2]),
        [", row 1: the prompt is 1: give a text"],
    ),
    "Parquet of bytes": ("x.parquet", _parquet(prompt=[b"\xff"] * 2, answer=["1"] * 2), [", row 1: the prompt is"]),
    "Parquet with nothing": (
        "x.parquet",
        _parquet(prompt=pa.array([None], pa.string()), answer=["1"]),
        ["no row has a value in the column 'prompt', only in answer"],
    ),
}


def _write(file: Path, content: str | bytes | Callable[[Path], object]) -> None:
    if isinstance(content, str):
        file.write_text(content, encoding="utf-8", newline="")
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        content(file)


@pytest.mark.slow("tries many bad files")
@pytest.mark.parametrize("case", DATA)
def test_bad_data(case, model, tmp_path, capsys, no_model):
    name, content, said = DATA[case]
    _write(tmp_path / name, content)
    arguments = ["train", "--model", str(model), "--run", str(tmp_path / "run"), *FILE_TASK, str(tmp_path / name)]
    error = refusal(arguments, capsys)
    assert all(part in error for part in said), error
    assert not (tmp_path / "run").exists()


EXAMPLES = {
    "no completion": ('{"prompt": "1"}\n', [":1: no column 'completion'"]),
    "empty completion": ('{"prompt": "1", "completion": " "}\n', [":1: completion is empty"]),
    "a number": ('{"prompt": "1", "completion": 2}\n', [":1: completion is 2: give a text"]),
    "messages without an answer": (
        '{"messages": [{"role": "user", "content": "1"}]}\n',
        ["no turn of the conversation is"],
    ),
    "messages of one string": ('{"messages": "1"}\n', ["messages is a text"]),
    "messages without content": (
        '{"messages": [{"role": "user"}]}\n',
        ["messages[0] has null", "content: give a text"],
    ),
    "NUL in a completion": (r'{"prompt": "1", "completion": "2\u0000"}', [":1: completion", "NUL"]),
}


@pytest.mark.parametrize("case", EXAMPLES)
def test_bad_examples(case, model, tmp_path, capsys, no_model):
    text, said = EXAMPLES[case]
    (tmp_path / "x.jsonl").write_text(GOOD_PAIRS.replace("}\n", ', "note": 1}\n') + text)
    error = refusal(["sft", str(tmp_path / "x.jsonl"), "--model", str(model), "--run", str(tmp_path / "run")], capsys)
    assert all(part.replace(":1:", ":41:") in error for part in said), error


def test_what_is_odd_and_allowed(model, tmp_path, capsys):
    """A byte order mark, Windows' and mixed line ends, blank lines, columns of some rows, and prompts that repeat.

    A prompt that occurs twice is two problems (their answers may differ), both on one side of the split.
    """
    from proximo.tasks import File

    rows = GOOD_ROWS.splitlines()
    text = "\ufeff" + "\r\n".join(rows[:20]) + "\r\n\n" + "\n".join(rows[20:] + rows[:1])
    text += '\n{"prompt": "x", "answer": "y", "z": 1}'
    (tmp_path / "x.jsonl").write_bytes(text.encode())
    task = File(str(tmp_path / "x.jsonl"), held_out=0.3)
    assert task.size("train") + task.size("held_out") == 42
    sides = [{task.problem(i, split, 0).prompt for i in range(task.size(split))} for split in ("train", "held_out")]
    assert sides[0].isdisjoint(sides[1])


# Model folders


def _edit(name: str, **entries) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        file = folder / name
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**known, **entries}))

    return edit


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return edit


def _header(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return edit


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(change((folder / "model.safetensors").read_bytes()))

    return edit


def _shards(name: str) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "other.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))

    return edit


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _longer_tokenizer(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<word{i}>" for i in range(200)])
    tokenizer.save_pretrained(folder)


def _overlap(header: dict) -> None:
    first, second = [name for name in header if name != "__metadata__"][:2]
    size = header[second]["data_offsets"][1] - header[second]["data_offsets"][0]
    start = header[first]["data_offsets"][0]
    header[second]["data_offsets"] = [start, start + size]


EMBEDDING = "model.embed_tokens.weight"
CODE = "never run here"
MODELS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["there is no config.json"]),
    "a config that is not JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        ["config.json is not JSON, line 1"],
    ),
    "a config that is a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        ["config.json is not a JSON object"],
    ),
    "an empty config": (lambda folder: (folder / "config.json").write_text("{}"), ["config.json", "model_type"]),
    "a deep config": (lambda folder: (folder / "config.json").write_text("[" * 100_000), ["config.json is not JSON"]),
    "a huge config": (
        lambda folder: (folder / "config.json").write_text(" " * 11_000_000),
        ["config.json has 11,000,000 bytes"],
    ),
    "an unknown architecture": (_edit("config.json", model_type="wibble"), ["config.json", "wibble"]),
    "another architecture": (
        _edit("config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"]),
        ["of another model"],
    ),
    "an image model": (_edit("config.json", model_type="vit", architectures=["ViTModel"]), ["cannot", "ViTConfig"]),
    "a config that contradicts itself": (_edit("config.json", num_attention_heads=5), ["path"]),
    "another width": (_edit("config.json", hidden_size=32), ["has shape", "by config.json"]),
    "another vocabulary": (_edit("config.json", vocab_size=500), [EMBEDDING, "[500, 16]"]),
    "more layers": (
        _edit("config.json", num_hidden_layers=2, layer_types=["full_attention"] * 2),
        ["the weights lack model.layers.1."],
    ),
    "auto_map": (
        _edit("config.json", auto_map={"AutoModelForCausalLM": "evil.Evil"}),
        ["config.json has auto_map", CODE],
    ),
    "auto_map of a part": (
        _edit("config.json", text_config={"auto_map": {"AutoConfig": "evil.Evil"}}),
        ["auto_map", CODE],
    ),
    "auto_map of the tokenizer": (
        _edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]}),
        ["tokenizer_config.json has auto_map", CODE],
    ),
    "auto_map of a processor": (
        _edit("preprocessor_config.json", auto_map={"AutoProcessor": "evil.Evil"}),
        ["preprocessor_config.json has auto_map", CODE],
    ),
    "a pipeline of its own": (
        _edit("config.json", custom_pipelines={"text": {"impl": "evil.Evil"}}),
        ["custom_pipelines", CODE],
    ),
    "generation of its own": (
        _edit("generation_config.json", custom_generate="evil/repo"),
        ["generation_config.json has custom_generate", CODE],
    ),
    "attention from elsewhere": (
        _edit("config.json", attn_implementation="evil/kernels"),
        ["attn_implementation 'evil/kernels'", CODE],
    ),
    "quantised": (
        _edit("config.json", quantization_config={"quant_method": "gptq"}),
        ["quantization_config", "use the full ones"],
    ),
    "an adapter": (
        _edit("adapter_config.json", base_model_name_or_path="/elsewhere"),
        ["adapter_config.json: an adapter"],
    ),
    "weights elsewhere": (
        _edit("config.json", transformers_weights="adapter_model.bin"),
        ["only safetensors of this folder"],
    ),
    "pickle alone": (_pickled, ["pytorch_model.bin: convert to safetensors"]),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        ["no weights: model.safetensors is missing"],
    ),
    "weights of another name": (
        lambda folder: (folder / "model.safetensors").rename(folder / "x.safetensors"),
        ["model.safetensors is missing"],
    ),
    "zero length": (_bytes(lambda data: b""), ["model.safetensors is damaged: it has 0 bytes"]),
    "seven bytes": (_bytes(lambda data: data[:7]), ["it has 7 bytes, less than a header"]),
    "truncated": (_bytes(lambda data: data[:-100]), ["model.safetensors is damaged", "beyond its end, 100 bytes"]),
    "truncated in its header": (_bytes(lambda data: data[:100]), ["its header claims", "but only 92 follow"]),
    "bytes at the end": (_bytes(lambda data: data + b"x" * 9), ["9 bytes behind its last tensor belong to none"]),
    "a flipped header": (
        _bytes(lambda data: data[:9] + bytes([data[9] ^ 0x80]) + data[10:]),
        ["its header is not JSON"],
    ),
    "a header of exabytes": (_bytes(lambda data: b"\xff" * 7 + b"\x7f" + data[8:]), ["more than any has"]),
    "a deep header": (_bytes(lambda data: struct.pack("<Q", 200_000) + b"[" * 200_000), ["its header is not JSON"]),
    "overlapping tensors": (_header(_overlap), ["overlaps"]),
    "a tensor beyond the end": (
        _header(lambda header: header["model.norm.weight"].update(data_offsets=[0, 1 << 60])),
        ["'model.norm.weight' of shape"],
    ),
    "a negative place": (
        _header(lambda header: header["model.norm.weight"].update(data_offsets=[-4, 4])),
        ["no shape or no place"],
    ),
    "a shape of text": (
        _header(lambda header: header["model.norm.weight"].update(shape="all")),
        ["no shape or no place"],
    ),
    "an unknown dtype": (_header(lambda header: header["model.norm.weight"].update(dtype="F31")), ["dtype 'F31'"]),
    "text for weights": (
        _bytes(lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        ["a Git LFS pointer"],
    ),
    "NaN": (
        _tensors(lambda tensors: tensors[EMBEDDING].view(-1)[7].fill_(torch.nan)),
        ["NaN or infinity in", EMBEDDING],
    ),
    "infinite": (
        _tensors(lambda tensors: tensors["model.norm.weight"][0].fill_(torch.inf)),
        ["NaN or infinity in model.norm.weight"],
    ),
    "a tensor too few": (
        _tensors(lambda tensors: tensors.pop("model.norm.weight")),
        ["the weights lack model.norm.weight"],
    ),
    "a tensor too many": (_tensors(lambda tensors: tensors.update(extra=torch.zeros(2))), ["the weights hold extra"]),
    "no tokenizer": (
        lambda folder: [(folder / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        ["there is no tokenizer"],
    ),
    "a broken tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0"}'),
        ["no tokenizer can be read there"],
    ),
    "a tokenizer of more words": (_longer_tokenizer, ["the tokenizer has", "they are not of one model"]),
    "shards that are pickled": (_shards("pytorch_model-1.bin"), ["names 'pytorch_model-1.bin': only safetensors"]),
    "shards elsewhere": (_shards("../model.safetensors"), ["names '../model.safetensors': only safetensors"]),
    "missing shards": (_shards("model-1-of-2.safetensors"), ["model-1-of-2.safetensors is missing"]),
    "a broken index": (
        lambda folder: [_shards("x")(folder), (folder / "model.safetensors.index.json").write_text("{}")],
        ["has no weight_map"],
    ),
}


@pytest.mark.slow("tries many bad files")
@pytest.mark.parametrize("case", MODELS)
def test_bad_models(case, model, tmp_path, capsys):
    change, said = MODELS[case]
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    change(folder)
    arguments = ["train", "--task.type", "Arithmetic", "--model", str(folder), "--run", str(tmp_path / "run")]
    error = refusal(arguments, capsys)
    assert str(folder) in error
    assert all(part in error for part in said), error
    assert not (tmp_path / "run").exists()


def _zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "model.zip", "w") as archive:
        archive.writestr("../../config.json", "{}")
    return folder / "model.zip"


def _one_file(folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes(b"")
    return folder / "model.safetensors"


NO_MODELS = {
    "nothing": (lambda folder: folder / "none", "there is no folder"),
    "an empty folder": (lambda folder: folder, "save_pretrained"),
    "an archive": (_zip, "an archive, which is never unpacked here"),
    "a file": (_one_file, "a file, not a folder"),
    "an empty name": (lambda folder: "", "neither a folder nor a model"),
    "a hub id out of reach": (lambda folder: "nobody/nothing", "neither a folder nor a model"),
}


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize("case", NO_MODELS)
def test_what_is_no_model(case, command, tmp_path, capsys):
    make, said = NO_MODELS[case]
    path = str(make(tmp_path))
    arguments = {
        "train": ["train", "--task.type", "Arithmetic", "--model", path, "--run", str(tmp_path / "run")],
        "eval": ["eval", path, "--task.type", "Arithmetic"],
    }[command]
    assert said in refusal(arguments, capsys)


# Commands


COMMANDS = {
    "unknown command": (["trane"], ["no command is called 'trane'", "the nearest is 'train'"]),
    "unknown flag": (["train", "--stepz", "3"], ["--stepz"]),
    "a flag without its value": (["train", "--steps"], ["--steps"]),
    "unknown preset": (["train", "arithmetics"], ["no preset is called", "the nearest is 'arithmetic'"]),
    "unknown algorithm": (["train", "--algorithm", "grop"], ["--algorithm grop", "the nearest is 'grpo'"]),
    "an algorithm in the place of a preset": (["train", "dapo"], ["dapo is an algorithm, no preset: --algorithm dapo"]),
    "an algorithm without its name": (["train", "--algorithm"], ["--algorithm needs a value"]),
    "words for a number": (["train", "--steps", "three"], ["--steps", "three"]),
    "NaN for a number": (["train", "--training.learning-rate", "nan"], ["training.learning_rate", "nan"]),
    "infinity for a number": (["train", "--training.learning-rate", "inf"], ["training.learning_rate is inf"]),
    "negative": (["train", "--training.groups", "-3"], ["training.groups is -3"]),
    "unknown piece": (["train", "--algorithm.gate.type", "Klip"], ["Klip", "give one of"]),
    "a piece of no field": (["train", "--algorithm.gait.type", "Clip"], ["no field gait", "'gate'"]),
    "a password": (["train", "--task.type", "Arithmetic", "--model", "https://me:hunter2@host/m"], ["with a secret"]),
    "a control character": (["train", "--task.type", "Arithmetic", "--model", "\x1b[2Jx"], [r"\x1b[2Jx"]),
    "NUL": (["train", "--task.type", "Arithmetic", "--model", "a\0b"], ["NUL"]),
    "two configs": (["train", "arithmetic", "other.toml"], ["other.toml"]),
    "eval without a model": (["eval"], ["needs a model"]),
    "explain of nothing known": (["explain", "grop"], ["no algorithm is called 'grop'", "'grpo'"]),
    "tasks with more": (["tasks", "now"], ["tasks takes nothing"]),
    "pairs without a run": (["pairs"], ["pairs needs the folder of a run"]),
    "sft with a tracker": (["sft", "--track", "wandbb"], ["--track: ", "wandbb"]),
    "dpo without data": (["dpo"], ["dpo needs data"]),
    "an unknown table": (["bench", "speed"], ["speed"]),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_bad_commands(case, tmp_path, capsys, no_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, said = COMMANDS[case]
    error = refusal(arguments, capsys)
    assert all(part in error for part in said), error
    assert "hunter2" not in error
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def _occupied(folder: Path) -> Path:
    (folder / "run").write_text("not a folder")
    return folder / "run"


RUNS = {
    "a file": (_occupied, "run"),
    "below a file": (lambda folder: _occupied(folder) / "deeper", "run"),
    "where nothing can be written": (lambda folder: Path("/proc/proximo-run"), "/proc/proximo-run"),
    "a name too long": (lambda folder: folder / ("x" * 300), "xxx"),
}


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize("case", RUNS)
def test_bad_run_folders(case, command, model, tmp_path, capsys, no_model):
    make, said = RUNS[case]
    path = make(tmp_path)
    (tmp_path / "x.jsonl").write_text(GOOD_PAIRS)
    data = [str(tmp_path / "x.jsonl")] if command == "sft" else ["--task.type", "Arithmetic"]
    error = refusal([command, *data, "--model", str(model), "--run", str(path)], capsys)
    assert f"--run {path}" in error
    assert said in error


def test_there_are_enough_of_them():
    tables = (CONFIGS, CONFIG_FILES, DATA, EXAMPLES, MODELS, NO_MODELS, COMMANDS, RUNS)
    assert sum(map(len, tables)) >= 60
