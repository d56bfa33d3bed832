"""The machine's probe: what it chooses, what it remembers, and that it never stands in the way."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import linear

from proximo.api import threads
from proximo.api.threads import num_parameters, suit_machine
from proximo.models import tiny_model
from proximo.runs.log import RunLog
from proximo.system import machine
from proximo.system.machine import (
    CAUTIOUS,
    FEW_ROWS,
    LARGE,
    SMALL,
    Machine,
    Readings,
    loses_onednn,
    machine_for,
    measure,
    readings,
    side_by_side,
)

FOUND = Readings(Machine(1, True), Machine(8, False), {"float32": 100.0, "bfloat16": 0.5})


@dataclass
class Watch:
    """A clock that moves, each time it is read, by what torch as it stands takes for the work."""

    seconds: Callable[[Machine], float]
    now: float = 0.0

    def __call__(self):
        self.now += self.seconds(Machine.current())
        return self.now


@pytest.fixture(autouse=True)
def torch_left_alone(monkeypatch):
    """With oneDNN, whether or not this processor would lose it."""
    before = Machine.current()
    torch.backends.mkldnn.set_flags(True)
    monkeypatch.setattr(machine, "loses_onednn", lambda: False)
    yield
    before.apply()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path / "proximo" / "machine.json"


def with_margin(machine):
    return 0.1 if machine.onednn else 0.07


def without_margin(machine):
    return 0.1 if machine.onednn else 0.09


def only_on_one_thread(machine):
    return 0.1 if machine.onednn or machine.threads > 1 else 0.07


@pytest.mark.parametrize(
    ("seconds", "most", "chosen"),
    [
        (lambda machine: 0.1, 8, Machine(1, True)),
        (lambda machine: 0.1 / machine.threads, 1, Machine(1, True)),
        (lambda machine: 0.1 / machine.threads, 8, Machine(8, True)),
        (lambda machine: 0.1 / machine.threads, 7, Machine(7, True)),
        # Half as much again is asked of twice the threads: √2 is too little, and then no more are tried.
        (lambda machine: 0.1 / machine.threads**0.5, 8, Machine(1, True)),
        (lambda machine: 0.1 / min(machine.threads, 4), 8, Machine(4, True)),
        (lambda machine: 0.1 / {1: 1, 2: 1.4, 4: 4}[machine.threads], 4, Machine(1, True)),
        (with_margin, 2, Machine(1, False)),
        (without_margin, 2, Machine(1, True)),
        (lambda machine: with_margin(machine) / machine.threads, 4, Machine(4, False)),
        (only_on_one_thread, 4, Machine(1, False)),
    ],
)
def test_each_step_away_from_the_plain_choice_must_pay(seconds, most, chosen):
    assert machine._fastest(SMALL, most, Watch(seconds), linear) == chosen


def test_products_of_few_rows_decide_as_much_as_those_of_many(monkeypatch):
    """Of one processor: without oneDNN twice as fast with 32 rows, and no slower with 512, which take longer."""
    times = {(32, True): 0.002, (32, False): 0.001, (512, True): 0.02, (512, False): 0.02}
    monkeypatch.setattr(machine, "_seconds", lambda shape, *_: times[shape[0], Machine.current().onednn])
    assert machine._fastest(LARGE, 1, lambda: 0.0, linear) == Machine(1, False)


def test_a_reading_is_the_shortest_of_several():
    times = iter([1.0, 1.0, 1.04, 1.04, 1.055, 1.055, 1.085])  # 40, 15 and 30 ms, until 60 ms are over
    assert machine._seconds((2, 2, 2), torch.float32, lambda: next(times), linear) == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("half", "speed"),
    [
        # 6 · 16 · 576 · 576 operations in a second: hopeless, and not tried with more.
        ({CAUTIOUS: 1.0}, 6e-9 * 16 * 576**2),
        ({CAUTIOUS: 1e-4, LARGE[1]: 0.02}, 6e-9 * 512 * 576 * 1536 * 50),
    ],
)
def test_small_and_large_models_have_their_own_choice_and_torch_is_left_as_it_was(monkeypatch, half, speed):
    def seconds(shape, dtype, clock, product):
        if dtype == torch.bfloat16:
            return half[shape]
        return 0.001 if shape in SMALL else 0.1 / Machine.current().threads

    monkeypatch.setattr(machine, "_seconds", seconds)
    monkeypatch.setattr(machine, "THREADS", 4)
    torch.set_num_threads(4)
    found = measure()
    assert found.small == Machine(1, True)
    assert found.large == Machine(4, True)
    # 6 · 512 · 576 · 1536 operations of an update's MLP in a fortieth of a second.
    assert found.speeds == pytest.approx({"float32": 6e-9 * 512 * 576 * 1536 * 40, "bfloat16": speed})
    assert Machine.current() == Machine(4, True)


def test_a_probe_that_is_interrupted_leaves_torch_as_it_was():
    torch.set_num_threads(3)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(interrupted)
    assert Machine.current() == Machine(3, True)


@pytest.mark.slow("measures speed and memory")
def test_a_real_probe_finishes(monkeypatch):
    monkeypatch.setattr(machine, "THREADS", 1)
    found = measure()
    assert {found.small.threads, found.large.threads} == {1}  # there is one to choose from
    assert min(found.speeds.values()) > 0


def test_half_products_are_measured_without_a_warning_whatever_is_chosen(monkeypatch):
    """Where they have no instructions torch warns, which is an error here, and switches oneDNN off."""
    monkeypatch.setattr(machine, "THREADS", 1)
    monkeypatch.setattr(machine, "_fastest", lambda *_: Machine(1, True))
    before = Machine.current()
    assert min(measure().speeds.values()) > 0
    assert Machine.current() == before


def test_a_choice_that_was_applied_is_not_what_there_is(cache, monkeypatch):
    key = machine._key()
    Machine(3, False).apply()
    assert machine._key() == key


def test_it_is_measured_once_for_each_processor_and_torch(cache, monkeypatch):
    calls = []
    monkeypatch.setattr(machine, "measure", lambda clock: calls.append(clock) or FOUND)
    assert readings() == FOUND
    assert readings() == FOUND
    assert len(calls) == 1
    monkeypatch.setattr(torch, "__version__", "9.0")
    readings()
    assert len(calls) == 2
    monkeypatch.setattr(machine, "_processor", lambda: "another")
    readings()
    assert len(calls) == 3
    assert len(json.loads(cache.read_text())) == 3
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"KEY": 3}', '{"KEY": {"small": {}}}', '{"KEY": {"small": 1}}'])
def test_a_broken_cache_is_measured_again_and_mended(cache, monkeypatch, text):
    monkeypatch.setattr(machine, "measure", lambda clock: FOUND)
    cache.parent.mkdir()
    cache.write_text(text.replace("KEY", machine._key()))
    assert readings() == FOUND
    monkeypatch.setattr(machine, "measure", None)
    assert readings() == FOUND


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(machine, "measure", lambda clock: FOUND)
    assert readings() == FOUND


def test_the_choice_goes_by_the_models_size_and_threads_set_by_hand_stay(cache, monkeypatch):
    monkeypatch.setattr(machine, "measure", lambda clock: FOUND)
    assert machine_for(800_000) == machine_for(0) == FOUND.small
    assert machine_for(135_000_000) == machine_for(None) == FOUND.large
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert machine_for(135_000_000) == Machine(1, False)


@pytest.mark.parametrize("loses", [True, False])
def test_a_machine_that_would_lose_onednn_on_the_way_is_without_it_from_the_start(cache, monkeypatch, loses):
    """torch switches it off for the whole process, and the float32 runs there would change their last digits."""
    monkeypatch.setattr(machine, "readings", lambda: FOUND)
    monkeypatch.setattr(machine, "loses_onednn", loses_onednn)
    monkeypatch.setattr(machine, "settle_half_products", lambda: torch.backends.mkldnn.set_flags(not loses))
    before = Machine.current()
    assert machine_for(1000) == Machine(1, not loses)
    assert machine_for(10**9) == Machine(8, False)
    assert Machine.current() == before


def test_it_is_applied_and_travels_as_json():
    for choice in (Machine(2, False), Machine(1, True)):
        choice.apply()
        assert torch.get_num_threads() == choice.threads
        assert torch.backends.mkldnn.enabled == choice.onednn
        assert Machine.current() == choice
        assert Machine.from_dict(json.loads(json.dumps(choice.to_dict()))) == choice
    with pytest.raises(ValueError, match="threads is 0: "):
        Machine(0, True)


def test_a_run_says_what_it_computed_with(tmp_path):
    Machine(2, False).apply()
    RunLog(tmp_path).start("")
    facts = json.loads((tmp_path / "run.json").read_text())
    assert Machine.from_dict(facts["machine"]) == Machine(2, False)


def test_commands_suit_the_machine_to_their_model(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(machine, "machine_for", lambda parameters: asked.append(parameters) or Machine(2, True))
    model = tiny_model(hidden=8, layers=1, heads=2, kv_heads=1, intermediate=8)
    model.save_pretrained(tmp_path)
    size = sum(weight.numel() for weight in model.parameters())
    assert num_parameters(tmp_path) == size
    for name in (str(tmp_path), None, "nowhere/at-all"):
        suit_machine(name, "cpu")
    assert asked == [size, 0, None]
    assert torch.get_num_threads() == 2
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    suit_machine(str(tmp_path), "cpu")  # loading it will say more
    suit_machine(None, "no such device")
    assert len(asked) == 3


def test_beside_a_gpu_the_host_has_one_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Machine(4, True).apply()
    assert machine.beside_gpu() == Machine(1, True)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert machine.beside_gpu() == Machine(4, True)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "pick_device", lambda name: "cuda")
    suit_machine("nowhere/at-all", "auto")
    assert torch.get_num_threads() == 1
    assert threads.machine_words("nowhere/at-all", "auto") == "cuda, 1 thread of the CPU"


@pytest.mark.parametrize("mkl", [True, False])
@pytest.mark.parametrize("rows", [1, FEW_ROWS[0] - 1, FEW_ROWS[0], FEW_ROWS[-1], FEW_ROWS[-1] + 1])
def test_products_side_by_side_are_those_of_layers(rows, mkl, monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    random = torch.Generator().manual_seed(rows)
    inputs, *weights = (torch.randn(size, 7, generator=random) for size in (rows, 3, 5, 2))
    found = side_by_side(inputs, *weights)
    assert found.is_contiguous()
    torch.testing.assert_close(found, torch.cat([linear(inputs, weight) for weight in weights], dim=1))
    torch.testing.assert_close(side_by_side(inputs, weights[0]), linear(inputs, weights[0]))


@pytest.mark.parametrize(
    ("rows", "mkl", "first"), [(7, True, 7), (8, True, 3), (64, True, 3), (65, True, 65), (8, False, 8)]
)
def test_the_weight_is_on_the_left_where_that_is_faster(rows, mkl, first, monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    seen = []
    monkeypatch.setattr(machine, "linear", lambda inputs, weight: seen.append(len(inputs)) or inputs @ weight.T)
    monkeypatch.setattr(torch, "mm", lambda left, right, out: seen.append(len(left)) or out.copy_(left @ right))
    side_by_side(torch.ones(rows, 7), torch.ones(3, 7))
    assert seen == [first]


def test_large_models_are_measured_with_the_products_that_they_sample_with(monkeypatch):
    seen = set()
    monkeypatch.setattr(machine, "_seconds", lambda shape, dtype, clock, product: seen.add((shape, product)) or 1.0)
    measure()
    assert seen >= {(SMALL[0], linear), (LARGE[0], side_by_side), (LARGE[1], side_by_side)}


def test_other_numbers_are_measured_once_and_again_where_the_cache_is_malformed(cache):
    made: list[str] = []

    def measured(value: object):
        made.append("measured")
        return {"speed": value, "more": 1}

    assert machine.remembered("copies", ("speed",), lambda: measured(3)) == {"speed": 3.0}
    assert machine.remembered("copies", ("speed",), lambda: measured(4)) == {"speed": 3.0}
    assert machine.remembered("products", ("speed",), lambda: measured(5)) == {"speed": 5.0}
    assert made == ["measured"] * 2
    cache.write_text(cache.read_text().replace("3.0", '"fast"'))
    assert machine.remembered("copies", ("speed",), lambda: measured(6)) == {"speed": 6.0}
