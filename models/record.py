"""The base of typed nodes of files, and the error of their validators, for what is read without NumPy."""

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Record(BaseModel):
    """A frozen node of a file that a program writes and reads. Strict: `1` is not a boolean and `"3"` not a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


def mistake(what: str, fix: str, key: str | None = None) -> PydanticCustomError:
    """Returns the error of a validator: what is wrong with a field, and the fix. key: the field, for a validator of a
    whole node."""
    return PydanticCustomError("mistake", "{what}", {"what": what, "fix": fix} | ({"key": key} if key else {}))
