"""Profiles of a run's steps: what is measured adds up, and nothing that is trained or written changes."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from proximo.algorithms import GRPO
from proximo.losses import EntropyBonus
from proximo.models import tiny_model, tiny_tokenizer
from proximo.rl import phase_marks, tracing
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.phase_marks import PhaseMarks, PhaseSpan
from proximo.rl.profiling import Profiler
from proximo.rl.progress import ProgressLines
from proximo.rl.run import Run
from proximo.rl.tracing import StepTrace, TracedEvent, Tracer, trace_file
from proximo.rl.train import train
from proximo.runs.log import RunLog
from proximo.runs.step_profile import profile_lines, read_profile
from proximo.samplers.sampler import SamplingOptions
from proximo.system.phases import is_watched, phase, watched
from proximo.tasks.echo import Echo

CPU = torch.device("cpu")

# Marks and traces


def test_spans_add_up_to_the_wall_time_and_the_innermost_phase_has_them():
    marks = PhaseMarks(CPU)
    with watched(marks):
        for _ in range(2):
            with phase("rollout"), phase("decoding"):
                pass
    spans = marks.end()
    assert sum(span.seconds for span in spans) == pytest.approx(spans[-1].start + spans[-1].seconds, abs=1e-9)
    assert [span.path for span in spans if span.path] == [("rollout",), ("rollout", "decoding"), ("rollout",)] * 2
    assert marks.times == {("rollout",): 2, ("rollout", "decoding"): 2}


class FakeEvent:
    """Event of a stream whose clock is set by the test; recording waits for nothing."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1000 * (later.at - self.at)


def test_on_a_gpu_the_stream_says_how_long_a_phase_took(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(FakeEvent.now))
    marks = PhaseMarks(torch.device("cuda"))
    with marks.phase("update"):
        with marks.phase("forward"):
            FakeEvent.now = 2.0
        FakeEvent.now = 2.5
        with marks.phase("backward"):
            FakeEvent.now = 6.5
    spans = marks.end()
    seconds = {span.path: 0.0 for span in spans}
    for span in spans:
        seconds[span.path] += span.seconds
    assert seconds["update", "forward"] == pytest.approx(2.0)
    assert seconds["update", "backward"] == pytest.approx(4.0)
    assert seconds["update",] == pytest.approx(0.5)
    assert waits == [0.0, 6.5], "nothing waits inside of the step"


def event(name: str, start: float, seconds: float, lane: int = 7, kind: str = "CUDA"):
    """As torch's profiler gives it, of a step that began at second 100."""
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: round(1e9 * (100 + start)),
        duration_ns=lambda: round(1e9 * seconds),
        device_type=lambda: SimpleNamespace(name=kind),
        device_resource_id=lambda: lane,
        start_thread_id=lambda: lane,
        is_user_annotation=lambda: name == "ProfilerStep",
    )


def traced(device: str, events: list, spans: list[PhaseSpan]) -> tuple[StepTrace, Tracer]:
    tracer = Tracer(torch.device(device))
    results = SimpleNamespace(events=lambda: events)
    tracer._profile = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))  # type: ignore[assignment]
    return tracer.read(round(100e9), spans), tracer


def span(path: tuple[str, ...], start: float, seconds: float) -> PhaseSpan:
    return PhaseSpan(path, start, seconds, start, seconds)


def test_kernels_belong_to_the_phase_in_which_they_ran():
    spans = [span(("rollout", "decoding"), 0.0, 2.0), span(("update",), 2.0, 2.0), span((), 4.0, 1.0)]
    kernels = [event("gemm", 0.0, 0.5), event("gemm", 0.25, 0.5), event("adam", 3.0, 1.0), event("ProfilerStep", 0, 5)]
    trace, tracer = traced("cuda", [*kernels, event("launch", 0.0, 5.0, kind="CPU")], spans)
    assert trace.busy == {("rollout", "decoding"): 0.375, ("update",): 0.5, (): 0.0}, "what overlaps counts once"
    assert [(each.name, each.phase, each.seconds, each.times) for each in trace.longest()] == [
        ("gemm", "rollout / decoding", 1.0, 2),
        ("adam", "update", 1.0, 1),
    ]
    assert tracer.remark == ""


def test_a_trace_that_was_cut_off_says_nothing_of_what_came_later():
    spans = [span(("rollout",), 0.0, 2.0), span(("update",), 2.0, 8.0)]
    trace, _ = traced("cuda", [event("gemm", 0.0, 2.5)], spans)
    assert list(trace.busy) == [("rollout",)]


