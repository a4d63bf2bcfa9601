"""How a weight is stored, how it crosses the network, and how a model takes it.

    stored -> encode -> what each device gathers -> decode -> what a layer multiplies with

`WeightPlan.encoding` has the encoding of each weight; the step encodes once, and decodes what it gathered
(weights.py). Today both are casts: a weight is stored in one type, and gathered and used in another. A type that needs
more than a cast, such as scales for blocks of float8, is another class here with the same methods.
"""

from dataclasses import dataclass, replace
from typing import Any

from jax import Array


@dataclass(frozen=True)
class Encoding:
    """The types of one weight, by NumPy's names. store: in the state. travel: as it is gathered. use: as a model takes
    it, and its operations."""

    store: str
    travel: str
    use: str

    def encode(self, stored: Array) -> Any:
        """Returns what is gathered for a stored weight: an array, or a tree of arrays."""
        return stored.astype(self.travel)

    def decode(self, gathered: Any) -> Array:
        """Returns the weight that a model takes."""
        return gathered.astype(self.use)

    @property
    def decoded(self) -> "Encoding":
        """Returns the encoding of a weight that was decoded already."""
        return replace(self, travel=self.use)
