"""The table of a profile, its largest loss, and files that no run wrote."""

import json
from dataclasses import replace

import pytest

from proximo.runs.step_profile import (
    MAX_BYTES,
    KernelTime,
    PhaseTime,
    StepProfile,
    largest_loss,
    profile_lines,
    read_profile,
)

PROFILE = StepProfile(
    steps=(3, 4),
    device="cpu",
    phases=(
        PhaseTime(("rollout",), 0.5, 0.5, 1.0),
        PhaseTime(("rollout", "decoding"), 3.0, 3.0, 40.0),
        PhaseTime(("rollout", "admission"), 2.0, 2.0, 6.0),
        PhaseTime(("rollout", "admission", "prefill"), 1.0, 1.0, 6.0),
        PhaseTime(("update", "forward", "packing"), 0.75, 0.75, 2.0),
        PhaseTime(("assemble", "old log-probs", "packing"), 0.75, 0.75, 2.0),
        PhaseTime(("update", "backward"), 1.9, 1.9, 2.0),
        PhaseTime((), 0.1, 0.1, 0.0),
    ),
)


def with_seconds(profile: StepProfile, **seconds: float) -> StepProfile:
    """The profile with other seconds for the phases of these innermost names."""
    phases = (
        replace(each, seconds=seconds.get(each.path[-1], each.seconds) if each.path else each.seconds)
        for each in profile.phases
    )
    return replace(profile, phases=tuple(phases))


def test_the_largest_loss_is_named_with_what_to_do():
    sentence = largest_loss(PROFILE)
    assert sentence.startswith("admission takes 20% of a step of 10.00 s. First: no more rows a step")


def test_losses_of_one_name_are_added_up_wherever_they_are():
    sentence = largest_loss(with_seconds(PROFILE, admission=1.0))
    assert sentence.startswith("packing takes 17% of a step of 9.00 s. First: fewer, larger passes")


def test_an_evaluation_is_a_loss_with_all_that_lies_in_it():
    evaluation = (PhaseTime(("evaluate",), 1.0, 1.0, 1.0), PhaseTime(("evaluate", "decoding"), 9.0, 9.0, 1.0))
    sentence = largest_loss(replace(PROFILE, phases=(*PROFILE.phases, *evaluation)))
    assert sentence.startswith("evaluate takes 50% of a step of 20.00 s. First: a larger evaluation.every")


def test_computing_is_no_loss_but_a_gpu_that_idles_in_it_is():
    profile = with_seconds(PROFILE, admission=0.01, packing=0.01, rollout=0.01)
    assert largest_loss(profile).startswith("nothing but the computing itself takes 5%")
    assert "rollout / decoding takes 50%" in largest_loss(profile)
    busy = tuple(replace(each, busy=0.25 if each.path[-1:] == ("decoding",) else 1.0) for each in profile.phases)
    sentence = largest_loss(replace(profile, phases=busy))
    assert sentence.startswith("the GPU idles in rollout / decoding: 37%")


def test_the_table_adds_up_to_the_step():
    lines = profile_lines(PROFILE)
    assert lines[0].startswith("steps 3 to 4: admission takes 20%")
    seconds = {line[:42].rstrip(): line[42:].split()[:2] for line in lines[2:]}
    assert seconds["all"] == ["10.0000", "100.0%"]
    assert seconds["  rollout"] == ["6.5000", "65.0%"]
    assert seconds["    admission"] == ["3.0000", "30.0%"]
    assert seconds["      prefill"] == ["1.0000", "10.0%"]
    outermost = [float(each[0]) for name, each in seconds.items() if name.startswith("  ") and name[2] != " "]
    assert sum(outermost) == pytest.approx(10.0)
    assert any(name == "  rest" for name in seconds), "what no phase names is shown"


def test_a_profile_is_read_as_it_was_written(tmp_path):
    written = replace(
        PROFILE, traced=5, kernels=(KernelTime("gemm", "update / backward", 0.5, 24),), remark="", passes="of 5 tokens"
    )
    (tmp_path / "profile.json").write_text(json.dumps(written.to_dict()))
    assert read_profile(tmp_path) == written
    assert any("gemm (update / backward)" in line for line in profile_lines(written))


def test_a_run_without_a_profile_has_none(tmp_path):
    assert read_profile(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"steps": 3}',
        json.dumps(PROFILE.to_dict() | {"steps": []}),
        json.dumps(PROFILE.to_dict()).replace("3.0", '"much"', 1),
        json.dumps(PROFILE.to_dict()).replace("3.0", "NaN", 1),
        "[" * 100_000,
        " " * (MAX_BYTES + 1),
    ],
    ids=["list", "cut", "missing", "empty", "text", "nan", "nested", "large"],
)
def test_what_no_run_wrote_is_refused_in_a_line(tmp_path, text):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 -- the file's name is in all of them but the decoder's
        read_profile(tmp_path)
    assert "\n" not in str(refusal.value)


def test_names_of_a_stranger_are_shown_without_control_characters(tmp_path):
    nasty = PhaseTime(("rollout", "a\x1b[2Jb" + "c" * 1000), 3.0, 3.0, 1.0)
    (tmp_path / "profile.json").write_text(json.dumps(replace(PROFILE, phases=(nasty,)).to_dict()))
    profile = read_profile(tmp_path)
    assert profile is not None
    assert not any("\x1b" in line for line in profile_lines(profile))
    assert max(map(len, profile_lines(profile))) < 500
