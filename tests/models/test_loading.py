"""Nothing that is loaded can run code: one door for all models, and what is turned away at it."""

import json
import pickle
import re
import shutil
import struct
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from transformers.utils import chat_template_utils

from proximo.models import load_model, load_tokenizer, loading, prompt_tokens, tiny_model, tiny_tokenizer
from proximo.models.loading import read_config
from proximo.models.reward_models import load_reward_model
from proximo.models.safe_files import tensors
from proximo.models.shipped import FOLDER, DamagedCheckpoint, resolve
from proximo.models.tokens import template_bounds, templates
from proximo.models.tokens.templates import rendered
from proximo.system.folders import write_folder

SOURCE = Path(loading.__file__).resolve().parents[1]
LOADERS = (load_model, load_tokenizer, load_reward_model, read_config)
HELLO = ({"role": "user", "content": "Hello"},)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(hidden=16, layers=1, heads=1, kv_heads=1, intermediate=16).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def folder(model, tmp_path) -> Path:
    shutil.copytree(model, tmp_path / "model")
    return tmp_path / "model"


class Fuse:
    """Writes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return (Path.touch, (self.canary,))


# One door


DOORS = {
    r"\.from_pretrained\(": {"models/loading.py", "models/shipped/smollm.py"},
    r"\bAuto(Config|Tokenizer|Processor)\b": {"models/loading.py", "models/shipped/smollm.py"},
    r"snapshot_download|hf_hub_download|cached_file": {"data/locating.py", "models/loading.py"},
    r"\.apply_chat_template\(": {"models/tokens/templates.py"},
    r"trust_remote_code=(?!False)|weights_only=": set(),
    r"torch\.load|torch\.save|\bimport (pickle|dill|cloudpickle|joblib|shelve|marshal)\b|np\.load|allow_pickle": set(),
    r"zipfile|tarfile|unpack_archive": set(),
}
"""What opens foreign files, and the only files of ours that may say so."""


@pytest.mark.parametrize("pattern", DOORS)
def test_there_is_one_door(pattern):
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if re.search(pattern, path.read_text())}
    assert found <= DOORS[pattern]
    assert bool(found) == bool(DOORS[pattern])  # a pattern that no longer finds its own door looks for nothing


def test_the_door_never_trusts():
    text = (SOURCE / "models" / "loading.py").read_text()
    calls = text.count(".from_pretrained(")
    assert calls == 3
    assert text.count("trust_remote_code=False") == calls
    assert text.count("use_safetensors=True") == 1  # configs and tokenizers have no weights


# Pickles


def test_the_canary_works(tmp_path):
    pickle.loads(pickle.dumps(Fuse(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "optimizer.pkl", "training_args.bin"]
)
@pytest.mark.parametrize("alone", [True, False])
def test_pickles_are_never_opened(name, alone, folder):
    canary = folder / "canary"
    (folder / name).write_bytes(pickle.dumps(Fuse(canary)))
    if alone:
        (folder / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=f"{name}.*only safetensors"):
            load_model(str(folder))
    else:
        load_model(str(folder))
        load_tokenizer(str(folder))
    assert not canary.exists()


def test_a_pickle_that_calls_itself_safetensors_is_refused(folder):
    canary = folder / "canary"
    (folder / "model.safetensors").write_bytes(pickle.dumps(Fuse(canary)))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_model(str(folder))
    assert not canary.exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "/elsewhere/x.safetensors", "../x.safetensors", "a/b.safetensors"]
)
def test_an_index_names_only_safetensors_beside_it(name, folder):
    """transformers would open any other file of the index as a pickle."""
    canary = folder / "canary"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Fuse(canary)))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "model-1-of-1.safetensors")}))
    load_model(str(folder))  # as it should be
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, name)}))
    with pytest.raises(ValueError, match="only safetensors of this folder"):
        load_model(str(folder))
    assert not canary.exists()


# Code


EVIL = "from pathlib import Path\nPath(__file__).with_name('canary').touch()\nclass Evil: pass\n"
PYTHON = ("evil.py", "__init__.py", "modeling_qwen3.py", "tokenization_qwen2.py", "configuration_qwen3.py", "setup.py")


def edit(file: Path, **entries) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **entries}))


def test_python_files_are_ignored(folder):
    for name in PYTHON:
        (folder / name).write_text(EVIL)
    for load_it in LOADERS:
        load_it(str(folder))
    assert not (folder / "canary").exists()


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json"]
)
@pytest.mark.parametrize("load_it", LOADERS)
def test_code_of_the_authors_is_refused_at_every_door(file, load_it, folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks; nobody may say yes
    (folder / "evil.py").write_text(EVIL)
    edit(folder / file, auto_map={"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]})
    with pytest.raises(ValueError, match=f"{file} has auto_map.*never run here"):
        load_it(str(folder))
    assert not (folder / "canary").exists()


@pytest.mark.parametrize(
    ("file", "entries"),
    [
        ("config.json", {"configuration_files": ["config.4.0.0.json"]}),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}),
        ("config.json", {"attribute_map": {"harmless": "_attn_implementation"}, "harmless": "evil/kernel"}),
        ("config.4.0.0.json", {"auto_map": {"AutoConfig": "evil.Evil"}}),
        ("config.4.0.0.json", {"attn_implementation": "evil/kernel"}),
        ("config.4.0.0.json", {"text_config": {"_attn_implementation": {"": "kernels-community/flash"}}}),
    ],
)
@pytest.mark.parametrize("load_it", LOADERS)
def test_no_file_leads_to_one_that_was_not_looked_at(file, entries, load_it, folder):
    edit(folder / file, **entries)
    with pytest.raises(ValueError, match=f"{file} has {next(iter(entries))}|{file} has _attn_implementation"):
        load_it(str(folder))


def test_other_files_may_hold_anything(folder):
    edit(folder / "vocab.json", auto_map=1, attribute_map=2)
    (folder / "notes.json").write_text("[1, 2")
    (folder / "list.json").write_text("[1, 2]")
    for load_it in LOADERS:
        load_it(str(folder))


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "eager"])
def test_a_config_does_not_choose_what_computes_attention(name, folder):
    """For flash attention that is not installed transformers would fetch compiled code."""
    edit(folder / "config.json", attn_implementation=name)
    assert read_config(str(folder))._attn_implementation is None
    load_model(str(folder))


def test_everything_wrong_with_a_folder_is_told_at_once(folder):
    edit(folder / "config.json", auto_map={}, quantization_config={})
    edit(folder / "tokenizer_config.json", auto_map={})
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="auto_map") as caught:
        load_model(str(folder))
    assert len(str(caught.value).splitlines()) == 4


# The hub


def test_from_the_hub_only_texts_and_safetensors_are_fetched(model, monkeypatch):
    asked = []

    def fetched(name, **options):
        asked.append((name, options))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    load_tokenizer("somebody/model")
    load_model("somebody/model")
    assert {name for name, _ in asked} == {"somebody/model"}
    patterns = [set(options["allow_patterns"]) for _, options in asked]
    assert all(pattern <= {"*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"} for pattern in patterns)
    assert "*.safetensors" not in patterns[0]
    assert all("*/*" in options["ignore_patterns"] for _, options in asked)


def test_what_the_hub_sends_is_looked_at_too(folder, monkeypatch):
    edit(folder / "config.json", auto_map={"AutoConfig": "evil.Evil"})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    for load_it in LOADERS:
        with pytest.raises(ValueError, match="auto_map"):
            load_it("somebody/model")


def test_links_into_a_cache_are_followed(model, tmp_path):
    """As the hub's cache has them; any other link may lead to a secret, or to a device without an end."""
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    load_model(str(snapshot))
    load_tokenizer(str(snapshot))
    (tmp_path / "link").symlink_to(snapshot)
    load_model(str(tmp_path / "link"))  # what the user typed may be one
    for target in ("/dev/zero", str(model / "config.json")):
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(target)
        for load_it in LOADERS:
            with pytest.raises(ValueError, match="config.json cannot be read: .* is a symbolic link"):
                load_it(str(snapshot))


