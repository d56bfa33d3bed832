# pyright: reportMissingImports=false
"""`memory`: what the log-prob phase needs beyond inputs and their gradients, how that grows, and a step's peaks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proximo.models.logprobs import token_logprobs
from proximo.planning.workloads import MEDIUM, SMALL, Workload
from proximo_lab.bench.memory import peak_bytes, release, reset_peak, used_bytes
from proximo_lab.bench.report import Row, Verdict, short
from proximo_lab.bench.session import Failed, Session
from proximo_lab.bench.sides import trl
from proximo_lab.bench.tables.comparing import GIB
from proximo_lab.bench.tables.growth import exponent
from proximo_lab.bench.tables.step import first_step

MIB = 2**20
Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Log-probs of targets from states and the head's weights."""


def our_head(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute our log-probs with no logits kept, which takes least; a run keeps as many as fit into what is free."""
    return token_logprobs(states, weight, targets, temperature=1.0, kept_bytes=0)[0]


def trl_head(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Call what TRL 1.16 calls in its loss: log-probs and entropy, a tile of logits at a time."""
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    outputs = ("log_probs", "entropy")
    sized = _CHUNKED_LOGPROB_CHUNK_SIZE
    return _ChunkedLogProbFunction.apply(states, weight, None, targets, 1.0, sized, None, 1.0, outputs)[0]


def plain_head(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once, as in most trainers."""
    everything = (states @ weight.T).float().log_softmax(-1)
    return everything.gather(-1, targets[:, None])[:, 0]


def head_bytes(head: Head, device: str, *, tokens: int, vocabulary: int, width: int) -> int:
    """Peak memory of a forward and backward pass, without states, weights and their gradients."""
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    release(device)
    states = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device=device)
    before = used_bytes(device)
    reset_peak(device)
    head(states, weight, targets).sum().backward()
    return max(peak_bytes(device) - before - states.nbytes - weight.nbytes, 1)


@dataclass(frozen=True)
class LogProbs:
    """One size: ours, TRL's, and full logits."""

    tokens: int
    vocabulary: int
    width: int
    limit: float
    """Maximum, as a share of TRL's memory."""

    @property
    def name(self) -> str:
        return f"logprobs-{self.tokens}x{self.vocabulary}"

    def run(self, session: Session) -> list[Row]:
        heads: dict[str, Head] = {"ours": our_head, "full logits": plain_head}
        if trl.is_there() and session.options.peers:
            heads["TRL"] = trl_head
        size = {"tokens": self.tokens, "vocabulary": self.vocabulary, "width": self.width}
        taken, failed = {}, []
        for name, head in heads.items():
            try:
                taken[name] = head_bytes(head, session.device, **size)
            except torch.OutOfMemoryError:
                failed.append(f"{name} out of memory")
            session.say(f"  {self.name} {name}: {taken.get(name, 0) / MIB:,.0f} MiB")
        ratios = {f"ours / {name}": short(taken["ours"] / taken[name]) for name in taken if name != "ours"}
        verdicts = (Verdict("ours / TRL", taken["ours"] / taken["TRL"], self.limit, at_least=False),)
        return [
            Row(
                self.name,
                figures={f"{name} MiB": short(taken[name] / MIB) for name in taken},
                ratios=ratios,
                verdicts=verdicts if "TRL" in taken else (),
                note="; ".join(failed),
                details={"bytes": taken, **size},
            )
        ]


@dataclass(frozen=True)
class Flat:
    """Growth of our memory with the vocabulary or with the tokens, the other being fixed."""

    tokens: tuple[int, ...]
    vocabulary: tuple[int, ...]
    width: int

    @property
    def name(self) -> str:
        return f"logprobs-by-{'tokens' if len(self.tokens) > 1 else 'vocabulary'}"

    def run(self, session: Session) -> list[Row]:
        sizes = [(tokens, vocabulary) for tokens in self.tokens for vocabulary in self.vocabulary]
        taken = [
            head_bytes(our_head, session.device, tokens=tokens, vocabulary=vocabulary, width=self.width)
            for tokens, vocabulary in sizes
        ]
        grown = [tokens * vocabulary for tokens, vocabulary in sizes]
        return [
            Row(
                self.name,
                figures={"ours MiB": short(max(taken) / MIB)},
                verdicts=(Verdict("exponent", exponent(grown, taken), 0.05, at_least=False),),
                details={"sizes": sizes, "bytes": taken},
            )
        ]


@dataclass(frozen=True)
class Peaks:
    """Peak memory of the phases of a step, each side alone."""

    workload: Workload

    @property
    def name(self) -> str:
        return f"step-{self.workload.name}"

    def run(self, session: Session) -> list[Row]:
        ours, notes = session.ours(self.workload), []
        for _ in range(2):
            ours.step()
        peaks = {"ours": dict(ours.watch.peaks)}
        del ours
        for settings in session.settings(self.workload, "best", "default"):
            release(session.device)
            peer = session.opened(self.workload, settings, first_step)
            if isinstance(peer, Failed):
                notes.append(f"{peer.name} {peer.why}")
            else:
                peaks[settings.name] = dict(peer.watch.peaks)
                peer.close()
        rows = [
            Row(
                f"{self.name} {phase}",
                figures={f"{name} GiB": f"{peak[phase] / GIB:.1f}" for name, peak in peaks.items()},
                ratios={
                    f"ours / {name}": short(bytes_ / peak[phase]) for name, peak in peaks.items() if name != "ours"
                },
            )
            for phase, bytes_ in peaks["ours"].items()
        ]
        return [*rows[:-1], replace(rows[-1], note="; ".join(notes), details={"peaks": peaks})]


def _flat(tokens: Sequence[int], vocabulary: Sequence[int], width: int) -> Flat:
    return Flat(tuple(tokens), tuple(vocabulary), width)


CPU = (
    LogProbs(2048, 49152, 64, 0.1),
    _flat([1024, 2048, 4096, 8192], [16384], 32),
    _flat([2048], [8192, 16384, 32768, 65536], 32),
)
GPU = (
    LogProbs(16384, 151936, 1024, 0.1),
    _flat([4096, 16384, 32768, 65536], [151936], 1024),
    _flat([16384], [32000, 64000, 151936, 256000], 1024),
    Peaks(SMALL),
    Peaks(MEDIUM),
)
