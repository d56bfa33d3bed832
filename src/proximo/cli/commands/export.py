"""`proximo export`: a trained model for other programs."""

import json
from dataclasses import asdict

from proximo.cli.arguments import refuse, refusing, take, take_switch

USAGE = """usage: proximo export RUN|MODEL [--to FORM] [--out PLACE] [--dtype float32|bfloat16] [--public] [--json]

Write a model for other programs, without optimizer state. A run's model gets a model card (README.md) from the facts of
its report, and its config (proximo.config.toml). RUN is a run folder or one of its checkpoints.

--to FORM      folder     as transformers and vLLM load it; a LoRA adapter is merged into its base model (default)
               adapter    the LoRA adapter alone, as peft writes it
               gguf:TYPE  one file for llama.cpp, TYPE is f32, f16 or q8_0; llama, qwen2 and qwen3 models
               hub        upload to the Hugging Face hub
--out PLACE    the new folder or file (default: next to the run folder); for the hub the repository, USER/NAME
--dtype DTYPE  data type of the weights in a folder (default: as they are, and float32 after a merge)
--public       make a new repository on the hub public
--json         print the result as JSON

examples:
  proximo export runs/a --out models/a
  proximo export runs/a --to gguf:q8_0
  proximo export runs/lora --to adapter
  proximo export runs/a --to hub --out me/my-model
"""


def run(arguments: list[str]) -> int:
    as_json, public = take_switch(arguments, "--json"), take_switch(arguments, "--public")
    form, out, dtype = take(arguments, "--to") or "folder", take(arguments, "--out"), take(arguments, "--dtype")
    if dtype not in ("float32", "bfloat16", None):
        refuse(f"--dtype {dtype}: give float32 or bfloat16")
    if len(arguments) != 1 or arguments[0].startswith("-"):
        given = f", not {' '.join(arguments)}" if arguments else ""
        refuse(f"export takes one run or model{given}: proximo export RUN|MODEL [--to FORM] [--out PLACE]")
    # Imported late, because it takes seconds, and help does not need it.
    from proximo.api.export.export import export

    with refusing(OSError):
        exported = export(arguments[0], form, out, dtype=dtype, public=public)
    if as_json:
        print(json.dumps(asdict(exported)))
        return 0
    print(f"the model   {exported.place}")
    if exported.rounding is not None and exported.rounding > 0.01:
        print(f"rounding errors are {exported.rounding:.0%} of the adapter's change: --dtype float32 keeps it whole")
    return 0
