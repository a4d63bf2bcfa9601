"""The programs that an equation of a jaxpr calls: the one place that knows where versions of JAX write it differently.

Before JAX 0.12 a loop's body is a ClosedJaxpr around a Jaxpr, and a scan counts its arguments; since then there are no
ClosedJaxprs, and a scan groups its arguments in trees.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr


@dataclass(frozen=True)
class Scan:
    """Arguments: constants, then what a trip hands to the next, then what is sliced by trip. Results: what is carried,
    then what is stacked. Inside the body the same, without the dimension of the trips."""

    body: Jaxpr
    num_consts: int
    num_carried: int
    num_trips: int


def scan_of(params: Mapping[str, Any]) -> Scan:
    """Returns the body and the counts of a `scan` equation, from its parameters."""
    if "ft_in" in params:
        consts, carried, _ = params["ft_in"].unpack()
        num_consts, num_carried = len(consts), len(carried)
    else:
        num_consts, num_carried = params["num_consts"], params["num_carry"]
    return Scan(without_consts(params["jaxpr"]), num_consts, num_carried, params["length"])


def without_consts(jaxpr: Any) -> Jaxpr:
    """A jaxpr or a ClosedJaxpr as a jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def subprograms(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """The jaxprs that an equation calls."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else [value]:
            jaxpr = without_consts(item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
