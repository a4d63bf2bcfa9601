"""How a stage runs one of several functions of a pipeline's state, or none.

cond             by XLA's conditional: TPUs and CPUs write the state in place
loops            by a loop of one trip or none for each function: so does XLA's GPU compiler, which copies what a
                 conditional takes and gives, on all stages, whether they run anything or not
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.scopes import at_most_once_scope

Changes = Callable[[Any], tuple[Any, Any]]
"""A function of a state: it returns the state, and what else it makes."""


@dataclass(frozen=True)
class SlotBranches:
    """by_loops: functions run in loops (`CompilerTraits.copies_conditionals`)."""

    by_loops: bool

    def run(self, branch: Array, runs: Sequence[Changes], state: Any, nothing: Any) -> tuple[Any, Any]:
        """Returns what function number `branch`, counted from 1, makes of the state. For 0, an empty
        slot, returns the state as it is and `nothing`."""
        if self.by_loops:
            for number, run in enumerate(runs, start=1):
                state, nothing = _at_most_once(branch == number, run, state, nothing)
            return state, nothing
        ended = [_ended(run) for run in [lambda state: (state, nothing), *runs]]
        if len(ended) == 2:
            leave, run = ended
            return jax.lax.cond(branch > 0, run, leave, state)
        return jax.lax.switch(branch, ended, state)

    def run_if(self, is_on: Array, run: Changes, state: Any, nothing: Any) -> tuple[Any, Any]:
        """Returns what a function makes of the state, if it is on."""
        return self.run(is_on.astype(jnp.int32), [run], state, nothing)


def either(is_on: Array, run: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Returns what one of two functions gives, by a conditional: for small results."""
    return jax.lax.cond(is_on, _ended(run), _ended(otherwise))


def _at_most_once(is_on: Array, run: Changes, state: Any, nothing: Any) -> tuple[Any, Any]:
    def trip(carry: tuple[Array, tuple[Any, Any]]) -> tuple[Array, tuple[Any, Any]]:
        left, (state, _) = carry
        return left - 1, _ended(run)(state)

    with jax.named_scope(at_most_once_scope()):
        start = is_on.astype(jnp.int32), (state, nothing)
        return jax.lax.while_loop(lambda carry: carry[0] > 0, trip, start)[1]


def _ended(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with a barrier at its end: XLA fails where the partitioner's layouts of what branches return
    are declared and differ (jaxlib 0.10.2: `Inconsistent conditional sharding`)."""
    return lambda *operands: jax.lax.optimization_barrier(run(*operands))
