"""A run in MLflow: on its server, or in `mlflow.db` of the run directory."""

import json
import logging
import time
from collections.abc import Mapping

import mlflow  # pyright: ignore[reportMissingImports] (an extra)
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports] (an extra)
from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports] (an extra)
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE  # pyright: ignore[reportMissingImports] (an extra)

from meshloom.compiler.core.key_paths import leaves

from .trackers import TrackedRun, Tracker

MOST_PARAMETERS = 100  # of one request, as MLflow's REST API allows
MOST_CHARACTERS = 6000  # of the value of a parameter

for noisy in ("mlflow", "alembic"):  # they tell of each table that is made
    logging.getLogger(noisy).setLevel(logging.WARNING)


class MLflow(Tracker):
    """One run there for all starts of a run here. Points are sent in a thread of MLflow's own."""

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        options = run.options.mlflow
        self._client = MlflowClient(options.uri or f"sqlite:///{run.directory / 'mlflow.db'}")
        self._id = run.remembered_id("mlflow", self._create)
        self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        points = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=points, synchronous=False)

    def close(self, *, has_failed: bool) -> None:
        mlflow.flush_async_logging()
        self._client.set_terminated(self._id, "FAILED" if has_failed else "FINISHED")

    def _create(self) -> str:
        name = self.run.options.mlflow.experiment
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        tags = dict.fromkeys(self.run.tags, "") | ({MLFLOW_RUN_NOTE: self.run.notes} if self.run.notes else {})
        created = self._client.create_run(experiment, run_name=self.run.name, tags=tags).info.run_id
        parameters = [Param(key, _text(value)) for key, value in leaves(self.run.declaration)]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(created, params=parameters[first : first + MOST_PARAMETERS])
        return created


def _text(value: object) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:MOST_CHARACTERS]
