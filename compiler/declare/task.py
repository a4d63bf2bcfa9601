"""Settles what a declaration leaves to its task: the peak of the learning rate, and the number of steps.

    optimizer.learning_rate=null   the usual one of the task (conf/optimizer/_task_rates.yaml)
    num_steps=null                 as many as data.num_epochs have; without epochs, 300

The rate is settled before the declaration is checked, so that a program and its fingerprint know a number alone. Steps
of epochs are counted when the data are open (`RunSpec.counts_epochs`).
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args

from ..core.places import is_published
from ..spec.objective_spec import task_of_objective
from ..spec.own_config import own_config

TaskKind = Literal["pretraining", "fine_tuning", "adapter", "preferences"]
TASKS: tuple[TaskKind, ...] = get_args(TaskKind)
TITLES: dict[TaskKind, str] = {
    "pretraining": "training from drawn weights", "fine_tuning": "fine-tuning all weights",
    "adapter": "training an adapter", "preferences": "learning preferences",
}  # fmt: skip
STEPS_WITHOUT_EPOCHS = 300
RATE = "learning_rate"


def task_of(values: Mapping[str, Any]) -> TaskKind:
    """Returns the task of a declaration, by its values."""

    def kind(name: str) -> Any:
        node = values.get(name)
        return node.get("kind") if isinstance(node, Mapping) else None

    checkpoint = values.get("checkpoint")
    if task := task_of_objective(kind("objective")):
        return task
    if kind("adapter") not in (None, "none"):
        return "adapter"
    places = checkpoint if isinstance(checkpoint, Mapping) else {}
    has_weights = places.get("weights_from") or is_published(str(places.get("restore_from")))
    return "fine_tuning" if has_weights else "pretraining"


def settled(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a declaration with its rate and its steps, where it leaves them to its task."""
    changes: dict[str, Any] = {}
    optimizer = values.get("optimizer")
    if isinstance(optimizer, dict) and RATE in optimizer and optimizer[RATE] is None:
        rate = usual_rate(str(optimizer.get("name")), task_of(values))
        changes["optimizer"] = optimizer | ({RATE: rate} if rate is not None else {})
    if "num_steps" in values and values["num_steps"] is None:
        changes["num_steps"] = STEPS_WITHOUT_EPOCHS
    return values | changes


def counts_epochs(values: Mapping[str, Any]) -> bool:
    """Returns True if the number of steps is counted from epochs of the data. values: not settled yet."""
    data = values.get("data")
    has_epochs = isinstance(data, Mapping) and data.get("num_epochs") is not None
    return has_epochs and "num_steps" in values and values["num_steps"] is None


def usual_rate(optimizer: str, task: TaskKind) -> float | None:
    """Returns the usual peak of the learning rate; None for an optimizer that has no table."""
    return _rates().get(optimizer, {}).get(task)


@cache
def _rates() -> dict[str, dict[str, float]]:
    return own_config("optimizer/_task_rates.yaml")
