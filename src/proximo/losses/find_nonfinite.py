"""Finds the piece behind a loss or a gradient that is not finite."""

from dataclasses import replace

import torch
from torch import Tensor

from proximo.losses.inputs import Objective, rows_of
from proximo.losses.objective import token_terms
from proximo.losses.pieces.protocols import GateTraits
from proximo.losses.records import LossInputs
from proximo.losses.token_weights import Plan


@torch.enable_grad()
def piece_at_fault(algorithm: Objective, inputs: LossInputs, plan: Plan) -> str | None:
    """The first piece that returns a number that is not finite, or has a gradient that is not; None where all are
    finite. The tensors of `inputs` are taken to be finite."""
    logprobs = inputs.logprobs.detach().requires_grad_()
    rows = rows_of(algorithm, replace(inputs, logprobs=logprobs))
    faults: list[str] = []

    def check(stage: str, piece: object, answer: Tensor, shape: torch.Size | None = None) -> Tensor:
        name = f"{stage} {type(piece).__name__}"
        if not answer.isfinite().all():
            faults.append(f"{name} returned a number that is not finite")
        elif answer.requires_grad:
            (gradient,) = torch.autograd.grad(answer.sum(), logprobs, retain_graph=True, allow_unused=True)
            if gradient is not None and not gradient.isfinite().all():
                faults.append(f"{name} has a gradient that is not finite")
        return answer

    check("anchor", algorithm.anchor, rows.anchor_logprobs)
    check("weights", algorithm.weights, plan.weights)
    terms = token_terms(algorithm, rows, plan, check)
    log_ratio, statistics = terms.log_ratio.detach(), GateTraits.read(algorithm.gate).statistics
    check("gate.through of", algorithm.gate, algorithm.gate.through(log_ratio, rows.advantages))
    for value in {} if statistics is None else statistics(log_ratio, rows.advantages, rows.mask).values():
        check("gate.statistics of", algorithm.gate, value)
    return faults[0] if faults else None
