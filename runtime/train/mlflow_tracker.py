"""Tracks a run in MLflow: on its server, or in `mlflow.db` of the run directory."""

import json
import logging
import time
from collections.abc import Mapping

import mlflow  # pyright: ignore[reportMissingImports] (an extra)
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports] (an extra)
from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports] (an extra)
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE  # pyright: ignore[reportMissingImports] (an extra)

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.key_paths import leaves

from .trackers import TrackedRun, Tracker

MOST_PARAMETERS = 100  # of one request, as MLflow's REST API allows
MOST_CHARACTERS = 6000  # of the value of a parameter
OF_A_START = ("checkpoint.restore_from", "distributed.process_id")  # differ between starts, and not part of the run

for noisy in ("mlflow", "alembic"):  # they log each table that is created
    logging.getLogger(noisy).setLevel(logging.WARNING)


class MLflow(Tracker):
    """One run in MLflow for all starts of a run here. A thread of MLflow sends the points."""

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        options = run.options.mlflow
        self._client = MlflowClient(options.uri or f"sqlite:///{run.directory / 'mlflow.db'}")
        self._id = run.remembered_id("mlflow", self._create)
        self._client.update_run(self._id, status="RUNNING")
        if run.first_step:
            self._tell_changes()

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

    def _tell_changes(self) -> None:
        """Warns about parameters that differ from the first start: MLflow keeps the first values."""
        there = self._client.get_run(self._id).data.params
        here = {key: _text(value) for key, value in leaves(self.run.declaration)}
        changed = [key for key in {**there, **here} if key not in OF_A_START and there.get(key) != here.get(key)]
        if changed:
            told = "; ".join(f"{key}: {there.get(key, 'none')} -> {here.get(key, 'none')}" for key in changed)
            self._client.set_tag(self._id, f"changed_after_step_{self.run.first_step}", told[:MOST_CHARACTERS])
            what = f"MLflow keeps the parameters of the first start, and {told} changed"
            self.run.warn(Problem("logging.trackers", what, "see the tag changed_after_step_N of the run there"))


def _text(value: object) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:MOST_CHARACTERS]
