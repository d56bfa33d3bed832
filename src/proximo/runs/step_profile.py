"""Profile of a run's steps: the seconds of their parts as a tree, what computed longest, and the largest loss.

It lies in the run folder as profile.json, which a stranger may have written: it is read in bounds, and what is
unlike what a run writes is refused.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proximo.runs.files import PROFILE, TRACE
from proximo.system.opening import as_written, read_json
from proximo.system.safe_text import visible

PhasePath = tuple[str, ...]
"""Names of a phase and of those that it lies in, the outermost first; empty for what lies in none."""
SEPARATOR = " / "
MAX_PHASES, MAX_BYTES, MAX_NAME, MAX_DEPTH = 1000, 4 << 20, 160, 12
SHOWN_KERNELS = 12
LARGE = 0.05
"""Share of a step from which on something is called a loss."""
SMALL = 0.001
"""Share of a step below which a part is not shown by itself."""
WIDTH = 42
"""Columns of a part's name."""

COMPUTING = frozenset(
    {"decoding", "head and draw", "prefill", "layers", "head", "forward", "loss", "backward", "gradient norm"}
    | {"weights", "mixed-in examples"}
)
"""Phases that are the work itself: lost is only the time in which the device idles."""
WHOLE = frozenset({"evaluate", "save", "push", "records"})
"""Phases that are a loss with all that lies in them."""
ACTIONS = {
    "admission": "no more rows a step (batch times group_size) than the sampler has slots, 512, enter all at once",
    "looks at the host": "more rows at a time (batch, group_size) share a look; stop strings lengthen it",
    "waiting for grades": "a faster reward, or more processes for it (workers); judges: more requests at once",
    "waiting for the sampler": "a higher ahead.staleness, or more engines",
    "waiting for engines": "ahead.staleness samples the next step meanwhile; more engines share the rows",
    "waiting for ranks": "the ranks' lanes in the page's time line show which one is slower, and when",
    "packing": "fewer, larger passes: leave training.token_budget out, so that the memory decides",
    "evaluate": "a larger evaluation.every, or fewer evaluation.problems",
    "save": "a larger checkpoints.every, or a faster disk under the run folder",
    "records": "fewer or shorter completions a step; a faster disk under the run folder, if most of it is `write`",
    "push": 'sampler.sync = "gloo" or "nccl" instead of a folder; with LoRA "adapter"',
}
"""First thing to do about a loss, by the phase."""
LOOK = f"{TRACE} shows what happens there: open it at ui.perfetto.dev"


@dataclass(frozen=True)
class PhaseTime:
    """Time of a phase in a step, without the phases that lie in it: means over the steps that were measured."""

    path: PhasePath
    seconds: float
    """Seconds; on a GPU those of its stream, in which the host may be ahead."""
    host: float
    """Seconds of the process that launches the work."""
    times: float
    """Number of times that it began."""
    busy: float | None = None
    """Share of it in which the GPU computed, in the step that was traced; None: not known."""


@dataclass(frozen=True)
class KernelTime:
    """A kernel of a GPU, or an operation of torch on a CPU, in the step that was traced."""

    name: str
    phase: str
    seconds: float
    times: int


@dataclass(frozen=True)
class StepProfile:
    """Time of some steps, by the parts of a step."""

    steps: tuple[int, ...]
    """Steps that were measured."""
    device: str
    phases: tuple[PhaseTime, ...]
    """All phases, in the order of their first beginning; their seconds add up to a step's wall time."""
    traced: int | None = None
    """Step that was traced, which is none of those that were measured: tracing costs time."""
    kernels: tuple[KernelTime, ...] = ()
    """Kernels that computed longest in it, longest first."""
    remark: str = ""
    """Reason why nothing was traced."""
    passes: str = ""
    """Size of the learner's passes, in words."""

    @property
    def seconds(self) -> float:
        """Wall time of a step."""
        return sum(each.seconds for each in self.phases)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds}


def read_profile(run: Path) -> StepProfile | None:
    """The profile in a run folder; None where there is none. OSError or ValueError where it cannot be read."""
    path = run / PROFILE
    try:
        value = read_json(path, MAX_BYTES)
    except FileNotFoundError:
        return None
    with as_written(path):
        return _profile_of(value)


def _profile_of(value: Mapping[str, Any]) -> StepProfile:
    phases = tuple(_phase_of(each) for each in value["phases"][:MAX_PHASES])
    kernels = tuple(_kernel_of(each) for each in value["kernels"][:MAX_PHASES])
    steps = tuple(int(step) for step in value["steps"][:MAX_PHASES])
    if not steps or not phases:
        raise TypeError("no step was measured")
    traced = None if value["traced"] is None else int(value["traced"])
    remark, passes = _text(value["remark"]), _text(value["passes"])
    return StepProfile(steps, _text(value["device"]), phases, traced, kernels, remark, passes)


def _phase_of(value: Mapping[str, Any]) -> PhaseTime:
    path = tuple(_text(name) for name in value["path"][:MAX_DEPTH])
    busy = None if value["busy"] is None else _real(value["busy"])
    return PhaseTime(path, _real(value["seconds"]), _real(value["host"]), _real(value["times"]), busy)