@pytest.mark.parametrize("name", ["", ".", "..", "../weights", "tiny-arithmetic/../tiny-arithmetic"])
def test_only_a_name_is_a_name_of_ours(name):
    assert resolve(name) == name
    assert resolve("tiny-arithmetic") == str(FOLDER / "tiny-arithmetic")


# Headers


SOUND = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.zeros(0)})


def shapes_of(data: bytes, folder: Path) -> dict[str, tuple[int, ...]]:
    file = folder / "x.safetensors"
    file.write_bytes(data)
    return tensors(file)


def test_a_sound_file_has_its_shapes(tmp_path):
    assert shapes_of(SOUND, tmp_path) == {"a": (2, 3), "b": (4,), "c": (0,)}
    empty = struct.pack("<Q", 2) + b"{}"
    assert shapes_of(empty, tmp_path) == {}


def test_a_name_twice_is_refused(tmp_path):
    entry = b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    text = b"{" + entry + b", " + entry + b"}"
    with pytest.raises(ValueError, match="names a tensor twice"):
        shapes_of(struct.pack("<Q", len(text)) + text + b"x", tmp_path)


@given(st.integers(0, len(SOUND) - 1), st.integers(0, 255), st.integers(0, 40))
def test_what_passes_the_look_is_what_safetensors_reads(tmp_path_factory, place, byte, cut):
    """Any byte changed, any end cut: refused by us, or read by the library with the same shapes."""
    data = bytearray(SOUND[: len(SOUND) - cut])
    data[min(place, len(data) - 1)] = byte
    try:
        shapes = shapes_of(bytes(data), tmp_path_factory.getbasetemp())
    except ValueError:
        return
    try:
        read = load(bytes(data))
    except SafetensorError:
        # Names or metadata that only the library minds; it refuses them, too.
        return
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == shapes


