"""Counts, by site, the scales of operands in few bits that overflowed: those of a tensor, a channel or a block that
holds NaN or infinity.

A step does not count: its loss or gradients show that something is not finite. The same operations, watched, are a
program for a step that is known not to be: whatever encodes an operand reports its scales to the host.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from ..core.format import human_names
from .operation import OpPlan
from .quantized import GRADIENT


@dataclass(frozen=True)
class OverflowCounts:
    """How often operands were encoded, and how often a scale overflowed then, by 'operand of site'; over layers,
    microbatches and the devices of this process."""

    encoded: Counter[str] = field(default_factory=Counter)
    overflowed: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)  # a thread per device

    @property
    def totals(self) -> dict[str, Counter[str]]:
        """Returns both counts, as `describe_overflows` reads them and JSON takes them."""
        return {"encoded": self.encoded, "overflowed": self.overflowed}

    def watched(self, operations: Iterable[OpPlan]) -> tuple[OpPlan, ...]:
        """Returns operations whose programs count here when they run."""
        return tuple(self._watched(each) for each in operations)

    def watch(self, site: str, operand: str, scales: Array) -> None:
        """Counts an operand of a site each time that what is being traced makes its scales."""
        overflows = ~jnp.all(jnp.isfinite(scales.astype(jnp.float32)))
        jax.debug.callback(partial(self._count, f"{operand} of {site}"), overflows)

    def _watched(self, plan: OpPlan) -> OpPlan:
        if plan.precision is None or plan.precision.arithmetic is None:
            return plan
        arithmetic = replace(plan.precision.arithmetic, watch=partial(self.watch, plan.site.path))
        return replace(plan, precision=replace(plan.precision, arithmetic=arithmetic))

    def _count(self, name: str, overflows: Array) -> None:
        times = int(overflows)
        with self._lock:
            self.encoded[name] += 1
            self.overflowed[name] += times


def describe_overflows(counts: Sequence[Mapping[str, Mapping[str, int]]], sites: Sequence[str]) -> str:
    """Returns a sentence on the operands whose scales overflowed, the likely first one first.

    What comes after an overflow is not finite either. So it began forward, if it did anywhere forward, and in the site
    with the largest share of its layers, the first of these in a layer; backward, in the last. counts: the totals
    of each process. sites: their paths, in the order of a layer.
    """
    encoded, overflowed = (
        sum((Counter(each[key]) for each in counts), Counter[str]()) for key in ("encoded", "overflowed")
    )

    def order(name: str) -> tuple[bool, float, int]:
        operand, _, site = name.partition(" of ")
        is_backward, at = operand == GRADIENT, sites.index(site)
        return is_backward, -overflowed[name] / encoded[name], -at if is_backward else at

    names = sorted((name for name, times in overflowed.items() if times), key=order)
    if not names:
        return "no scale of a matmul overflowed"
    return f"scales overflowed: {human_names([f'{each} ({overflowed[each]} of {encoded[each]})' for each in names])}"
