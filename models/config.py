"""The base of every typed config: frozen, complete, strict."""

from pydantic import BaseModel, ConfigDict, PositiveInt

from .contract import Model


class Config(BaseModel):
    """A frozen config node.

    No field has a default here: defaults are written once, in `conf/`. Strict: `1` is no boolean and `"3"` no number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(Config):
    """What every model is declared by, ours and users' (docs/extend.md).

    The key `family` tells them apart. Ours declare it as their name; a user's class gets its import path for one.
    """

    vocab_size: PositiveInt

    def build(self) -> Model:
        """The pieces of the model; allocates nothing."""
        raise NotImplementedError