# Chat templates


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "{{ self.__init__.__globals__.__builtins__.open('CANARY', 'w') }}",
    "{{ joiner.__init__.__globals__['__builtins__']['__import__']('os').system('touch CANARY') }}",
    "{{ (messages | attr('__class__')).__mro__[1].__subclasses__() }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ ('{0.__cla' ~ 'ss__}') | format(messages) | attr('for' ~ 'mat')(messages).x }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('CANARY', 'w') }}",
    "{{ strftime_now.__code__.co_code }}",
    "{{ namespace.__init__.__globals__ }}",
    "{% set x = messages.append({'role': 'system'}) %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "{% for i in range(10000000000) %}x{% endfor %}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ 'x' * 100000000000000 }}",
    "{{ undefined_thing.attribute }}",
    "{{ 1 / 0 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages[0]['content' }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_that_reaches_out_is_refused(template, folder, monkeypatch, tmp_path):
    canary = tmp_path / "canary"
    monkeypatch.chdir(tmp_path)
    (folder / "chat_template.jinja").write_text(template.replace("CANARY", str(canary)))
    with pytest.raises(ValueError, match="chat template") as caught:
        prompt_tokens(load_tokenizer(str(folder)), HELLO)
    assert "root:" not in str(caught.value)
    assert not canary.exists()


@pytest.mark.parametrize("template", [ESCAPES[1], ESCAPES[14], ESCAPES[15], ESCAPES[-1]])
def test_the_worst_are_refused_when_the_tokenizer_loads(template, folder):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=re.escape(f"path {str(folder)!r}: the chat template")):
        load_tokenizer(str(folder))


@pytest.mark.slow("waits for templates that never end")
def test_an_endless_template_is_stopped(monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    tokenizer = tiny_tokenizer()
    loop = "{% for i in range(99999) %}"
    tokenizer.chat_template = loop * 3 + "{% endfor %}" * 3 + "done"
    start = time.monotonic()
    with pytest.raises(ValueError, match="ran for 0.5 s without an end"):
        rendered(tokenizer, HELLO, for_answer=True)
    assert time.monotonic() - start < 60
    # Nothing is left that could strike later.
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert rendered(tokenizer, HELLO, for_answer=True) == "Hello"
    time.sleep(0.7)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 2000000000 }}",
        "{{ 'a' * 1000 * 1000 * 1000 }}",
        "{% set x = 1234567891 %}{% set x = x * x %}",
        "{{ 'a' * messages | length }}",
        "{{ 'a' | center(3000000000) }}",
        "{{ 'a' | indent(width=3000000000) }}",
        "{{ messages | tojson(indent=99999999) }}",
        "{{ [1] | batch(*[3000000000]) }}",
        "{{ 'a'.ljust(3000000000) }}",
        "{{ '%3000000000d' | format(1) }}",
        "{{ '%*d' | format(3000000000, 1) }}",
        "{{ '%3000000000d' % 1 }}",
        "{{ '{:3000000000}'.format(1) }}",
        "{% set x = '{:3000000000}' %}{{ x.format(1) }}",
        "{{ 2 ** 3 }}",
    ],
)
def test_what_no_time_limit_could_stop_is_refused_before_it_runs(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if false %}" + template + "{% endif %}"
    with pytest.raises(ValueError, match="path 'p': the chat template computes"):
        templates.check_template(tokenizer, "p")


