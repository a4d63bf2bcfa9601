"""What a declaration says of adapters (adapter.py)."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from .config import Config


class AdapterConfig(Config):
    """The adapters of a model. targets: patterns of the paths of matrices; None: each matrix that a matmul of a layer
    reads, but those that are kept in float32, as routers are, and those of experts."""

    if TYPE_CHECKING:
        kind: Any

    rank: PositiveInt
    alpha: PositiveFloat  # the change is multiplied by alpha / rank; of rslora by alpha / sqrt(rank)
    dropout: Annotated[float, Field(ge=0, lt=1)]  # of the input of A
    targets: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None

    @property
    def scale(self) -> float:
        """Returns the factor of A B."""
        return self.alpha / self.rank

    @property
    def has_magnitude(self) -> bool:
        """Returns True where the length of each column is trained."""
        return False


class LoraConfig(AdapterConfig):
    kind: Literal["lora"]


class RsLoraConfig(AdapterConfig):
    kind: Literal["rslora"]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank**0.5


class DoraConfig(AdapterConfig):
    kind: Literal["dora"]

    @property
    def has_magnitude(self) -> bool:
        return True
