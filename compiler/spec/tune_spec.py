"""The typed config of `meshloom tune`: its objective, its space and its limits."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from meshloom.models.config import Config, mistake

from ..core.config_types import Text

Objective = Literal["step_time", "cost", "memory"]


def _number_of_tokens(value: Any) -> Any:
    """Returns 1.5e12 for "1.5T"; what is no such text as it is."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT])", value) if isinstance(value, str) else None
    return float(match[1]) * _TIMES[match[2]] if match else value


_TIMES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
Tokens = Annotated[PositiveFloat, BeforeValidator(_number_of_tokens)]


class TuneSpec(Config):
    """The space of a search, its limits and its objective.

    groups: config groups with the options that are tried: {remat: [full, none]}. mesh: axes with the sizes that are
    tried; null: all that divide the devices. microbatches: the numbers that are tried; null: all that divide. pin:
    pins, by key: {mesh: {tensor: 8}, remat: full, num_microbatches: 4}.
    """

    objective: Objective  # step_time: shortest; cost: cheapest per token; memory: least
    price_per_chip_hour: dict[Text, PositiveFloat]  # by chip, in any currency: {v5p: 4.2}
    max_memory_share: Annotated[float, Field(gt=0, le=1)]  # of a device's memory that the estimate may take
    groups: dict[Text, tuple[Text, ...]]
    microbatches: tuple[PositiveInt, ...] | None
    mesh: dict[Text, tuple[PositiveInt, ...] | None]
    device_orders: Literal["declared", "all"]  # all: every device_order that places a mesh otherwise
    pin: dict[Text, Any]
    num_shown: PositiveInt  # of the best, in the table and the page
    num_compiled: NonNegativeInt  # of the best, compiled to let the schedule judge
    max_candidates: PositiveInt  # that are listed; of a larger space, Optuna chooses combinations of options
    num_trials: PositiveInt  # combinations of options that Optuna tries
    targets: tuple[Text, ...]  # several targets to compare; empty: the declared one
    tokens: Tokens | None  # of the whole training, for its time and cost: 1.5e12, or 1.5T

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.objective == "cost" and not self.price_per_chip_hour:
            what = "is cost, and no price is known"
            fix = "set tune.price_per_chip_hour={v5p: PRICE}, in any currency"
            raise mistake(what, fix, "objective")
        return self
