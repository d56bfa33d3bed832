"""Grading while sampling goes on: what may overlap, what may not, and that nobody can tell from the results."""

import decimal
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from proximo.algorithms import GRPO
from proximo.losses import KeepAll, KeepMixed
from proximo.models import tiny_model, tiny_tokenizer
from proximo.rewards import ExactMatch, FormatReward, MathVerify, PythonFunction
from proximo.rl.clock import Clock
from proximo.rl.config import EvaluationOptions, RunConfig, TrainingOptions
from proximo.rl.evaluate import evaluate
from proximo.rl.grading import graded
from proximo.rl.mixed_reward import MixedReward, with_reward_models
from proximo.rl.progress import ProgressLines
from proximo.rl.reward_config import RewardMix, WeightedRule
from proximo.rl.rollouts import Collector
from proximo.rl.run import Run
from proximo.rl.train import train
from proximo.runs.records import Collected, DataCursor
from proximo.samplers.embedded import local_sampler
from proximo.samplers.sampler import Sampler, SamplingOptions
from proximo.tasks import Arithmetic, Countdown, Echo, File, Gym, Sorting, Task
from proximo.types import Completion, Grade, Problem, Request

TOKENIZER = tiny_tokenizer()
SOON = 20.0
"""Seconds that nothing here takes: whoever waits so long waits for ever."""


@dataclass
class Script:
    """A task and a sampler that write down what happens, and wait for each other where told to."""

    while_sampling: bool = True
    order: Callable[[int], list[int]] = lambda count: list(range(count))
    """In which the sampler's requests end."""
    before: dict[str, str] = field(default_factory=dict)
    """What has to have happened before something may happen."""
    breaks: dict[str, BaseException] = field(default_factory=dict)
    """What is raised instead of something."""
    events: list[str] = field(default_factory=list)
    calls: list[tuple[list[str], threading.Thread]] = field(default_factory=list)
    """The completions of each call of the grader, and its thread."""
    happened: threading.Condition = field(default_factory=threading.Condition)

    def happens(self, event: str) -> None:
        with self.happened:
            if event in self.before:
                assert self.happened.wait_for(lambda: self.before[event] in self.events, SOON), f"{event} waits"
            if event in self.breaks:
                raise self.breaks[event]
            self.events.append(event)
            self.happened.notify_all()

    # As a sampler

    repeats = True

    def refresh(self, policy, version: int) -> int:
        return version

    def stream(
        self, requests: Sequence[Request], options: SamplingOptions, *, seed: int, step: int, version: int = 0
    ) -> Iterator[tuple[int, tuple[Completion, ...]]]:
        for number in self.order(len(requests)):
            self.happens(f"sampled {number}")
            said = [f"{number}.{sample}" for sample in range(requests[number].num_samples)]
            yield number, tuple(Completion((7,), (-0.1,), text, "stop", version) for text in said)

    # As a task

    def size(self, split) -> int | None:
        return None

    def problem(self, index: int, split, seed: int) -> Problem:
        return Problem(str(index), f"{index}=", str(index))

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        said = [completion.text for completion in completions]
        self.calls.append((said, threading.current_thread()))
        self.happens(f"grading {problems[0].id}")
        assert [problem.id for problem in problems] == [text.partition(".")[0] for text in said]
        self.happens(f"graded {problems[0].id}")
        return [Grade(float(text)) for text in said]

    def reference(self, problem: Problem) -> str | None:
        return None


def collect(script: Script, groups: int = 3) -> Collected:
    options = TrainingOptions(groups=groups, group_size=2, minibatches=1)
    collector = Collector(script, script, TOKENIZER, SamplingOptions(), options, KeepAll(), seed=0)
    return collector.collect(DataCursor(), step=0, version=0)


def grader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "grader"]


# Overlap


