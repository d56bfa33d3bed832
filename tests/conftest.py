import faulthandler
import gc
import os
import resource
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from proximo.rewards.grading import Grading

SLOW = 2.0
"""Seconds from which on a test without the marker is shown at the end."""
pytest_plugins = ["tests.insight.page.browser", "tests.small_models"]


def pytest_configure(config: pytest.Config) -> None:
    """Only where tests run: the process that hands them out to others imports nothing, and starts those sooner."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    # A process that seems to hang says where it is: kill -USR1. Output is not captured yet, and goes where errors go.
    faulthandler.register(signal.SIGUSR1, os.dup(sys.stderr.fileno()), all_threads=True)
    gc.disable()  # until all is imported
    import torch
    from hypothesis import HealthCheck, settings

    from tests import shape_checks

    shape_checks.install()
    # One thread: the tensors are tiny, and parallel test processes would fight for the cores.
    torch.set_num_threads(1)
    # Where products in bf16 switch oneDNN off for the whole process, that is so before the first test.
    from proximo.system.machine import settle_half_products

    settle_half_products()
    # Exactness is judged in float64; tests of float32 and bf16 say so.
    torch.set_default_dtype(torch.float64)
    # No deadline: a busy machine is not a bug. Examples are the same in every run, so a red test stays red.
    busy = (HealthCheck.too_slow,)  # counts seconds, too
    settings.register_profile("house", deadline=None, derandomize=True, max_examples=60, suppress_health_check=busy)
    settings.load_profile("house")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test says why it is: before tests are chosen by their markers, so that none is forgotten."""
    bare = {each.nodeid for each in items for mark in each.iter_markers("slow") if not _says_why(mark)}
    if bare:
        raise pytest.UsageError(f'a slow test says why, `@pytest.mark.slow("starts a browser")`: {", ".join(bare)}')


def _says_why(mark: pytest.Mark) -> bool:
    return len(mark.args) == 1 and isinstance(mark.args[0], str) and " " in mark.args[0] and not mark.kwargs


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The slowest tests without the marker, so that `make test` stays fast; no test fails by a clock."""
    seconds = defaultdict[str, float](float)
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if isinstance(report, pytest.TestReport) and not {"slow", "scale", "gpu"} & report.keywords.keys():
            seconds[report.nodeid] += report.duration
    slowest = [(name, each) for name, each in sorted(seconds.items(), key=lambda item: -item[1])[:20] if each > SLOW]
    if slowest:
        terminalreporter.section(f"over {SLOW:g} s, and not marked as slow")
        for name, each in slowest:
            terminalreporter.write_line(f"{each:6.1f} s  {name}")


def pytest_collection_finish() -> None:
    """What is imported and collected stays to the end: the garbage collector need not look at it again and again."""
    gc.enable()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Processes are forked from what this one is before its first test."""
    if "tests.run_processes" in sys.modules:
        sys.modules["tests.run_processes"].start_server()


@pytest.fixture(scope="session", autouse=True)
def machine_unmeasured() -> Iterator[None]:
    """Commands do not measure the machine; for the whole session, so that fixtures of modules compute as tests do."""
    from proximo.system import machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "machine_for", lambda parameters: machine.Machine.current())
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_remembered_for_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests run is remembered in a data folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROXIMO_DATA_HOME", str(tmp_path_factory.mktemp("data-home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def nobody_is_told() -> Iterator[None]:
    """Runs of tests do not end on the phone of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PROXIMO_NOTIFY", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def disks_are_not_waited_for() -> Iterator[None]:
    """No test cuts the power, and a small run would wait for its disk thirty times, as long as it computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which needs an open file as well
        yield


@pytest.fixture(autouse=True)
def machine_as_it_stands() -> Iterator[None]:
    """A test that changes the machine's threads does so for itself alone."""
    from proximo.system import machine

    before = machine.Machine.current()
    yield
    if machine.Machine.current() != before:
        before.apply()


@pytest.fixture(autouse=True)
def memory_as_it_stands() -> Iterator[None]:
    """No test leaves a limit of memory to those after it, nor to the processes that they start."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    after = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, before)
    assert after == before, "a limit of memory is left"


@pytest.fixture
def grading() -> Iterator["Grading"]:
    """What a run gives to its graders, for tests that call them directly."""
    from proximo.rewards.grading import Grading

    with Grading().active() as active:
        yield active
    active.close()


@pytest.fixture(scope="module")
def module_grading() -> Iterator["Grading"]:
    from proximo.rewards.grading import Grading

    made = Grading()
    yield made
    made.close()


@pytest.fixture
def kept_grading(module_grading: "Grading") -> Iterator["Grading"]:
    """`grading`, with workers that the tests of a file share: one that imports a large package starts once."""
    with module_grading.active():
        yield module_grading


@pytest.fixture
def ordinary_precision() -> Iterator[None]:
    """float32, as a run has it."""
    import torch

    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def signals_are_heard() -> Iterator[None]:
    """A shell's background jobs ignore SIGINT, and so would tests that a script started."""
    from proximo.runs.signals import SIGNALS

    before = {each: signal.getsignal(each) for each in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)
