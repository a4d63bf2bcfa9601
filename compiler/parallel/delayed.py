"""Scales from the magnitudes of earlier steps ("delayed scaling"; Micikevicius et al. 2022, arXiv:2209.05433).

    state      of each site and layer, the largest magnitudes of its three operands in the last steps
    scales     the largest of them, divided by the largest number of the type
    step       rounds with these, so that no reduction stands before it; a number that is too large is clipped
    update     takes this step's magnitudes in, and lets the oldest go

Magnitudes are found in the backward pass, which encodes all three: x, the weight and the gradient of the result. They
leave it as the gradient of the scales, which have no other. Over layers the loop adds up arrays that are 0 but for one
layer; over microbatches and devices the largest is taken.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from meshloom.models import Stack

from ..formats.element import element_formats
from ..formats.operands import OperandFormat
from .operation import OpPlan

MAGNITUDES, CLIPPED = "magnitudes", "clipped"
FIRST_OF_WEIGHT = 2.0**-9  # float8_e4m3fn then holds weights up to 0.875, from 3e-5 on with all of its digits
Magnitudes = dict[str, dict[str, Array]]  # of operands, by stack and site
_T = TypeVar("_T")


@dataclass(frozen=True)
class DelayedSite:
    """A site of a stack whose scales come from earlier steps. steps: how many. formats: of x, of the weight and of the
    gradient of the result."""

    stack: str
    name: str
    num_layers: int
    steps: int
    formats: tuple[OperandFormat, OperandFormat, OperandFormat]

    def limits(self, history: Magnitudes, of_gradient: ArrayLike) -> Array:
        """Returns the largest magnitudes that are not clipped, of all layers (layers, 3). history: of all sites.
        of_gradient: the scale of a gradient until its magnitude is known."""
        first = jnp.stack([jnp.asarray(each, jnp.float32) for each in (1.0, FIRST_OF_WEIGHT, of_gradient)])
        known = jnp.max(history[self.stack][self.name], -1)
        return jnp.where(known > 0, known, first * self.largest)

    @property
    def largest(self) -> Array:
        """Returns the largest numbers of the types (3,)."""
        return jnp.array([element_formats()[each.element].largest for each in self.formats])


def delayed_sites(operations: Iterable[OpPlan], stacks: Iterable[Stack]) -> tuple[DelayedSite, ...]:
    """Returns the sites whose scales come from earlier steps."""
    num_layers, found = {stack.name: stack.num_layers for stack in stacks}, list[DelayedSite]()
    for each in operations:
        how = each.precision.arithmetic if each.precision else None
        if how and how.history and how.gradients:
            site, formats = each.site, (how.forward, how.forward, how.gradients)
            found.append(DelayedSite(site.piece, site.name, num_layers[site.piece], how.history, formats))
    return tuple(found)


def abstract_magnitudes(sites: Iterable[DelayedSite]) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Returns the state of these sites. Before the first step it is zeros, and no magnitude is known."""
    return _by_stack(sites, lambda site: jax.ShapeDtypeStruct((site.num_layers, 3, site.steps), jnp.float32))


def delayed_scales(sites: Iterable[DelayedSite], history: Magnitudes, of_gradient: ArrayLike) -> Magnitudes:
    """Returns the scales of a step, of all layers (layers, 3). of_gradient: as for `DelayedSite.limits`."""
    return _by_stack(sites, lambda site: site.limits(history, of_gradient) / site.largest)


def next_magnitudes(history: Magnitudes, now: Magnitudes) -> Magnitudes:
    """Returns the state after a step."""
    return jax.tree.map(lambda old, new: jnp.concatenate([new[..., None], old[..., :-1]], -1), history, now)


def clipped_metrics(
    sites: Iterable[DelayedSite], history: Magnitudes, of_gradient: ArrayLike, now: Magnitudes
) -> dict[str, Array]:
    """Returns how many operands of each layer (layers,) had numbers that were clipped, by the name of a metric of the
    stack. history, of_gradient: what the scales of the step came from."""
    clipped = _by_stack(
        sites, lambda site: jnp.sum(now[site.stack][site.name] > site.limits(history, of_gradient), axis=-1)
    )
    return {f"{stack}/{CLIPPED}": jnp.sum(jnp.stack([*each.values()]), axis=0) for stack, each in clipped.items()}


def with_scales(operation: Callable[..., Any], scales: Mapping[str, Array]) -> Callable[..., Any]:
    """Returns a `Context.operation` that gives each site its scales (3,), by its name."""
    if not scales:
        return operation

    def run(kind: str, name: str, plain: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        more = {"scales": scales[name]} if kind == "matmul" and name in scales else {}
        return operation(kind, name, plain, *operands, **options, **more)

    return run


def _by_stack(sites: Iterable[DelayedSite], made: Callable[[DelayedSite], _T]) -> dict[str, dict[str, _T]]:
    found = dict[str, dict[str, _T]]()
    for site in sites:
        found.setdefault(site.stack, {})[site.name] = made(site)
    return found
