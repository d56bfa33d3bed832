"""Trackio: local, in trackio's own folder or TRACKIO_DIR; `trackio show` opens it. With TRACKIO_SPACE_ID it sends
to a Hugging Face Space."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar
from uuid import uuid4

from proximo.runs.tracking.tracker import Completion, TrackedRun

LEVELS = {"info": "info", "warning": "warn", "failing": "error"}


class Trackio:
    """Project `proximo`, or what TRACKIO_PROJECT names."""

    needs: ClassVar[tuple[str, ...]] = ("trackio",)
    package: ClassVar[str] = "trackio"

    def open(self, run: TrackedRun, key: str | None) -> str:
        trackio = self._trackio = import_module("trackio")
        self._step = 0
        key = key or f"{run.name}-{uuid4().hex[:6]}"  # a run is known by its name, and folders may share one
        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or "proximo",
            name=key,
            config={**run.config, "proximo": dict(run.facts)},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return key

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._step = max(self._step, step)
        self._run.log(dict(values), step=step)

    def event(self, step: int, severity: str, text: str) -> None:
        level = self._trackio.AlertLevel(LEVELS.get(severity, "warn"))
        self._run.alert(title=severity, text=text, level=level, step=step)

    def completions(self, step: int, rows: Sequence[Completion]) -> None:
        columns = list(rows[0]) if rows else []
        table = self._trackio.Table(columns=columns, data=[list(row.values()) for row in rows])
        self._run.log({"tables/completions": table}, step=step)

    def flush(self) -> None:
        """Do nothing: trackio writes its queue by itself every half second, and at the end."""

    def close(self, summary: Mapping[str, float], finished: bool) -> None:
        if summary:
            self._run.log({f"summary/{name}": value for name, value in summary.items()}, step=self._step)
        self._trackio.finish()
