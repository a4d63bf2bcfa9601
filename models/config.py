"""The base of every typed config: frozen, complete, strict."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen config node.

    No field has a default here: defaults are written once, in `conf/`. Strict: `1` is no boolean and `"3"` no number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