GROWING = {
    "a text is doubled": "ns.x ~ ns.x",
    "a text is doubled by an operator": "ns.x + ns.x",
    "a list is doubled": "(ns.x | list + ns.x | list) | join",
    "a list of lists is written": "[[ns.x, ns.x], [ns.x, ns.x]] | string",
    "a list of lists is written as JSON": "[[ns.x, ns.x], [ns.x, ns.x]] | tojson",
    "a list of lists is joined to a text": "[[ns.x, ns.x], [ns.x, ns.x]] ~ ''",
    "a filter replaces": "ns.x | replace('a', ns.x)",
    "a method replaces": "ns.x.replace('a', ns.x)",
    "a filter is mapped": "[ns.x] | map('replace', 'a', ns.x) | join",
    "a filter joins": "ns.x | join(ns.x)",
    "a method joins": "ns.x.join(ns.x)",
    "a macro writes": "twice(ns.x)",
    "a format is filled": "'%s%s' % (ns.x, ns.x)",
    "a format is called": "'{0}{0}'.format(ns.x)",
    "a table translates": "ns.x.translate({97: ns.x})",
    "a width comes from elsewhere": "ns.x ~ ('%' ~ '3000000000d') % 1",
    "a method is reached by its name": "ns.x['ljust'](3000000000)",
    "a number becomes bytes": "(3000000000).to_bytes(3000000000)",
}


@pytest.mark.parametrize("way", GROWING)
def test_what_a_template_makes_is_bounded_in_every_conversation(way, monkeypatch):
    """Only the conversation that a template is tried with was: any other could take all memory."""
    monkeypatch.setattr(template_bounds, "CHARACTERS", 1 << 20)
    tokenizer = tiny_tokenizer()
    twice = "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}"
    steps = "{% set ns = namespace(x='aa') %}{% for _ in range(40) %}{% set ns.x = " + GROWING[way] + " %}{% endfor %}"
    hidden = "{% if messages[0]['content'] == 'LOOP' %}" + steps + "{% endif %}"
    tokenizer.chat_template = twice + hidden + "{{ messages[0]['content'] }}"
    templates.check_template(tokenizer, "p")
    assert rendered(tokenizer, HELLO, for_answer=True) == "Hello"
    with pytest.raises(ValueError, match="asks for too much: more than 1,048,576 characters at once; use another"):
        rendered(tokenizer, [{"role": "user", "content": "LOOP"}], for_answer=True)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{{ messages[0]['content'] * 3 }}{% endfor %}",
        "{% for i in range(90000) %}a long text that a template has itself{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(9000) %}{% set ns.x = ns.x + [i, i] %}{% endfor %}",
        "{% set x = 'a' * 1000 %}{% for i in range(9000) %}{% set y = x[1:] %}{% endfor %}",
        "{% set x = 'a' * 1000 %}{% for i in range(9000) %}{% set y = x | upper %}{% endfor %}",
        "{% for i in range(90000) %}{% set y = [1, 2, 3, 4, 5, 6, 7, 8] %}{% endfor %}",
        "{% set x %}{% for i in range(90000) %}{% filter upper %}of a block{% endfilter %}{% endfor %}{% endset %}",
    ],
)
def test_what_a_template_makes_counts_together(template, monkeypatch):
    monkeypatch.setattr(template_bounds, "CHARACTERS", 1 << 20)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="asks for too much: more than 1,048,576 characters at once"):
        rendered(tokenizer, HELLO, for_answer=True)