def _kernel_of(value: Mapping[str, Any]) -> KernelTime:
    return KernelTime(_text(value["name"]), _text(value["phase"]), _real(value["seconds"]), int(value["times"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is none")
    return visible(value, MAX_NAME)


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError("a number is none")
    return float(value)


# The largest loss


@dataclass(frozen=True)
class Loss:
    """Time that a step loses."""

    seconds: float
    what: str
    action: str


def largest_loss(profile: StepProfile) -> str:
    """A sentence on what a step loses most by, and the first thing to do about it."""
    total = profile.seconds
    loss = max(_losses(profile), key=lambda each: each.seconds, default=None)
    if loss is None or loss.seconds < LARGE * total:
        longest = max(profile.phases, key=lambda each: each.seconds, default=None)
        most_of_it = "" if longest is None else f"; {_name(longest.path)} takes {longest.seconds / total:.0%}"
        return f"nothing but the computing itself takes {LARGE:.0%} of a step of {total:.2f} s{most_of_it}"
    return f"{loss.what} {loss.seconds / total:.0%} of a step of {total:.2f} s. First: {loss.action}"


def _losses(profile: StepProfile) -> Iterator[Loss]:
    sums = dict[str, float]()
    for each in profile.phases:
        outer = next((name for name in each.path if name in WHOLE), None)
        name = outer or (each.path[-1] if each.path else "")
        if name in COMPUTING:
            if each.busy is not None:
                what = f"the GPU idles in {_name(each.path)}"
                action = f"more rows or tokens at a time; {LOOK}"
                yield Loss(max(1 - each.busy, 0) * each.seconds, f"{what}:", action)
        else:
            name = name if name in ACTIONS or not each.path else _name(each.path)
            sums[name] = sums.get(name, 0.0) + each.seconds
    for name, seconds in sums.items():
        what = f"{name} takes" if name in ACTIONS else f"{name or 'the step'} takes, outside of its named parts,"
        yield Loss(seconds, what, ACTIONS.get(name, LOOK))


def _name(path: PhasePath) -> str:
    return SEPARATOR.join(path) or "the rest"


# The table


def profile_lines(profile: StepProfile) -> list[str]:
    """The profile as a table for a terminal, with its largest loss before it."""
    first, last = profile.steps[0], profile.steps[-1]
    steps = f"steps {first} to {last}" if last > first else f"step {first}"
    has_gpu = profile.device == "cuda"
    columns = f"{'seconds':>9} {'share':>6} {'times':>7}" + (f" {'host s':>9} {'busy':>6}" if has_gpu else "")
    lines = [f"{steps}: {largest_loss(profile)}", f"{'a step':<{WIDTH}} {columns}"]
    lines += [_row(profile, "all", profile.phases, 0.0, has_gpu)]
    lines += _branch(profile, (), has_gpu)
    lines += filter(None, [profile.passes, profile.remark])
    if profile.kernels:
        what = "kernels" if has_gpu else "operations"
        lines.append(f"longest {what} of step {profile.traced}, seconds and calls")
        lines += [
            f"  {each.seconds:>9.4f} {each.times:>7} {each.name} ({each.phase})"
            for each in profile.kernels[:SHOWN_KERNELS]
        ]
    return lines


def _branch(profile: StepProfile, path: PhasePath, has_gpu: bool) -> list[str]:
    """Lines of the phases right inside of one, with their own; what is left of it comes last."""
    depth, lines = len(path), list[str]()
    inside = [each for each in profile.phases if each.path[:depth] == path]
    names = dict.fromkeys(each.path[depth] for each in inside if len(each.path) > depth)
    hidden = 0.0
    for name in names:
        part = [each for each in inside if each.path[depth : depth + 1] == (name,)]
        if sum(each.seconds for each in part) < SMALL * profile.seconds:
            hidden += sum(each.seconds for each in part)
            continue
        times = sum(each.times for each in part if len(each.path) == depth + 1)
        lines.append(_row(profile, "  " * (depth + 1) + name, part, times, has_gpu))
        lines += _branch(profile, (*path, name), has_gpu)
    if names:
        rest = [each for each in inside if each.path == path]
        left = sum(each.seconds for each in rest) + hidden
        if depth == 0 or left >= SMALL * profile.seconds:
            small = "rest, and small parts" if hidden else "rest"
            lines.append(_row(profile, "  " * (depth + 1) + small, rest, 0.0, has_gpu, hidden))
    return lines


def _row(
    profile: StepProfile, name: str, part: Sequence[PhaseTime], times: float, has_gpu: bool, more: float = 0.0
) -> str:
    seconds = sum(each.seconds for each in part) + more
    line = (
        f"{name:<{WIDTH}} {seconds:>9.4f} {seconds / (profile.seconds or 1):>6.1%} {f'{times:g}' if times else '':>7}"
    )
    if not has_gpu:
        return line.rstrip()
    known = [each for each in part if each.busy is not None]
    busy = sum(each.seconds * (each.busy or 0.0) for each in known) / (seconds or 1) if known else None
    return f"{line} {sum(each.host for each in part):>9.4f} {'' if busy is None else f'{busy:.0%}':>6}".rstrip()
