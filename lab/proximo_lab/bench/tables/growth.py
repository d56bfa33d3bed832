"""`growth`: how training time grows with group size and with prompt length, as exponents."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from proximo.planning.published_shapes import QWEN_600M, TINY
from proximo.planning.workloads import Workload
from proximo_lab.bench.memory import release
from proximo_lab.bench.report import Row, Verdict, short
from proximo_lab.bench.session import Failed, Session, Turn, seconds_of
from proximo_lab.bench.tables.comparing import described


def exponent(sizes: Sequence[int], values: Sequence[int] | Sequence[float]) -> float:
    """Least-squares slope through the logarithms: values ∝ sizes ** slope."""
    across, up = [math.log(size) for size in sizes], [math.log(value) for value in values]
    middle, height = sum(across) / len(across), sum(up) / len(up)
    covariance = sum((x - middle) * (y - height) for x, y in zip(across, up, strict=True))
    return covariance / sum((x - middle) ** 2 for x in across)


@dataclass(frozen=True)
class Grown:
    """A workload at several sizes of one dimension."""

    name: str
    workload: Workload
    sizes: tuple[int, ...]
    at: Callable[[Workload, int], Workload]
    bound: float | None = None

    def run(self, session: Session) -> list[Row]:
        ours, theirs, notes = [], [], []
        for size in self.sizes:
            workload = self.at(self.workload, size)
            session.say(f"  {self.name} {size}")
            our_side = session.ours(workload)
            [phases] = session.measure([Turn("ours", our_side.training)])
            ours.append(phases["train"])
            del our_side
            release(session.device)
            for settings in session.settings(workload, "best"):
                peer = session.opened(workload, settings, lambda peer: peer.training())
                if isinstance(peer, Failed):
                    notes.append(f"{peer.name} {peer.why} at {size}")
                    continue
                [phases] = session.measure([Turn(peer.settings.name, peer.training)], begun=1)
                theirs.append((size, phases["train"]))
                peer.close()
        slope = exponent(self.sizes, [times.median for times in ours])
        ratios = {"ours": short(slope)}
        if len(theirs) > 1:
            ratios["TRL best"] = short(exponent([size for size, _ in theirs], [times.median for _, times in theirs]))
        verdicts = () if self.bound is None else (Verdict("exponent", slope, self.bound, at_least=False),)
        return [
            Row(
                self.name,
                figures={f"{size}": short(times.median) for size, times in zip(self.sizes, ours, strict=True)},
                ratios=ratios,
                verdicts=verdicts,
                note="; ".join(notes),
                details={
                    "workload": described(self.workload),
                    "sizes": self.sizes,
                    "ours": [seconds_of({"train": times}) for times in ours],
                    "TRL best": [(size, seconds_of({"train": times})) for size, times in theirs],
                },
            )
        ]


def _siblings(workload: Workload, size: int) -> Workload:
    return replace(workload, siblings=size, peer_rows=min(workload.peer_rows, workload.groups * size))


def _prompt(workload: Workload, size: int) -> Workload:
    return replace(workload, prompt=size)


CPU = (
    Grown("siblings", Workload("siblings", TINY, 2, 4, 512, 32, 8), (4, 8, 16, 32), _siblings),
    Grown("prompt", Workload("prompt", TINY, 2, 16, 32, 32, 8), (32, 64, 128, 256, 512), _prompt),
)
GPU = (
    Grown("siblings", Workload("siblings", QWEN_600M, 4, 4, 2048, 128, 8), (4, 8, 16, 32), _siblings, 0.55),
    Grown("prompt", Workload("prompt", QWEN_600M, 4, 16, 128, 128, 8), (128, 256, 512, 1024, 2048), _prompt, 0.35),
)