def test_a_group_is_graded_while_others_are_sampled_and_the_sampler_does_not_wait_for_it():
    # Each waits for the other: group 1 ends after group 0 is graded, and is being graded itself when group 2 ends.
    script = Script(before={"sampled 1": "graded 0", "sampled 2": "grading 1", "graded 1": "sampled 2"})
    collected = collect(script)
    first, second, third = (["sampled 0", "grading 0", "graded 0"], ["sampled 1", "grading 1"], ["sampled 2"])
    assert script.events == [*first, *second, *third, "graded 1", "grading 2", "graded 2"]
    assert collected.outcomes() == [0.0, 0.1, 1.0, 1.1, 2.0, 2.1]
    # One group a call, on one thread that is not ours and that is gone.
    assert [said for said, _ in script.calls] == [["0.0", "0.1"], ["1.0", "1.1"], ["2.0", "2.1"]]
    threads = {thread for _, thread in script.calls}
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    assert grader_threads() == []


def test_a_task_that_wants_everything_at_once_gets_it_when_sampling_has_ended():
    script = Script(while_sampling=False, order=lambda count: [2, 0, 1])
    collected = collect(script)
    assert script.events == ["sampled 2", "sampled 0", "sampled 1", "grading 0", "graded 0"]
    assert script.calls == [(["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"], threading.current_thread())]
    assert collected.outcomes() == [0.0, 0.1, 1.0, 1.1, 2.0, 2.1]


def test_groups_that_end_in_reverse_come_back_in_order():
    script = Script(order=lambda count: list(reversed(range(count))), before={"sampled 0": "graded 1"})
    collected = collect(script)
    assert [group.problem.id for group in collected.groups] == ["0", "1", "2"]
    assert collected.outcomes() == [0.0, 0.1, 1.0, 1.1, 2.0, 2.1]
    assert [said[0] for said, _ in script.calls] == ["2.0", "1.0", "0.0"]


def test_groups_that_are_graded_on_several_threads_wait_together():
    """One that waits for its grade, such as for a judge, lets the others begin."""
    both, lock = threading.Barrier(2), threading.Lock()

    class Waits(Echo):
        def begin(self, problems, completions):
            assert lock.locked()
            return lambda: [Grade(float(both.wait(SOON)))] * len(completions)

    script = Script()
    collector = Collector(
        task=Waits(),
        sampler=script,
        tokenizer=TOKENIZER,
        sampling=SamplingOptions(max_tokens=4),
        training=TrainingOptions(groups=2, group_size=2, minibatches=1),
        keep=KeepAll(),
        seed=0,
    )
    found: dict[int, float] = {}

    def grade(ordinal: int) -> None:
        group = collector.group(ordinal, Problem("0", "1+1=", "2"), step=0, version=0, grading=lock)
        found[ordinal] = group.rollouts[0].grade.outcome

    threads = [threading.Thread(target=grade, args=(ordinal,), daemon=True) for ordinal in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON)
    assert sorted(found.values()) == [0.0, 1.0]


def test_evaluation_overlaps_too_and_keeps_its_order():
    script = Script(order=lambda count: list(reversed(range(count))), before={"sampled 0": "graded 1"})
    result, answered = evaluate(
        script, script, TOKENIZER, SamplingOptions(), EvaluationOptions(problems=3, samples=0), seed=0
    )
    assert [(answer.problem.id, answer.completion.text, answer.outcome) for answer in answered] == [
        ("0", "0.0", 0.0),
        ("1", "1.0", 1.0),
        ("2", "2.0", 2.0),
    ]
    assert result.accuracy == pytest.approx(2 / 3)


def test_the_time_for_grades_is_counted_only_when_all_is_sampled(monkeypatch):
    @dataclass
    class Slow(Script):
        """Each call of the grader takes 5 seconds."""

        now: float = 100.0

        def happens(self, event: str) -> None:
            super().happens(event)
            self.now += 5 * event.startswith("grading")

        def perf_counter(self) -> float:
            now = self.now
            self.happens("clock read")
            return now

    # Groups 0 and 1 are graded while others are sampled; 2 begins when the stream has ended.
    along = Slow(before={"sampled 1": "graded 0", "sampled 2": "graded 1", "grading 2": "clock read"})
    for script in (along, Slow(while_sampling=False)):
        monkeypatch.setattr("proximo.rl.grading.time", script)
        assert collect(script).grading_seconds == 5.0


