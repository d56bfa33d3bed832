"""Stored readings: those that count today, of each table, machine and row."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from proximo_lab.bench.report import Verdict

CPU = "CPU"
"""Section in which all readings of processors are shown, whichever they are."""


@dataclass(frozen=True)
class Reading:
    """A row of a results file."""

    table: str
    date: str
    """Day of the measurement, as 2026-11-15."""
    stored: dict[str, Any]

    @property
    def name(self) -> str:
        return self.stored["name"]

    @property
    def around(self) -> dict[str, Any]:
        return self.stored["around"]

    @property
    def machine(self) -> str:
        device = self.around["device"]
        return device if self.on_gpu else f"{device}, {self.around['cores']} cores"

    @property
    def on_gpu(self) -> bool:
        return self.around["device"].startswith("NVIDIA")

    @property
    def section(self) -> str:
        """The section it belongs to: a GPU's name, or all processors."""
        return self.machine if self.on_gpu else CPU

    @property
    def commit(self) -> str | None:
        return self.around.get("commit")

    @property
    def is_ablation(self) -> bool:
        return bool(self.around.get("options", {}).get("ablate"))

    @property
    def columns(self) -> dict[str, str]:
        """Figures and ratios, by column."""
        return {**self.stored["figures"], **self.stored["ratios"]}

    @property
    def verdicts(self) -> list[Verdict]:
        return [
            Verdict(each["what"], each["value"], each["bound"], each["at_least"]) for each in self.stored["verdicts"]
        ]


def read_results(folder: Path) -> list[Reading]:
    """All readings of a folder, the oldest first. ValueError names a file that is none."""
    readings = []
    for path in sorted(folder.glob("*.json")):
        try:
            file = json.loads(path.read_text())
            day = datetime.strptime(path.stem.rsplit("-", 1)[-1], "%Y%m%d")
            readings += [
                Reading(file["table"], row["around"].get("date") or f"{day:%Y-%m-%d}", row) for row in file["rows"]
            ]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} is no results file of `proximo bench` ({error}): move it elsewhere") from error
    return sorted(readings, key=lambda reading: reading.date)


def current(readings: Sequence[Reading]) -> list[Reading]:
    """Readings that count: the newest of each row on its machine, and the newest with each peer, since a row that was
    measured again without a peer says nothing about the peer."""
    newest: dict[tuple[str, ...], Reading] = {}
    for reading in readings:
        row = (reading.table, reading.machine, reading.name)
        newest[row] = reading
        newest |= {(*row, peer): reading for peer in _peers(reading)}
    kept = {id(reading) for reading in newest.values()}
    return [reading for reading in readings if id(reading) in kept]


def _peers(reading: Reading) -> Iterable[str]:
    return (column for column in reading.stored["ratios"] if column.startswith("× "))
