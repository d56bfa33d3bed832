"""`train`: the training phase on fixed completions, compared with TRL's, and its use of the machine's arithmetic."""

from dataclasses import dataclass

import torch

from proximo.models.packing.attention import registered
from proximo.planning.published_shapes import QWEN_600M, TINY, Shape
from proximo.planning.roofline import arithmetic_share
from proximo.planning.workloads import (
    C_135M_64,
    C_135M_256,
    C_135M_TAIL,
    C_TINY,
    C_TINY_LORA,
    ENDS_1000,
    ENDS_2000,
    LLAMA,
    LONG_PROMPT,
    MEDIUM,
    MEDIUM_4B,
    ODD,
    QWEN_1700,
    TAIL,
    UNTUNED,
    Tail,
    Workload,
)
from proximo.recipes.selfcheck.selfcheck import packed_is_padded
from proximo.rl.assemble import to_batch
from proximo_lab.bench.report import Row, Verdict
from proximo_lab.bench.session import Session, Turn
from proximo_lab.bench.sides.ablations import training_without
from proximo_lab.bench.sides.ours import Ours
from proximo_lab.bench.tables.comparing import OF_ARITHMETIC, Target, compared, refused_row
from proximo_lab.bench.tables.rollout import Without


@dataclass(frozen=True)
class Beside:
    workload: Workload
    factor: float | None = None
    """Required speed-up over TRL's best settings."""
    use: float | None = None
    """Required share of the machine's arithmetic."""

    @property
    def name(self) -> str:
        return self.workload.name

    def run(self, session: Session) -> list[Row]:
        workload = self.workload
        comparison = compared(
            session,
            workload,
            session.settings(workload, "best", "default", "compiled"),
            turn=lambda side: side.training,
            samples=False,
            learns=True,
        )
        if comparison.refused:
            return [refused_row(self.name, comparison)]
        use = arithmetic_share(workload, session.machine, comparison.turns("train"))
        verdicts = comparison.verdicts([Target("train", self.factor)] if self.factor else [])
        if self.use is not None:
            verdicts += (Verdict("use of the arithmetic", use, self.use),)
        figures = comparison.figures("train", "s", lambda seconds: seconds) | {OF_ARITHMETIC: f"{use:.0%}"}
        tokens = workload.groups * workload.prompt + workload.completion_tokens
        return [
            Row(
                self.name,
                figures=figures | comparison.first_turn("train") | comparison.peak(),
                ratios=comparison.ratios("train"),
                verdicts=verdicts,
                note=comparison.note,
                details=comparison.details | {"unique tokens": tokens, "use": use, "machine": vars(session.machine)},
            )
        ]


@dataclass(frozen=True)
class Exact:
    """Gradients of the fast path and of the padded reference, in float32."""

    shape: Shape

    @property
    def name(self) -> str:
        return f"gradient-{self.shape.name}"

    def run(self, session: Session) -> list[Row]:
        workload = Workload(self.name, self.shape, 2, 4, 48, Tail(24, 64), 1)
        ours = session.ours(workload, policy=_full_precision(self.shape, session.device))
        logprobs, gradient = packed_is_padded(ours.model, to_batch(ours.fixed_groups), 1.0)
        assert gradient.value is not None
        return [
            Row(
                self.name,
                verdicts=(Verdict("gradient vs padded, relative", gradient.value, 1e-5, at_least=False),),
                details={"log-probs": logprobs.value, "gradient": gradient.value},
            )
        ]


USE = {ODD: 0.50, LLAMA: 0.58, QWEN_1700: 0.58, MEDIUM_4B: 0.65}
"""Required shares of the arithmetic."""


def _full_precision(shape: Shape, device: str):
    return shape.model(attention=registered(), dtype=torch.float32, device=device)


def _trainings(ours: Ours) -> list[Turn]:
    return [Turn("ours", ours.training), *training_without(ours)]


CPU = (
    Exact(TINY),
    Beside(C_TINY),
    Beside(C_TINY_LORA),
    Beside(C_135M_64),
    Beside(C_135M_256),
    Beside(C_135M_TAIL),
)
GPU = (
    Exact(QWEN_600M),
    Beside(MEDIUM, factor=3.0, use=0.40),
    Beside(LONG_PROMPT, factor=10.0),
    Beside(TAIL, factor=6.0, use=0.50),
    Beside(ENDS_1000, use=0.50),
    Beside(ENDS_2000, use=0.50),
    *(Beside(workload, use=USE.get(workload)) for workload in UNTUNED),
)
CPU_WITHOUT = (Without(C_TINY, "train", _trainings), Without(C_135M_64, "train", _trainings))
GPU_WITHOUT = (Without(MEDIUM, "train", _trainings), Without(LONG_PROMPT, "train", _trainings))