def test_a_gpu_on_which_nothing_is_seen_is_remarked():
    trace, tracer = traced("cuda", [], [span((), 0.0, 1.0)])
    assert not trace.busy
    assert "no kernel" in tracer.remark


def test_operations_count_without_those_that_they_call():
    spans = [span(("update",), 0.0, 10.0)]
    operations = [("linear", 0.0, 4.0), ("addmm", 1.0, 2.0), ("sum", 5.0, 1.0), ("other", 0.5, 0.25)]
    events = [event(*each, lane=2 if each[0] == "other" else 1, kind="CPU") for each in operations]
    trace, _ = traced("cpu", events, spans)
    assert {each.name: each.seconds for each in trace.longest()} == {
        "linear": 2.0,
        "addmm": 2.0,
        "sum": 1.0,
        "other": 0.25,
    }
    assert trace.busy == {}


def test_of_too_many_events_the_longest_are_kept(monkeypatch):
    monkeypatch.setattr(tracing, "MAX_EVENTS", 3)
    events = [TracedEvent(f"k{number}", number, number / 10, 7, on_gpu=True) for number in range(8)]
    content = json.loads(gzip.decompress(trace_file(StepTrace(events), [span((), 0.0, 9.0)], torch.device("cuda"))))
    kept = [each["name"] for each in content["traceEvents"] if each["ph"] == "X"]
    assert sorted(kept) == ["k7", "rest", "rest"]
    assert content["otherData"] == {"left out": 7}


def test_a_profile_of_a_gpu_has_its_streams_seconds_the_hosts_and_the_share_that_computed(monkeypatch, tmp_path):
    wall = SimpleNamespace(time_ns=lambda: 100_000_000_000, perf_counter=lambda: FakeEvent.now)
    monkeypatch.setattr(phase_marks, "time", wall)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kernels = SimpleNamespace(events=lambda: [event("gemm", 1.0, 0.5), event("adam", 3.5, 0.5)])
    fake = SimpleNamespace(start=lambda: None, stop=lambda: None, profiler=SimpleNamespace(kineto_results=kernels))
    monkeypatch.setattr(tracing, "profile", lambda activities: fake)
    profiler, log = Profiler(2, torch.device("cuda")), RunLog(tmp_path)
    for step in range(1, 8):
        FakeEvent.now = 0.0
        profiler.begin(step)
        with phase("update"), phase("forward"):
            FakeEvent.now = 2.0
        with phase("update"), phase("optimizer"):
            FakeEvent.now = 4.0 if step == 5 else 4.5
        profiler.end(log)
    profiler.close(log)
    profile = read_profile(tmp_path)
    assert profile is not None
    assert (profile.steps, profile.traced, profile.seconds) == ((3, 4), 5, 4.5)
    assert {each.path: each.busy for each in profile.phases if each.seconds} == {
        ("update", "forward"): 0.25,
        ("update", "optimizer"): 0.25,
    }
    table = {line[:42].strip(): line[42:].split() for line in profile_lines(profile)[1:5]}
    assert table["a step"] == ["seconds", "share", "times", "host", "s", "busy"]
    assert table["forward"] == ["2.0000", "44.4%", "1", "2.0000", "25%"]
    assert (tmp_path / "trace.json.gz").exists()


def test_where_torch_cannot_trace_the_run_goes_on(monkeypatch):
    def refuse(**_: object):
        raise RuntimeError("CUPTI is\nnot here")

    monkeypatch.setattr(tracing, "profile", refuse)
    with Tracer(CPU) as tracer:
        pass
    assert tracer.read(0, [span((), 0.0, 1.0)]) == StepTrace()
    assert tracer.remark.startswith("torch's profiler does not work here: CUPTI is")


# Runs

RUNS = pytest.mark.slow("trains whole runs")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return RunConfig(
        algorithm=replace(GRPO, extra=EntropyBonus()),  # so that something is trained, whatever is sampled
        task=Echo(held_out=8),
        model=str(folder),
        steps=5,
        training=TrainingOptions(groups=2, group_size=3, minibatches=2, learning_rate=1e-3),
        sampling=SamplingOptions(max_tokens=4),
        evaluation=EvaluationOptions(problems=4, every=3),
        device="cpu",
    )


def run_in(folder: Path, config: RunConfig, **more) -> Run:
    run = Run(config, folder, ProgressLines(), profile=more.pop("profile", 0))
    train(run, **more)
    return run


