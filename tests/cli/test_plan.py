"""`proximo plan`: one table, or JSON; fits or not, and what would; refusals in one line and no weights."""

import json
from dataclasses import replace

import pytest

import proximo
from proximo.cli import main
from proximo.config import toml
from proximo.models import loading, tiny_model
from proximo.models.adapters.lora import Lora
from proximo.planning import cards
from proximo.planning.cards import DeviceCard


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Whoever loads weights fails."""

    def load_weights(*_, **__):
        pytest.fail("weights were loaded")

    monkeypatch.setattr(loading, "load_weights", load_weights)


def planned(arguments: list[str], capsys) -> tuple[int, dict]:
    status = main(["plan", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_eight_billion_on_a_small_card_says_what_would_fit(capsys):
    flags = ["--model", "8B", "--algorithm", "grpo", "--gpu", "A100-40", "--sampling.max-tokens", "256"]
    assert main(["plan", *flags]) == 0
    text = capsys.readouterr().out
    for label in (
        "policy: weights",
        "policy: masters",
        "its LoRA adapter: moments",
        "keys and values",
        "activations of a pass",
    ):
        assert label in text
    [full] = [line for line in text.splitlines() if line.startswith("full fine-tuning: ")]
    assert full.startswith("full fine-tuning: does not fit: needs at least ")
    assert "A100-40 has 38.8. What would: " in full
    [lora] = [line for line in text.splitlines() if line.startswith("LoRA rank 16: ")]
    assert lora.startswith("LoRA rank 16: fits, with a predicted peak of ")
    assert " tokens × 16 samples" in lora
    assert "predictions" in text


@pytest.mark.slow("plans five runs")
def test_ranks_are_planned_for_a_named_card(capsys):
    """By `--ranks`, and by [ranks] of the config; without them a run that is too large is told how many would do."""
    flags = ["--model", "8B", "--gpu", "H100"]
    line = "full fine-tuning: fits on 8 ranks with weights in 8 shards: predicted peak 69.3 of 78.5 GiB on each (H100)"
    for ranks in (["--ranks", "8"], ["--ranks.type", "Ranks", "--ranks.processes", "8"]):
        status, found = planned([*flags, *ranks], capsys)
        assert (status, found["verdicts"][0], found["full"]["fits"]) == (0, line, True)
    assert " or on 4 such with --ranks 4: predicted peak " in planned(flags, capsys)[1]["verdicts"][0]
    status, found = planned(["--model", "14B", "--gpu", "RTX4090", "--ranks", "8"], capsys)
    assert (status, found["full"]["fits"]) == (1, False)
    assert found["verdicts"][0].startswith("full fine-tuning: does not fit on 8 ranks with weights in 8 shards: ")


def test_the_plan_says_which_learning_rate_a_run_chooses(capsys):
    assert main(["plan", "--model", "8B", "--gpu", "H200"]) == 0
    text = capsys.readouterr().out
    assert "  full fine-tuning: 1e-06, for pretrained weights, 8.19 B of them; a real model of 0.5 B rose on" in text
    assert "  LoRA: 1e-05, " in text


def test_the_json_has_bytes_and_seconds(capsys):
    status, found = planned(["--model", "0.6B", "--algorithm", "ppo", "--gpu", "H200"], capsys)
    assert status == 0
    assert found["parameters"] == 596_049_920
    assert found["full"]["fits"]
    assert found["lora"]["fits"]
    assert found["full"]["components"][0]["moments"] == 8 * 596_049_920
    assert found["full"]["peak"] == max(found["full"]["memory"][f"{each}_peak"] for each in ("rollout", "update"))
    assert 0 < found["lora"]["seconds"] < found["full"]["seconds"]
    assert [line.partition(":")[0] for line in found["verdicts"]] == ["full fine-tuning", "LoRA rank 16"]


def test_where_nothing_fits_the_status_says_so(capsys):
    status, found = planned(["--model", "14B", "--gpu", "RTX4090"], capsys)
    assert status == 1
    assert (found["full"]["fits"], found["full"]["seconds"]) == (False, None)


def test_a_run_file_is_planned_as_it_is(tmp_path, monkeypatch, capsys):
    tiny_model(layers=2).save_pretrained(tmp_path / "model")
    config = proximo.RunConfig(
        model=str(tmp_path / "model"),
        algorithm=proximo.DAPO,
        sampling=proximo.SamplingOptions(max_tokens=48),
        training=proximo.TrainingOptions(groups=6, group_size=4, minibatches=2),
    )
    (tmp_path / "run.toml").write_text(toml.dumps(config))
    flags = [str(tmp_path / "run.toml"), "--gpu", "H200", "--prompt-tokens", "16", "--mean-tokens", "20"]
    adapter = ["--adapter.type", "Lora", "--adapter.rank", "4", "--adapter.targets", "q_proj", "v_proj"]
    _, found = planned([*flags, *adapter], capsys)
    sizes = {"groups": 6, "group_size": 4, "prompt_tokens": 16, "max_tokens": 48, "mean_tokens": 20, "minibatches": 2}
    assert sizes.items() <= found["size"].items()
    with_adapter = replace(config, adapter=Lora(rank=4, targets=("q_proj", "v_proj")))
    by_hand = proximo.plan(with_adapter, "H200", prompt_tokens=16, mean_tokens=20)
    assert found == json.loads(json.dumps(by_hand.to_dict()))
    assert any("sampled again" in each for each in found["remarks"])


def test_a_gpu_by_its_numbers(capsys):
    numbers = ["--gpu.memory", "80", "--gpu.bandwidth", "3.35e12", "--gpu.arithmetic", "989e12"]
    _, found = planned(["--model", "0.6B", *numbers], capsys)
    assert found["card"] == {
        "name": "custom",
        "memory": 80,
        "bandwidth": 3.35e12,
        "arithmetic": 989e12,
        "is_gpu": True,
        "context": 0.6,
        "link": 32e9,
    }
    _, found = planned(["--model", "0.6B", "--gpu", "H200", "--gpu.memory", "60"], capsys)
    assert (found["card"]["name"], found["card"]["memory"]) == ("H200", 60)


def test_a_cpu_is_planned_in_float32(monkeypatch, capsys):
    here = DeviceCard("cpu", 16, 2e10, 7e10, is_gpu=False, context=0.3)
    monkeypatch.setattr(cards, "this_machine", lambda *, gpu: here)
    _, found = planned(["--model", "tiny-arithmetic", "--gpu", "cpu", "--sampling.max-tokens", "8"], capsys)
    assert (found["dtype"], found["card"]["name"]) == ("float32", "cpu")
    assert found["full"]["components"][0]["masters"] == 0
    assert found["full"]["memory"]["captured"] == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpu", "H2000"], "gpu is 'H2000': give one of B200, H200"),
        (["--gpu", "H100-80"], "FLOP/S); did you mean H100?"),
        (["--gpu.memory", "80"], "gpu has no name, and gpu.bandwidth, gpu.arithmetic is missing"),
        (["--gpu", "H200", "--gpu.memory", "much"], "--gpu.memory much: give a number"),
        (["--gpu", "H200", "--gpu.memory", "0"], "gpu.memory is 0.0: give a positive number"),
        (["--gpu", "H200", "--prompt-tokens", "0"], "prompt_tokens is 0: give at least 1"),
        (["--gpu", "H200", "--prompt-tokens", "1.5"], "--prompt-tokens 1.5: give a whole number"),
        (["--gpu", "H200", "--mean-tokens", "2000"], "mean_tokens is 2000: give 1 to sampling.max_tokens"),
        (
            ["--gpu", "H200", "--adapter.type", "Lora", "--adapter.targets", "qkv"],
            "adapter.targets has 'qkv', which no linear layer is called (experts in one tensor are none): there are",
        ),
        (["--gpu", "H200", "--model", "no/such-model"], "or give a shape by name: SmolLM2-135M, 0.6B"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *flags])
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_the_door_says_what_to_give_in_place_of_a_name():
    with pytest.raises(TypeError, match=r"config is '8B': give a proximo.RunConfig"):
        proximo.plan("8B", "H200")  # pyright: ignore[reportArgumentType]


def test_the_verdict_says_why_a_single_completion_is_too_long():
    found = proximo.plan(proximo.RunConfig(model="0.6B", algorithm=proximo.DAPO), "H200")
    assert found.full.fits
    refused = replace(found.full, memory=replace(found.full.memory, refused=True))
    line = replace(found, full=refused).verdicts[0]
    assert "does not fit: the keys of one completion of" in line
    assert "are more than the sampler may take. What would: " in line