def test_a_bounded_template_writes_what_it_wrote():
    """Each operation that counts gives what Jinja's own gives, whatever its operands are."""
    template = """{% macro m(x) %}[{{ x }}|{{ caller() }}]{% endmacro %}{%- set ns = namespace(x=[], t='') -%}
    {% for m in messages[1:] + messages[:1] %}{% generation %}{% set ns.x = ns.x + [m.content] %}
    {% filter upper | replace('L', '<l>') %}{{ m['role'] }}{% endfilter %}{% endgeneration %}{% endfor %}
    {% set block %}{{ ns.x | join(', ') }} {{ messages | map(attribute='role') | join('/') }}{% endset %}
    {% call m(block | trim) %}{{ 3 * 'ab' ~ missing ~ none ~ true ~ 1.5 ~ [1, 'x'] ~ {'k': (1, 2)} }}{% endcall %}
    {{ messages | tojson(indent=2) }} {{ '%s-%05.1f' % ('a', 2) }} {{ '{:>5}|{k}'.format('a', k=1) }} {{ 7 % 4 + 1 }}
    {{ 'a-b'.split('-')[::-1] }} {{ 'x'.join(['1', '2']) }} {{ 'abc'.replace('b', 'dd') }} {{ {'a': 1}.items() | list }}
    {{ 'one two three' | wordwrap(5) }} {{ 'a\nb' | indent(2, true) }} {{ [[1], [2]] | sum(start=[]) }} {{ ns.t | e }}
    {{ 'a' in 'abc' }} {{ [1, 2] | map('string') | list }} {{ '<b>' | escape ~ 'x' }} {{ strftime_now('%%') }}"""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    talk = [*HELLO, {"role": "assistant", "content": "well,\n <i>hello</i>"}]
    found = rendered(tokenizer, talk, for_answer=True)
    chat_template_utils._compile_jinja_template.cache_clear()
    assert found == tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert len(found) > 300


def test_one_long_instruction_is_told_afterwards(monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.1)
    with pytest.raises(templates.TemplateTooSlow), templates._bounded(0.1):
        time.sleep(0.3)
    time.sleep(0.2)  # nothing is left that could strike later


@pytest.mark.parametrize(
    "template",
    [
        "{{ loop_messages | tojson(indent=4) }}",
        "{% for m in messages %}{{ '  ' * (loop.index - 1) }}{% if loop.index0 % 2 %}{% endif %}{% endfor %}",
        "{{ messages[0].content | indent(4, true) }}",
        "{{ '%s: %s' | format('a', 'b') ~ '{}'.format(1) }}",
        "{{ messages[0].format is defined }}",
        "{{ (messages | length - 1) - 1 + 3 // 2 }}",
    ],
)
def test_what_real_templates_do_is_allowed(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    templates.check_template(tokenizer, "p")


def test_a_real_template_is_none_of_this(folder):
    template = (
        "{% set ns = namespace(found=false) %}{%- for message in messages %}"
        "{% if loop.index0 > 90 %}{% break %}{% endif %}{% generation %}"
        "{{ '=' * 3 ~ message['role'] | upper ~ message.content | trim }}"
        "{% endgeneration %}{%- endfor %}{% if add_generation_prompt %}{{ '>' }}{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    assert rendered(load_tokenizer(str(folder)), HELLO, for_answer=True) == "===USERHello>"


def test_a_template_may_dislike_a_conversation(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only systems speak here') }}")
    tokenizer = load_tokenizer(str(folder))  # text prompts still work
    assert prompt_tokens(tokenizer, "1+1=")
    with pytest.raises(ValueError, match="the chat template refuses it: only systems speak here"):
        prompt_tokens(tokenizer, HELLO)


# Checkpoints of a run


def test_a_damaged_checkpoint_is_passed_over(model, tmp_path):
    def fill(into: Path) -> None:
        shutil.copytree(model, into, dirs_exist_ok=True)

    first, second = (tmp_path / "checkpoints" / f"step-00000{step}" for step in (1, 2))
    write_folder(first, fill)
    write_folder(second, fill)
    assert resolve(str(tmp_path)) == str(second)
    weights = bytearray((second / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (second / "model.safetensors").write_bytes(weights)
    (second / "manifest.json").touch()  # or what was found out before would stand
    with pytest.warns(DamagedCheckpoint, match=r"step-000002 is damaged \(model.safetensors.*step-000001 is used"):
        assert resolve(str(tmp_path)) == str(first)
    (first / "config.json").unlink()
    (first / "manifest.json").touch()
    with pytest.raises(ValueError, match=r"step-000002 is damaged.*step-000001 is damaged \(config.json: missing\)"):
        resolve(str(tmp_path))


def test_a_config_is_parsed_once_for_each_text_and_belongs_to_its_caller(folder, monkeypatch):
    parsed, real = [], transformers.AutoConfig.from_pretrained
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *a, **n: parsed.append(a) or real(*a, **n))
    first = read_config(str(folder))
    first.vocab_size = 5
    assert read_config(str(folder)).vocab_size == len(tiny_tokenizer())
    load_tokenizer(str(folder))
    load_model(str(folder))
    assert len(parsed) == 1
    held = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(held | {"vocab_size": 7}))
    assert read_config(str(folder)).vocab_size == 7
    assert len(parsed) == 2
