"""Tracks a run in Weights & Biases. Offline, it is in `wandb/` of the run directory, for `wandb sync`."""

import os
import secrets
from collections.abc import Mapping

import wandb  # pyright: ignore[reportMissingImports] (an extra)

from .trackers import TrackedRun, Tracker


class WeightsAndBiases(Tracker):
    """One run in W&B for all starts of a run here. Steps that are repeated replace nothing: W&B keeps the first value
    of a step."""

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        options = run.options.wandb
        self._wandb_run = wandb.init(
            project=options.project,
            entity=options.entity,
            mode=options.mode,
            id=run.remembered_id("wandb", lambda: os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)),
            resume="allow",
            name=run.name if run.is_named else os.environ.get("WANDB_NAME") or run.name,
            tags=run.tags or None,  # None: WANDB_TAGS
            notes=run.notes,
            dir=run.directory,
            config=dict(run.declaration),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._wandb_run.log(dict(values), step=step)

    def close(self, *, has_failed: bool) -> None:
        self._wandb_run.finish(exit_code=1 if has_failed else 0)
