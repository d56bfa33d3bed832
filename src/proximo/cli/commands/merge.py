"""`proximo merge`: write an adapter and its base model as one whole model."""

import json
from dataclasses import asdict

from proximo.api.export.merging import Merged, merge
from proximo.cli.arguments import refuse, refusing, take, take_switch

USAGE = """usage: proximo merge ADAPTER OUT [--dtype float32|bfloat16] [--json]

Write a whole model: the adapter's base model with the adapter added to its weights. ADAPTER is a run folder, one of
its checkpoints, or the folder or hub id of a LoRA adapter in peft's format. OUT is a new folder. An adapter that was
trained on a quantised base is added to the same rounded weights, in which the written model is dense again.

--dtype DTYPE  data type of the written weights (default: float32). bfloat16 takes half the space, but rounds away
               changes that are much smaller than the weights; the command says how much
--json         print the result as JSON

examples:
  proximo merge runs/lora merged
  proximo merge runs/lora/checkpoints/step-000100 merged --dtype bfloat16
"""


def run(arguments: list[str]) -> int:
    as_json, dtype = take_switch(arguments, "--json"), take(arguments, "--dtype") or "float32"
    if dtype not in ("float32", "bfloat16"):
        refuse(f"--dtype {dtype}: give float32 or bfloat16")
    if len(arguments) != 2 or any(each.startswith("-") for each in arguments):
        given = f", not {' '.join(arguments)}" if arguments else ""
        refuse(f"merge takes an adapter and a new folder{given}: proximo merge ADAPTER OUT")
    with refusing(OSError):
        merged = merge(*arguments, dtype=dtype)
    print(json.dumps(asdict(merged) | {"folder": str(merged.folder)}) if as_json else _result(merged))
    return 0


def _result(merged: Merged) -> str:
    lines = [f"the model   {merged.folder}"]
    if merged.quantization is not None:
        lines.append(f"its weights are those of the {merged.quantization} base, made dense again, plus the adapter")
    if merged.rounding > 0.01:
        lines.append(
            f"rounding errors are {merged.rounding:.0%} of the adapter's change: --dtype float32 keeps it whole"
        )
    return "\n".join(lines)
