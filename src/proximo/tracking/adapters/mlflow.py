"""MLflow: MLFLOW_TRACKING_URI, or a database next to the run folder, so that runs next to each other share it:
`mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from proximo.tracking.tracker import Completion, TrackedRun

MAX_VALUE = 500
"""Maximum characters of a parameter's value; servers refuse longer ones."""


class MLflow:
    """Experiment `proximo`, or what MLFLOW_EXPERIMENT_NAME says. Events and completions are artifacts."""

    needs: ClassVar[tuple[str, ...]] = ("mlflow", "sqlalchemy", "alembic")

    def open(self, run: TrackedRun, key: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        beside = run.folder.parent
        self._client: Any = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{beside / 'mlflow.db'}")
        if key is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "proximo"
            found = self._client.get_experiment_by_name(name)
            local = None if os.environ.get("MLFLOW_TRACKING_URI") else (beside / "mlflow-artifacts").as_uri()
            experiment = found.experiment_id if found else self._client.create_experiment(name, artifact_location=local)
            key = self._client.create_run(experiment, run_name=run.name).info.run_id
            settings = {**dict(_flat(run.config)), **dict(_flat({"proximo": run.facts}))}
            params = [Param(name, str(value)[:MAX_VALUE]) for name, value in settings.items()]
            self._client.log_batch(key, params=params[:100])
            self._client.log_dict(key, {**run.config, "proximo": dict(run.facts)}, "config.json")
        self._key = key
        self._client.update_run(key, status="RUNNING")
        return key

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._key, [self._metric(name, value, now, step) for name, value in values.items()])

    def event(self, step: int, severity: str, text: str) -> None:
        name = f"events/step-{step:06d}-{time.time_ns()}.json"
        self._client.log_dict(self._key, {"step": step, "severity": severity, "event": text}, name)

    def completions(self, step: int, rows: Sequence[Completion]) -> None:
        self._client.log_dict(self._key, {"completions": [dict(row) for row in rows]}, f"completions/{step:06d}.json")

    def flush(self) -> None:
        """Nothing to do: every call above is stored when it returns."""

    def close(self, summary: Mapping[str, float], finished: bool) -> None:
        if summary:
            self._client.log_dict(self._key, dict(summary), "summary.json")
        self._client.set_terminated(self._key, "FINISHED" if finished else "KILLED")


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
