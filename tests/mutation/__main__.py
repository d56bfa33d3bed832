"""Plant each fault in a copy of the sources, run the tests, and say which one caught it.

make mutation        (about half an hour on two cores; prints a table for docs/log.md)
python -m tests.mutation pairwise "own layers"      (some of them)
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mutation.faults import FAULTS as LOSS_FAULTS
from tests.mutation.faults import Fault
from tests.mutation.training_faults import TRAINING_FAULTS

FAULTS = (*LOSS_FAULTS, *TRAINING_FAULTS)
SECONDS = 900
"""Time in which all tests end, on two cores with another fault beside."""
ROOT = Path(__file__).resolve().parents[2]
# Values before laws: they are quicker, and they name the piece that broke.
ORDER = [
    "tests/losses/test_gates.py",
    "tests/losses/test_pieces.py",
    "tests/losses/test_advantages.py",
    "tests/losses/test_credit.py",
    "tests/losses/test_golden.py",
    "tests/losses/test_objective.py",
    "tests/losses/test_pairwise.py",
    "tests/losses/test_other_signals.py",
    "tests/rl/test_reference.py",
    "tests/rl/test_sampled.py",
    "tests/models/test_layout.py",
    "tests/distributed/test_shares.py",
    "tests/learner/test_memory.py",
    "tests/learner/test_passes.py",
    "tests/learner/test_rounding.py",
    "tests/learner/test_limits.py",
    "tests/samplers/test_rng.py",
    "tests/samplers/test_partial.py",
    "tests/samplers/test_samplers.py",
    "tests/samplers/embedded",
    "tests/rl/test_rollouts.py",
    "tests/rl/test_curriculum.py",
    "tests/rl/test_schedules.py",
    "tests/rewards/test_metrics.py",
    "tests/rl/test_grading.py",
    "tests/rl/preflight/test_calibration.py",
    "tests/rl/test_episodes.py",
    "tests/rl/test_runs.py",
    "tests/learner/test_values.py",
    "tests/rl/test_mixed_reward.py",
    "tests/rl/test_reward_range.py",
    "tests/losses/test_laws.py",
    "tests/samplers/test_mismatch.py",
    "tests/learner/test_moe.py",
    "tests/models/test_routing.py",
    "tests/learner/test_optimizer.py",
    "tests/learner/test_moments.py",
    "tests/learner/test_schedule.py",
    "tests/learner/test_lora.py",
    "tests/rl/test_training.py",
    "tests/runs/health/test_health.py",
    "tests/rl/test_asking.py",
    "tests/runs/test_resume.py",
    "tests/models/test_logprobs.py",
    "tests/models/test_quantized.py",
    "tests/learner/test_devices.py",
    "tests/models/test_tiles.py",
    "tests/api/evaluation/test_estimates.py",
    "tests/serving/test_text.py",
    "tests/serving/test_engine.py",
    "tests/serving/test_server.py",
]


def caught_by(fault: Fault) -> str:
    """The first test that fails with the fault planted, or "" if none does. The quick tests of the fault's own room run
    first, by themselves: nearly always one of them catches it, and the others need not even be imported."""
    path = fault.file if "/" in fault.file else f"losses/{fault.file}"
    own = [each for each in ORDER if each.startswith(f"tests/{path.split('/')[0]}/")]
    with copied() as copy:
        target = copy / "src/proximo" / path
        text = target.read_text()
        if text.count(fault.right) != 1:
            raise SystemExit(f"{fault.file}: {fault.right!r} occurs {text.count(fault.right)} times, not once")
        target.write_text(text.replace(fault.right, fault.wrong))
        others = [each for each in ORDER if each not in own]
        rounds = [(tests, tier) for tests in (own, others) if tests for tier in ("not slow", "slow")]
        return next((found for tests, tier in rounds if (found := failing(copy, tests, tier))), "")


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the sources, and of what tests read besides."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("src", "tests", "docs", "pyproject.toml"):
            source = ROOT / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / part)
        yield copy


def failing(copy: Path, tests: list[str], tier: str) -> str:
    """The first of the tier's tests that fails, or ""; a fault that lets one go on for good is caught, too."""
    try:
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-v", "--tb=no", "-p", "no:cacheprovider", "-m", tier, *tests],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as late:
        shown = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        begun = re.findall(r"^tests/(\S+::\S.*?)(?: [A-Z]+ +\[.*)?$", shown, re.MULTILINE)
        return f"{begun[-1] if begun else tests[0]}, which does not end"
    if result.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    found = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - |$)", result.stdout, re.MULTILINE)
    if found is None:  # a run that tested nothing has caught nothing
        raise SystemExit(f"pytest stopped: {result.stdout[-500:]}{result.stderr[-500:]}")
    return found[1]


def main(words: list[str]) -> int:
    """All faults, or those whose file or description holds one of the words."""
    faults = [each for each in FAULTS if not words or any(word in f"{each.file} {each.what}" for word in words)]
    with copied() as copy:  # a test that fails without any fault would seem to catch them all
        if found := failing(copy, ORDER, "not scale"):
            raise SystemExit(f"without any fault, {found} fails in a copy of the sources")
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        results = []
        for result in pool.map(caught_by, faults):
            results.append(result)
            print(f"{len(results)} of {len(faults)}: {result or 'not caught'}", file=sys.stderr)
    print("| fault | where | caught by |\n|---|---|---|")
    for fault, test in zip(faults, results, strict=True):
        print(f"| {fault.what} | {fault.file} | {f'`{test}`' if test else '**not caught**'} |")
    survivors = results.count("")
    print(f"\n{len(faults) - survivors} of {len(faults)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