# Failures


def test_what_a_grader_raises_ends_the_step_with_it():
    script = Script(breaks={"graded 1": ZeroDivisionError("of the task")})
    with pytest.raises(ZeroDivisionError, match="of the task"):
        collect(script)
    assert [said[0] for said, _ in script.calls] == ["0.0", "1.0"]  # and nothing after it
    assert grader_threads() == []


def test_an_interrupt_does_not_wait_for_the_grader_which_then_leaves():
    # Ctrl-C while group 0 is being graded; group 1 waits to be.
    script = Script(before={"sampled 1": "grading 0", "graded 0": "the end"}, breaks={"sampled 2": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        collect(script)
    [thread] = grader_threads()
    assert thread.daemon  # so that it could not keep the program alive either
    script.happens("the end")
    thread.join(SOON)
    assert grader_threads() == []
    assert [said[0] for said, _ in script.calls] == ["0.0"]


def test_a_task_with_too_few_verdicts_is_found():
    @dataclass
    class Short(Script):
        def grade(self, problems, completions):
            return super().grade(problems, completions)[:-1]

    for while_sampling in (True, False):
        with pytest.raises(ValueError, match="zip"):
            collect(Short(while_sampling=while_sampling))


def test_a_reward_function_that_breaks_costs_its_completion_and_not_the_step(tmp_path, grading):
    path = tmp_path / "picky.py"
    path.write_text(
        "def picky(completions, **_):\n"
        "    if '2.1' in completions:\n"
        "        raise KeyError('two')\n"
        "    return [float(text) for text in completions]\n"
    )

    @dataclass
    class WithFunction(Script):
        def grade(self, problems, completions):
            function = PythonFunction(f"{path}:picky")
            return [Grade(outcome) for outcome in function(problems, completions)]

    outcomes = collect(WithFunction()).outcomes()
    assert outcomes[:5] == [0.0, 0.1, 1.0, 1.1, 2.0]
    assert math.isnan(outcomes[5])
    assert [(failures.kind, failures.unscored) for failures in grading.failures.take()] == [("KeyError", 1)]


# Results that do not depend on it


@dataclass(frozen=True)
class Echoes(Echo):
    """Graded with everything that could differ on another thread."""

    while_sampling: bool = True

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Grade]:
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == torch.float32
        share = float(decimal.Decimal(1) / decimal.Decimal(3))  # of the caller's precision
        return [Grade(share + len(said.text)) for said in completions]


@pytest.mark.slow("trains several runs")
@pytest.mark.parametrize("attention", ["ours", "sdpa"])
@pytest.mark.parametrize("keep", [KeepAll(), KeepMixed()])
@pytest.mark.usefixtures("ordinary_precision")
def test_along_and_after_are_the_same_to_the_last_bit(attention, keep):
    model = tiny_model(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, seed=1)
    if attention == "sdpa":
        model.set_attn_implementation("sdpa")
    sampler = local_sampler(model, TOKENIZER, slots=5)
    options = TrainingOptions(groups=4, group_size=3, minibatches=1)
    found = []
    with decimal.localcontext(prec=3):
        for while_sampling in (True, False):
            task = Echoes(while_sampling=while_sampling)
            collector = Collector(task, sampler, TOKENIZER, SamplingOptions(max_tokens=9), options, keep, seed=3)
            first = collector.collect(DataCursor(), step=0, version=0)
            found.append((first, collector.collect(first.cursor, step=1, version=0)))
            found[-1] += evaluate(
                task, sampler, TOKENIZER, collector.sampling, EvaluationOptions(problems=4, samples=2), seed=0
            )
    assert found[0] == found[1]
    assert found[0][0].outcomes()[0] % 1 != 0


def test_random_numbers_of_a_grader_repeat():
    @dataclass
    class Coins(Script):
        def grade(self, problems, completions):
            return [Grade(float(torch.rand(()))) for _ in super().grade(problems, completions)]

    outcomes = []
    slow_sampler, slow_grader = {"sampled 2": "graded 1", "sampled 0": "graded 2"}, {"grading 1": "sampled 0"}
    for before in (slow_sampler, slow_grader):
        torch.manual_seed(0)
        outcomes.append(collect(Coins(before=before, order=lambda count: [1, 2, 0])).outcomes())
    assert outcomes[0] == outcomes[1]
    assert len(set(outcomes[0])) == 6


# Who may


def test_who_may_be_graded_while_sampling_goes_on(tmp_path):
    for task in (Arithmetic(), Countdown(), Echo(), Sorting(), Gym("chain_sum"), File("a.jsonl", reward=None)):
        assert isinstance(task, Task)
        assert task.while_sampling
    for reward in (ExactMatch(), FormatReward("a"), MathVerify(), PythonFunction("a.b:c")):
        assert File("a.jsonl", reward=reward).while_sampling
        mix = RewardMix(rules=(WeightedRule(FormatReward("b")), WeightedRule(reward)))
        assert with_reward_models(Echo(), mix, TOKENIZER).while_sampling
    mix = RewardMix(rules=(WeightedRule(FormatReward("b")),))
    assert not with_reward_models(Script(while_sampling=False), mix, TOKENIZER).while_sampling


def test_a_mixed_reward_that_may_not_is_asked_once():
    calls: list[int] = []

    def model(problems: Sequence[Problem], completions: Sequence[Completion]) -> Callable[[], list[float]]:
        calls.append(len(completions))
        return lambda: [float(completion.text) for completion in completions]

    def outcomes(while_sampling: bool) -> list[float]:
        script = Script(order=lambda count: [1, 0])
        task = MixedReward(script, 0.0, {"model": (2.0, model)}, while_sampling)
        problems = [script.problem(index, "train", 0) for index in range(2)]
        requests = [Request(key, (5,), 2) for key in range(2)]
        found = graded(task, problems, script.stream(requests, SamplingOptions(), seed=0, step=0))
        return [rollout.grade.reward for siblings in found.rollouts for rollout in siblings]

    assert outcomes(False) == [0.0, 0.2, 2.0, 2.2]
    assert calls == [4]
    assert outcomes(True) == [0.0, 0.2, 2.0, 2.2]
    assert calls == [4, 2, 2]


# The clock


def test_the_clock_counts_no_second_twice():
    clock = Clock({"rollout": 5.0})
    clock.split("rollout", "grade", 1.5)
    assert clock.seconds == {"rollout": 3.5, "grade": 1.5}


@pytest.mark.usefixtures("ordinary_precision")
def test_a_step_says_how_long_it_waited_for_grades(tmp_path):
    config = RunConfig(
        algorithm=GRPO,
        task=Arithmetic(),
        model="tiny-arithmetic",
        sampling=SamplingOptions(max_tokens=4),
        training=TrainingOptions(groups=2, group_size=2, minibatches=1),
        evaluation=EvaluationOptions(problems=2, samples=0),
        steps=1,
    )
    train(Run(config, tmp_path, ProgressLines()))
    [row] = [json.loads(line) for line in (tmp_path / "timings.jsonl").read_text().splitlines()]
    assert row["grade"] > 0
    assert row["rollout"] > 0
    assert "grade" not in (tmp_path / "metrics.jsonl").read_text()


def test_the_fakes_are_what_they_play():
    assert isinstance(Script(), Task)
    assert isinstance(Script(), Sampler)


def test_what_a_task_has_raised_stops_the_sampling_too():
    class Broken(Echo):
        def grade(self, problems, completions):
            raise RuntimeError("the grader is broken")

    given = []

    def stream():
        for number in range(9):
            given.append(number)
            yield number, (Completion((1,), (0.0,), "", "stop"),)
            for thread in threading.enumerate():  # by now it has raised, so its thread ends
                if thread.name == "grader":
                    thread.join(SOON)

    with pytest.raises(RuntimeError, match="the grader is broken"):
        graded(Broken(), [Broken().problem(0, "train", 0)] * 9, stream())
    assert given == [0, 1]
