"""Rollouts next to vLLM's: log-probs compared first, sides in turns. The engine here is a stand-in."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from proximo_lab.bench.options import BenchOptions, parsed
from proximo_lab.bench.running import main
from proximo_lab.bench.session import Session
from proximo_lab.bench.sides import vllm
from proximo_lab.bench.sides.ours import Ours
from proximo_lab.bench.sides.vllm import LogprobGap, Vllm, vllm_version
from proximo_lab.bench.tables.rollout import Beside
from tests.lab.bench.test_bench import SMALLEST, Ticks, alone
from tests.lab.bench.test_own_rows import ENDING

STAND_IN = """
import json
from pathlib import Path
from types import SimpleNamespace

__version__ = "0"


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, **options):
        assert (Path(model) / "model.safetensors").is_file() and options["skip_tokenizer_init"]
        assert options["max_model_len"] == 10 and options["max_num_seqs"] == 4 and options["dtype"] == "float32"
        self.scores = json.loads(Path(__file__).with_name("scores.json").read_text())

    def reset_prefix_cache(self):
        print("noise")

    def generate(self, prompts, sampling, use_tqdm):
        assert sampling.ignore_eos and sampling.temperature == 1.0 and sampling.max_tokens == 4
        tokens = [[1 + number] * 4 for number in range(len(prompts))]
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=each, logprobs=self.told(row, each))] * sampling.n)
            for row, each in enumerate(tokens)
        ]

    def told(self, row, tokens):
        return [{token: SimpleNamespace(logprob=score)} for token, score in zip(tokens, self.scores[row])]
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A Python that has the stand-in, telling the log-probs that our model would, moved by `off`."""
    (tmp_path / "vllm.py").write_text(STAND_IN)
    environment = vllm._environment

    def stand_in(threads: int = 1) -> dict[str, str]:
        return environment(threads) | {"PYTHONPATH": str(tmp_path)}

    monkeypatch.setattr(vllm, "_environment", stand_in)

    def tell(off: float) -> None:
        scores = [[score + off for score in row] for row in _plain_logprobs()]
        (tmp_path / "scores.json").write_text(json.dumps(scores))

    return tell


def _plain_logprobs() -> list[list[float]]:
    """Of four times token 1 after the first prompt, and four times token 2 after the second."""
    model, found = SMALLEST.shape.model(attention="sdpa", dtype=torch.float32, device="cpu"), []
    for token, prompt in enumerate(SMALLEST.prompts(), start=1):
        logits = model(torch.tensor([[*prompt, *[token] * 4]])).logits[0, -5:-1]
        found.append(logits.log_softmax(-1)[:, token].tolist())
    return found


def beside() -> Session:
    return replace(alone(), options=BenchOptions(steps=2, warmup=0, peers=("vllm",)))


def test_rollouts_take_turns_with_an_engine_that_has_our_weights(engine):
    engine(0.0)
    [row] = Beside(SMALLEST).run(beside())
    assert not row.refused
    assert set(row.ratios) == {"× vLLM"}
    assert "vLLM tok/s" in row.figures
    assert len(row.details["seconds"]["vLLM"]["rollout"]) == 2
    assert row.details["settings"]["vLLM"] == {"version": "unknown"}
    assert row.details["numerics"]["vLLM"]["mean"] < 1e-5


def test_an_engine_with_other_log_probs_is_not_timed(engine):
    engine(0.01)
    [row] = Beside(SMALLEST).run(beside())
    assert row.refused
    assert "ours and vLLM differ: log-probs 1.0e-02 apart on average" in row.note


def test_gaps_are_held_to_the_precision():
    assert LogprobGap(1e-5, 1.0, 1e-4).holds
    assert not LogprobGap(2e-4, 2e-4, 1e-4).holds
    assert not LogprobGap(float("nan"), 0.0, 1e-4).holds


def test_with_random_ends_there_is_no_engine(monkeypatch):
    monkeypatch.setattr(Vllm, "__init__", lambda *_: pytest.fail("started"))
    [row] = Beside(ENDING).run(beside())
    assert row.ratios == {}


def test_a_process_that_ends_is_said(engine, tmp_path):
    with pytest.raises(ValueError, match="vLLM's process ended with 1"):  # there are no scores
        Vllm(Ours(SMALLEST, "cpu", Ticks()), sys.executable, 1)


@pytest.mark.slow("measures speed and memory")
def test_where_it_is_not_installed_one_line_says_what_to_do(tmp_path, capsys):
    with pytest.raises(ValueError, match="vllm-python is 'nothing', which does not run"):
        vllm_version("nothing")
    arguments = ["rollout", "--only", "c-tiny", "--peers", "vllm", "--device", "cpu", "--results", str(tmp_path)]
    assert main([*arguments, "--vllm-python", sys.executable]) == 2
    assert "has no vLLM: install it into an environment (`pip install vllm`" in capsys.readouterr().err


def test_it_makes_rollouts_alone(capsys):
    with pytest.raises(SystemExit):
        parsed(["step", "--peers", "best", "vllm"], [("step", "")], "x")
    assert "peers has 'vllm', which makes rollouts alone: measure them with x rollout" in capsys.readouterr().err
