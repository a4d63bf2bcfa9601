"""The bases of all typed nodes: frozen, complete, strict."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from .numbers import check_numbers


class Record(BaseModel):
    """A frozen node of a file that a program writes and reads. Strict: `1` is not a boolean and `"3"` not a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Config(Record):
    """A frozen node of a declaration.

    No field has a default here: defaults are written once, in `conf/`. Numbers are those that a step can hold
    (numbers.py): a field of whole numbers that may be 2^31 or more declares an upper bound.
    """

    @field_validator("*", mode="after")
    @classmethod
    def _check_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        check_numbers(value, cls.model_fields[str(info.field_name)])
        return value
