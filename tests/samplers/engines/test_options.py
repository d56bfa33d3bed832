"""The options of a fleet: what is refused before anything starts, and what a run without engines loads."""

import pytest

from proximo.config import toml
from proximo.rl.config import RunConfig
from proximo.samplers.engines import options
from proximo.samplers.engines.options import Fleet
from tests.run_processes import Script
from tests.samplers.engines.conformance import SmallPolicy


def test_a_python_without_vllm_is_remarked_where_it_would_start_servers(monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    [line] = Fleet().check()
    assert line.startswith("sampler: vLLM is not installed in this Python, and engines cannot start without it")
    assert not Fleet(engine="embedded").check()
    assert not Fleet(python="/somewhere/bin/python").check()
    monkeypatch.setattr(options, "find_spec", lambda name: name)
    assert not Fleet().check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engines": 0}, "sampler.engines is 0: give at least 1"),
        ({"tensor_parallel": 0}, "sampler.tensor_parallel is 0: give at least 1"),
        ({"probe": 0}, "sampler.probe is 0: give at least 1"),
        ({"deadline": 0.0}, "sampler.deadline is 0.0: give a positive number of seconds"),
        ({"kv_cache_mb": 0}, "sampler.kv_cache_mb is 0: give at least 1, or None"),
        ({"urls": ("node7:8000",)}, "sampler.urls has 'node7:8000': give addresses such as http://node7:8000"),
        ({"urls": ("http://",)}, "sampler.urls has 'http://': give addresses"),
        ({"urls": ("http://node7:abc",)}, "sampler.urls has 'http://node7:abc': give addresses"),
        ({"urls": ("http://node7:99999",)}, "sampler.urls has 'http://node7:99999': give addresses"),
        ({"urls": ("http://node7:8000/v1",)}, "sampler.urls has 'http://node7:8000/v1': give addresses"),
        (
            {"arguments": ("--override-generation-config", '{"min_tokens": 4}')},
            "min_tokens, which is refused: it hides",
        ),
        ({"arguments": ('--override-generation-config={"repetition_penalty": 1.1}',)}, "repetition_penalty, which is"),
        ({"arguments": ("--logprobs_mode", "raw_logprobs")}, "logprobs-mode, which is refused"),
        ({"engine": "embedded", "sync": "nccl"}, 'sampler.engine is "embedded": leave out urls'),
        ({"engine": "embedded", "urls": ("http://a",)}, 'sampler.engine is "embedded": leave out urls'),
    ],
)
def test_wrong_options_are_refused_in_one_line(given, message):
    with pytest.raises(ValueError, match="^[^\n]*$") as caught:
        Fleet(**given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/nowhere/python", "sampler.python is /nowhere/python, which cannot"),
        ("", 'this Python lacks: pip install "pro'),
    ],
)
def test_a_python_without_vllm_is_refused_before_anything_starts(python, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    policy = SmallPolicy()
    with pytest.raises(ValueError, match=message):
        Fleet(python=python).build(policy, policy.tokenizer, slots=1, record_routes=False)


def test_a_config_holds_a_fleet():
    config = RunConfig(sampler=Fleet(engines=3, urls=("http://a:1", "https://b"), arguments=("--enforce-eager",)))
    assert toml.loads(toml.dumps(config), RunConfig) == config
    assert 'type = "Fleet"' in toml.dumps(config)


def test_copies_count_where_engines_share_the_process():
    assert (Fleet(engines=3).copies, Fleet(engine="embedded", engines=3).copies) == (0, 3)


def test_a_run_without_engines_loads_their_options_alone(tmp_path):
    code = "print(sorted(each for each in sys.modules if each.startswith('proximo.samplers.engines')))"
    script = Script(code, stdout=tmp_path / "out", stderr=tmp_path / "err")  # in it, `proximo train` is imported
    assert script.wait() == 0
    assert (tmp_path / "out").read_text() == "['proximo.samplers.engines', 'proximo.samplers.engines.options']\n"
