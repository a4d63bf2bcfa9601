"""What `meshloom tune` searches, and for what."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from meshloom.models.config import Config

from ..core.config_types import Text

Objective = Literal["step_time", "cost", "memory"]


class TuneSpec(Config):
    """The space of a search, its limits and its objective.

    groups: config groups with the options that are tried: {remat: [full, none]}. mesh: axes with the sizes that are
    tried; null: all that divide the devices. microbatches: the numbers that are tried; null: all that divide. fix:
    pins, by key: {mesh: {tensor: 8}, remat: full, num_microbatches: 4}.
    """

    objective: Objective  # step_time: shortest; cost: cheapest per token; memory: least
    price_per_chip_hour: dict[Text, PositiveFloat]  # by chip, in any currency: {v5p: 4.2}
    max_memory_share: Annotated[float, Field(gt=0, le=1)]  # of a device's memory that the estimate may take
    groups: dict[Text, tuple[Text, ...]]
    microbatches: tuple[PositiveInt, ...] | None
    mesh: dict[Text, tuple[PositiveInt, ...] | None]
    fix: dict[Text, Any]
    num_shown: PositiveInt  # of the best, in the table and the page
    num_compiled: NonNegativeInt  # of the best, compiled to let the schedule judge
    max_candidates: PositiveInt  # a larger space is sampled by Optuna
    targets: tuple[Text, ...]  # several targets to compare; empty: the declared one
    tokens: PositiveFloat | None  # of the whole training, for its time and cost

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.objective == "cost" and not self.price_per_chip_hour:
            what = "is cost, and no price is known"
            fix = "set tune.price_per_chip_hour={v5p: PRICE}, in any currency"
            raise PydanticCustomError("choice", "{what}", {"what": what, "key": "objective", "fix": fix})
        return self
