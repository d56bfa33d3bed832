"""MLflow: MLFLOW_TRACKING_URI, or a database next to the run folder, so that runs next to each other share it:
`mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from proximo.runs.tracking.tracker import Completion, TrackedRun

MAX_VALUE, MAX_PARAMS = 500, 100
"""Maximum characters of a parameter's value, and parameters at a time: servers refuse more. config.json has all."""


class MLflow:
    """Experiment `proximo`, or what MLFLOW_EXPERIMENT_NAME says. Events and completions are artifacts."""

    needs: ClassVar[tuple[str, ...]] = ("mlflow", "sqlalchemy", "alembic")
    package: ClassVar[str] = "mlflow-skinny"

    def open(self, run: TrackedRun, key: str | None) -> str:
        self._entities: Any = import_module("mlflow.entities")
        beside, given = run.folder.parent, os.environ.get("MLFLOW_TRACKING_URI")
        self._client: Any = import_module("mlflow").MlflowClient(given or _database(beside / "mlflow.db"))
        self._key = key or self._created(run, None if given else (beside / "mlflow-artifacts").as_uri())
        self._client.update_run(self._key, status="RUNNING")
        return self._key

    def _created(self, run: TrackedRun, artifacts: str | None) -> str:
        """A new run, with its settings."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "proximo"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name, artifact_location=artifacts)
        key = self._client.create_run(experiment, run_name=run.name).info.run_id
        settings = {**run.config, "proximo": dict(run.facts)}
        params = [self._entities.Param(name, str(value)[:MAX_VALUE]) for name, value in _flat(settings)]
        self._client.log_batch(key, params=params[:MAX_PARAMS])
        self._client.log_dict(key, settings, "config.json")
        return key

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(
            self._key, [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        )

    def event(self, step: int, severity: str, text: str) -> None:
        name = f"events/step-{step:06d}-{time.time_ns()}.json"
        self._client.log_dict(self._key, {"step": step, "severity": severity, "event": text}, name)

    def completions(self, step: int, rows: Sequence[Completion]) -> None:
        self._client.log_dict(self._key, {"completions": [dict(row) for row in rows]}, f"completions/{step:06d}.json")

    def flush(self) -> None:
        """Do nothing: every call above is stored when it returns."""

    def close(self, summary: Mapping[str, float], finished: bool) -> None:
        if summary:
            self._client.log_dict(self._key, dict(summary), "summary.json")
        self._client.set_terminated(self._key, "FINISHED" if finished else "KILLED")


def _database(path: Path) -> str:
    """The address of a database file, which is made whole under another name first: a process that is ended while
    MLflow makes its tables would leave a file that MLflow never opens again."""
    if not path.exists():
        new = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
        new.unlink(missing_ok=True)
        import_module("mlflow").MlflowClient(f"sqlite:///{new}").search_experiments(max_results=1)
        try:
            os.link(new, path)
        except FileExistsError:  # another run has made it meanwhile
            pass
        except OSError:  # a file system without links
            os.replace(new, path)
        new.unlink(missing_ok=True)
    return f"sqlite:///{path}"


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
