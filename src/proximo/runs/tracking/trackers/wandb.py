"""Weights & Biases. Offline unless a login is known or WANDB_MODE says otherwise; `wandb sync` sends offline runs."""

import netrc
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

from proximo.runs.tracking.tracker import Completion, TrackedRun


class Wandb:
    """Keys of metrics are those of metrics.jsonl; the horizontal axis is `step`."""

    needs: ClassVar[tuple[str, ...]] = ("wandb",)
    package: ClassVar[str] = "wandb"

    def open(self, run: TrackedRun, key: str | None) -> str:
        wandb = self._wandb = import_module("wandb")
        key = key or uuid4().hex[:12]
        mode = os.environ.get("WANDB_MODE") or ("online" if _is_logged_in() else "offline")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "proximo",
            id=key,
            name=run.name,
            dir=str(run.place),
            config={**run.config, "proximo": dict(run.facts)},
            mode=mode,
            resume="allow" if mode == "online" else None,
            reinit="finish_previous",
            # The process that is measured and whose output is captured would be ours, not the run's.
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return key

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def event(self, step: int, severity: str, text: str) -> None:
        table = self._wandb.Table(columns=["step", "severity", "event"], data=[[step, severity, text]])
        self._run.log({"step": step, "tables/events": table})
        if severity != "info" and self._run.settings.mode == "online":
            self._run.alert(title=f"{self._run.name}: {severity}", text=text)

    def completions(self, step: int, rows: Sequence[Completion]) -> None:
        columns = list(rows[0]) if rows else []
        table = self._wandb.Table(columns=columns, data=[list(row.values()) for row in rows])
        self._run.log({"step": step, "tables/completions": table})

    def flush(self) -> None:
        """Do nothing: wandb's own process has every row as soon as `log` returns, and outlives this one."""

    def close(self, summary: Mapping[str, float], finished: bool) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if finished else 1)


def _is_logged_in() -> bool:
    """True if `wandb login` or WANDB_API_KEY gives access to the server."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        known = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        known = {}
    return bool(os.environ.get("WANDB_API_KEY")) or host in known