@pytest.fixture(scope="module")
def folders(config, tmp_path_factory) -> tuple[Path, Path]:
    """A run with a profile of two steps, and one without."""
    profiled, plain = (tmp_path_factory.mktemp(name) / "run" for name in ("profiled", "plain"))
    run_in(profiled, config, profile=2)
    run_in(plain, config)
    return profiled, plain


@RUNS
def test_a_profile_changes_no_number_and_no_weight(folders):
    profiled, plain = folders
    names = ["metrics.jsonl", "ledger.jsonl", *(f"rollouts/step-{step:06d}.parquet" for step in range(1, 6))]
    names += [str(path.relative_to(plain)) for path in plain.glob("checkpoints/*/**/*.safetensors")]
    assert len(names) > 8
    assert [name for name in names if (plain / name).read_bytes() != (profiled / name).read_bytes()] == []
    assert {path.name for path in profiled.iterdir()} - {path.name for path in plain.iterdir()} == {
        "profile.json",
        "trace.json.gz",
    }


@RUNS
def test_the_third_step_and_the_next_are_measured_and_then_one_is_traced(folders):
    profile = read_profile(folders[0])
    assert profile is not None
    assert (profile.steps, profile.traced, profile.remark, profile.device) == ((3, 4), 5, "", "cpu")
    assert profile.passes == "the learner's passes have at most 16,384 tokens"
    times = {each.path: each.times for each in profile.phases}
    assert times["update", "backward"] == 2, "one for each minibatch"
    assert times["evaluate",] == 0.5, "after the third step, at the beginning of the fourth"
    names = {each.path[-1] for each in profile.phases if each.path}
    assert names >= {"admission", "prefill", "decoding", "head and draw", "looks at the host", "packing", "layers"}
    assert names >= {"head", "loss", "backward", "optimizer", "weights", "write", "save", "evaluate", "push"}
    assert all(each.seconds >= 0 for each in profile.phases)
    assert profile.kernels
    assert all(each.seconds > 0 for each in profile.kernels)


@RUNS
def test_the_trace_is_one_that_perfetto_reads(folders):
    content = json.loads(gzip.decompress((folders[0] / "trace.json.gz").read_bytes()))
    events = [each for each in content["traceEvents"] if each["ph"] == "X"]
    assert {"ts", "dur", "pid", "tid", "name"} <= set(events[0])
    assert any(each["name"] == "update / backward" for each in events)
    assert any(each["name"] == "aten::mm" for each in events)


@RUNS
def test_the_seconds_are_those_of_the_steps(folders):
    """Nothing hidden: the phases of a measured step take what the log says that they took."""
    profile, rows = read_profile(folders[0]), (folders[0] / "timings.jsonl").read_text().splitlines()
    logged = {row["step"]: row for row in map(json.loads, rows)}
    assert profile is not None
    for name in ("rollout", "assemble", "update"):
        measured = sum(each.seconds for each in profile.phases if each.path[:1] == (name,))
        clocked = [logged[step][name] + (logged[step]["grade"] if name == "rollout" else 0) for step in profile.steps]
        # The phase lies inside of what the log measures; on a busy machine something may come between the two clocks.
        assert 0.5 * sum(clocked) / 2 <= measured <= sum(clocked) / 2 + 1e-4


@RUNS
def test_a_run_that_ends_early_has_what_was_measured(config, tmp_path):
    done = []
    run_in(tmp_path / "run", config, profile=20, ends=lambda: done.append(1) or len(done) == 4)
    profile = read_profile(tmp_path / "run")
    assert profile is not None
    assert profile.steps == (3, 4)
    assert "ended before" in profile.remark
    assert not (tmp_path / "run" / "trace.json.gz").exists()


@RUNS
def test_an_error_in_a_measured_step_leaves_nothing_behind(config, tmp_path, monkeypatch):
    run = Run(config, tmp_path / "run", ProgressLines(), profile=1)
    report, numbers = run.monitor.after_step, []

    def fail(number: int, *more: object) -> None:
        numbers.append(number)
        if number == 4:
            raise KeyError("a fault of this test")
        report(number, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(run.monitor, "after_step", fail)
    with pytest.raises(KeyError):
        train(run)
    assert numbers == [1, 2, 3, 4]
    assert not is_watched()
    profile = read_profile(tmp_path / "run")
    assert profile is not None
    assert profile.steps == (3,)
    assert profile.traced is None


@RUNS
def test_a_short_run_is_not_measured(config, tmp_path):
    run_in(tmp_path / "run", replace(config, steps=2), profile=3)
    assert not (tmp_path / "run" / "profile.json").exists()
