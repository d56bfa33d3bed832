"""Model folders of strangers: any value in any file is read or refused in a line, in bounded time, and runs nothing."""

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from proximo.models import load_model, load_tokenizer, tiny_model, tiny_tokenizer
from proximo.models.adapters.files import _check_fields
from proximo.models.loading import has_score, read_config
from proximo.models.stop_tokens import declared_ends
from proximo.models.tokens import templates
from proximo.models.tokens.growing import growing

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 7, 10**7, 10**9, 2**63, 10**400, 1e308, -0.5]),
    st.sampled_from(["", "silu", "../x", "\0", "\ud800", "Evil"]),
    st.lists(st.sampled_from([1, "a", None, [[]]]), max_size=2),
    st.dictionaries(st.sampled_from(["a", "rope_type", "type"]), st.integers(), max_size=2),
)


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


def edit(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def refused_in_a_line_or_read(read: Callable[[str], object], folder: Path) -> None:
    try:
        read(str(folder))
    except ValueError as error:
        lines = str(error).splitlines()
    else:
        return
    assert all(line.startswith("path ") or len(lines) == 1 for line in lines)


@pytest.mark.slow("reads many configs")
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_value_in_any_field_of_a_config_is_read_or_refused(data, model, tmp_path_factory):
    file, reads = data.draw(
        st.sampled_from(
            [
                ("config.json", (load_model, load_tokenizer, declared_ends)),
                ("tokenizer_config.json", (load_tokenizer,)),
                ("generation_config.json", (declared_ends,)),
            ]
        )
    )
    known = json.loads((model / file).read_text())
    changed = data.draw(
        st.dictionaries(st.sampled_from([*known, "architectures", "eos_token_id"]), VALUES, min_size=1, max_size=2)
    )
    folder = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(model, folder)
    (folder / file).write_text(json.dumps(known | changed))
    for read in reads:
        refused_in_a_line_or_read(read, folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null", "[" * 10**5, "{", "\0", '{"a": ' + "9" * 5000 + "}", ""])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"])
def test_a_file_of_any_json_is_refused_in_a_line(file, text, folder):
    (folder / file).write_text(text)
    for read in (load_tokenizer, declared_ends, read_config):
        refused_in_a_line_or_read(read, folder)


def test_an_index_never_leads_to_a_pickle_or_out_of_the_folder(folder, monkeypatch):
    """`transformers_weights` may name an index, which transformers follows, also to `.bin`."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "evil.bin")
    for name in ("evil.bin", "../model.safetensors", str(folder / "model.safetensors"), "other.safetensors.index.json"):
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (folder / "other.safetensors.index.json").write_text(json.dumps(index))
        edit(folder / "config.json", transformers_weights="other.safetensors.index.json")
        with pytest.raises(ValueError, match="only safetensors of this folder are read"):
            load_model(str(folder))


@pytest.mark.parametrize(
    "entries",
    [
        {"num_hidden_layers": 10**7},
        {"num_attention_heads": 10**9},
        {"vocab_size": 10**9},
        {"hidden_size": 10**12},
        {"intermediate_size": 10**9},
        {"vocab_size": 10**400},
        {"num_hidden_layers": 10**4},
        {"num_labels": 10**9},
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused_before_anything_is_built(entries, folder):
    edit(folder / "config.json", **entries)
    with pytest.raises(ValueError, match="^[^\n]*$"):
        load_model(str(folder))


def test_architectures_may_be_anything():
    for named in (["Evil", 1], "Evil", 3, {}, None):
        config: Any = type("Config", (), {"architectures": named})()
        assert not has_score(config)


@pytest.mark.parametrize("template", [["a"], {"default": 3}, "{{ " + "(" * 5000 + ")" * 5000 + " }}", "x" * (1 << 20)])
def test_templates_that_are_no_text_or_too_deep_are_refused(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"^path 'x': the chat template .*$"):
        templates.check_template(tokenizer, "x")


@pytest.mark.slow("waits for templates that take all memory")
@pytest.mark.parametrize("grown", ["text.x ~ text.x", "[text.x, text.x]|join", "text.x + text.x"])
def test_a_template_that_doubles_a_text_is_refused_before_the_memory_is_taken(grown):
    """It took all that there was."""
    tokenizer = tiny_tokenizer()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrlimit(resource.RLIMIT_DATA)
    start = "{% set text = namespace(x='a') %}{% for _ in range(40) %}"
    tokenizer.chat_template = f"{start}{{% set text.x = {grown} %}}{{% endfor %}}"
    with pytest.raises(ValueError, match="^path 'x': the chat template .*; use another$"):
        templates.check_template(tokenizer, "x")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[0] < 3 << 20
    assert resource.getrlimit(resource.RLIMIT_DATA) == before[1]


def test_what_is_no_file_is_refused_and_does_not_hang(folder):
    os.mkfifo(folder / "special_tokens_map.json")
    for read in (load_model, load_tokenizer, read_config):
        with pytest.raises(ValueError, match="special_tokens_map.json cannot be read: .* is a pipe"):
            read(str(folder))


def replacing(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [replacing("e", "ee")] * 60}),
        ("normalizer", replacing(".", "x" * 10**6)),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 60}),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 10**6}),
        ("decoder", {"type": "Sequence", "decoders": [replacing("e", "ee")] * 60}),
        ("padding", {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0}),
    ],
)
def test_a_tokenizer_that_makes_texts_grow_without_end_is_refused_before_it_is_loaded(part, change, folder):
    """Sixty steps that double a text took all memory when the first word was read."""
    edit(folder / "tokenizer.json", **{part: change})
    with pytest.raises(ValueError, match=rf"^path .*: tokenizer.json: its {part} .*use another tokenizer$"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("file", "entries"),
    [
        (
            "tokenizer.json",
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "zz", "type_id": 0}}],
                }
                | {"pair": [], "special_tokens": {}}
            },
        ),
        ("tokenizer.json", {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}}),
        ("tokenizer_config.json", {"model_max_length": "x"}),
    ],
)
def test_a_tokenizer_that_fails_with_any_text_is_refused_where_it_is_loaded(file, entries, folder):
    """The panics of its library are no Exceptions, and ended a run with a traceback."""
    edit(folder / file, **entries)
    with pytest.raises(ValueError, match=r"^path .*: (its tokenizer cannot read a text|no tokenizer can be read).*$"):
        load_tokenizer(str(folder))


def test_changes_that_real_tokenizers_make_are_read(folder):
    """Those of T5, Llama 2, Gemma and byte-level ones."""
    known = [{"type": "Prepend", "prepend": "_"}, replacing(" ", "_"), {"type": "NFC"}, {"type": "Lowercase"}]
    edit(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": known})
    assert load_tokenizer(str(folder))
    metaspace = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}
    t5 = {"normalizer": [{"type": "Precompiled"}, replacing(" {2,}", "_")], "pre_tokenizer": metaspace}
    assert not [*growing(t5)]


# Adapters


@pytest.fixture
def adapter(tmp_path) -> Path:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {f"{name}.lora_A.weight": torch.zeros(4, 16), f"{name}.lora_B.weight": torch.zeros(16, 4)},
        tmp_path / "adapter_model.safetensors",
    )
    return tmp_path


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 10**8},
        {"r": "8"},
        {"r": 0},
        {"r": 4, "rank_pattern": {"q_proj": 10**8}},
        {"r": 4, "rank_pattern": []},
        {"r": 4, "alpha_pattern": {"(a+)+$": 1}},
        {"r": 4, "layers_pattern": "(a|a)*b"},
    ],
)
def test_an_adapter_has_the_sizes_of_its_weights_and_no_patterns(fields, adapter):
    with pytest.raises(ValueError, match=r"^path .*adapter_config.json has .*$"):
        _check_fields(adapter, fields)


def test_layers_chosen_by_a_pattern_are_those_that_the_weights_name(adapter):
    """A pattern may be made never to end."""
    for fields in ({"target_modules": "(.*.*)*!"}, {"target_modules": ["v_proj"], "exclude_modules": "(a+)+"}):
        _check_fields(adapter, fields := {"r": 4, **fields})
        assert fields == {"r": 4, "target_modules": ["model.layers.0.self_attn.q_proj"]}
    _check_fields(adapter, fields := {"r": 4, "target_modules": ["q_proj"]})
    assert fields == {"r": 4, "target_modules": ["q_proj"]}
