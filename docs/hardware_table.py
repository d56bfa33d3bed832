"""Rows of the table of hardware in the guide on memory, as `proximo plan` predicts them; docs/tables.py writes it."""

from collections.abc import Iterator
from dataclasses import replace

from proximo.api.planning import plan
from proximo.cli.commands.plan import BASE
from proximo.models.adapters.lora import Lora
from proximo.planning.cards import GIB
from proximo.planning.plan import Way

MODELS = ("SmolLM2-135M", "0.6B", "1.7B", "4B", "8B", "14B", "30B-A3B")
CARDS = ("RTX4090", "L40S", "A100-80", "H200")
"""Rows and columns of the table: shapes and cards that `proximo plan` knows by name."""


def hardware(model: str) -> Iterator[str]:
    """Rows of one model: whole, with an adapter, and with an adapter on a base in 4 bits."""
    config = replace(BASE, model=model, training=replace(BASE.training, groups=16, group_size=8))
    plain = [plan(config, card) for card in CARDS]
    quantised = [plan(replace(config, adapter=Lora(quantize_base="nf4")), card).lora for card in CARDS]
    yield _hardware_row(model, "full", [each.full for each in plain])
    yield _hardware_row(model, "LoRA", [each.lora for each in plain])
    yield _hardware_row(model, "LoRA, nf4", quantised)


def _hardware_row(model: str, trained: str, ways: list[Way]) -> str:
    needed = max(way.memory.needed for way in ways) / GIB
    return f"| {model} | {trained} | {needed:.1f} | {' | '.join(map(_seconds, ways))} |"


def _seconds(way: Way) -> str:
    seconds = way.time.total if way.fits and way.time is not None else None
    return "–" if seconds is None else f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
