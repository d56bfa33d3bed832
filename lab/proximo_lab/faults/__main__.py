"""`python -m proximo_lab.faults [FAMILY ...]`: inject faults, keep what became of them, write docs/reliability.md."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: children are forked, and a thread would not come along

import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

from proximo_lab.faults.cases import totals
from proximo_lab.faults.page import TITLES, page
from proximo_lab.faults.processes import adopt_orphans, orphans, side_by_side

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "reliability.md"


def main(names: Sequence[str]) -> int:
    if unknown := [name for name in names if name not in TITLES]:
        print(f"faults: no family is called {', '.join(unknown)}; there are {', '.join(TITLES)}", file=sys.stderr)
        return 2
    prepare()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"families": {}}
    for name in names or TITLES:
        print(f"{name}: {TITLES[name]}", flush=True)
        results["families"][name] = tried(name)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results))
    sums = totals({name: results["families"][name] for name in names or TITLES})
    print(f"faults: {sums['cases']} cases of {sums['kinds']} kinds, {sums['failed']} failed, {sums['not run']} not run")
    return 1 if sums["failed"] else 0


def prepare() -> None:
    """Import all that attempts need, so that each begins at once; nothing here may start a thread."""
    import torch

    torch.set_num_threads(1)
    for name in ("pyarrow.parquet", "proximo.cli.commands.train", "proximo.cli.commands.stages"):
        import_module(name)
    from transformers.utils.logging import disable_progress_bar

    from proximo.system import machine

    disable_progress_bar()
    machine.readings()  # attempts find it measured


def tried(name: str) -> dict[str, Any]:
    """Try a family, in a process and a folder of its own; what is left of its processes is counted."""
    adopts = adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix=f"faults-{name}-"))
    start = time.monotonic()
    try:
        family = import_module(f"proximo_lab.faults.{name}")
        (folder / "work").mkdir()
        [result] = side_by_side({name: lambda: family.run(folder / "work").to_dict()}, folder).values()
    finally:
        left = orphans() if adopts else []
        shutil.rmtree(folder, ignore_errors=True)
    for each in left:
        print(f"  left behind: {each}", flush=True)
    return result | {"orphans": len(left), "seconds": time.monotonic() - start, "date": str(date.today())} | _versions()


def _versions() -> dict[str, str]:
    import torch
    import transformers

    system = f"{platform.system()} {platform.release().partition('-')[0]}, {platform.machine()}"
    python = f"Python {platform.python_version()}"
    return {"versions": f"{python}, torch {torch.__version__}, transformers {transformers.__version__}, {system}"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
