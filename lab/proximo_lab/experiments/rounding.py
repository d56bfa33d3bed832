"""Round the weights of models that ship to what half precision holds: a wheel packs the zeros in half the room.

python -m proximo_lab.experiments.rounding src/proximo/models/weights/tiny-arithmetic

They stay float32, and load as before. A model that is trained anew for the package is rounded before it is committed.
"""

import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file


def rounded(folder: Path) -> None:
    """Round the weights of a model's folder in place."""
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as held:
        header, weights = held.metadata(), {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    save_file({name: weight.half().float() for name, weight in weights.items()}, file, header)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        rounded(Path(each))
