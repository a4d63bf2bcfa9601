"""The typed config of a run's log and of the trackers of its metrics."""

from typing import Annotated, Literal

from pydantic import AfterValidator, PositiveInt

from meshloom.models.config import Config, mistake

from ..core.config_types import Text
from ..core.errors import use_one_of

TRACKERS = ("tensorboard", "wandb", "mlflow")


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in TRACKERS and ":" not in name:
            raise mistake(f"there is no '{name}'", use_one_of(name, [*TRACKERS, "module:Class"]))
    if twice := {name for name in names if names.count(name) > 1}:
        raise mistake(f"'{min(twice)}' comes twice", "name each once")
    return names


class WandbSpec(Config):
    """Weights & Biases. entity None: WANDB_ENTITY, or the account's own. offline: the run stays in the run
    directory."""

    project: Text
    entity: Text | None
    mode: Literal["online", "offline", "shared", "disabled"]  # what WANDB_MODE may be


class MlflowSpec(Config):
    """MLflow. uri: of its server; None: a file in the run directory."""

    uri: Text | None
    experiment: Text


class LoggingSpec(Config):
    every_num_steps: PositiveInt  # for plain lines without a terminal; every step goes to metrics.jsonl
    trackers: Annotated[tuple[Text, ...], AfterValidator(_known)]  # besides metrics.jsonl; a user's as module:Class
    layer_metrics: Literal["mean", "each"]  # of what layers return: the mean over a stack's layers, or a value of each
    wandb: WandbSpec
    mlflow: MlflowSpec
