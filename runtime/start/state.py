"""Makes the state that a run starts from: drawn, with weights, or restored."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import be, counted
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.compiler.xla.programs import Programs

from ..checkpoint.adapters import Base, base_of, check_base, read_base, with_base
from ..checkpoint.checkpoints import Restored, restore
from ..checkpoint.differences import describe_change, schedule_record
from ..checkpoint.restore_plan import plan_restore
from ..data import BatchIterator
from ..processes.distributed import Processes
from ..processes.process_log import announce
from ..weights.find import StoredWeights, check_content, describe_weights, find_weights
from ..weights.load import with_weights

if TYPE_CHECKING:
    from .start import Resumed


@dataclass(frozen=True)
class Started:
    """A state that training begins with. step, num_tokens: what it was trained for. base: of its adapters, for the
    checkpoints to come; None for a whole model."""

    state: Any
    step: int
    num_tokens: int
    base: Base | None


def fresh_state(
    plan: Plan[RunSpec], weights: StoredWeights | None, programs: Programs, console: Console, processes: Processes
) -> Started:
    """Returns the state before the first step. Raises RunFailed in all processes if the weights are damaged."""
    state = _drawn(plan, weights, programs, console, processes)
    place = weights.place if weights else None
    return Started(state, 0, 0, base_of(place, state["params"]) if plan.model.adapters else None)


def resumed_state(
    start: "Resumed", programs: Programs, batches: BatchIterator, console: Console, processes: Processes
) -> Started:
    """Returns the state of a checkpoint, and moves the batches to its place in the data. Raises ConfigError if it
    cannot go on with this declaration."""
    if start.plan.model.adapters:
        read_base(start.checkpoint)  # raises for a whole model
    for line in plan_restore(start.checkpoint, start.plan).lines():
        announce(console, line)
    restored = restore(start.checkpoint, programs.state, batches)
    announce(console, f"continuing after step {restored.step}, from {start.checkpoint.path}")
    for line in _changes(start.plan.spec, restored, batches):
        announce(console, line)
    num_tokens = restored.num_tokens
    if num_tokens is None:
        num_tokens = restored.step * start.plan.spec.tokens_per_step
        what = "the checkpoint has no num_tokens: they count on from steps x tokens of a step"
        announce(console, f"{what}, {num_tokens:,}")
    if restored.base is None:
        return Started(restored.state, restored.step, num_tokens, None)
    weights = start.weights
    if weights is None and restored.base["place"] is not None:
        weights = find_weights(start.plan, restored.base["place"])
    drawn = _drawn(start.plan, weights, programs, console, processes)
    state = restored.state | {"params": with_base(restored.state["params"], drawn["params"])}
    check_base(start.checkpoint, state["params"], restored.base)
    place = start.weights.place if start.weights else restored.base["place"]
    return Started(state, restored.step, num_tokens, base_of(place, state["params"]))


def _drawn(
    plan: Plan[RunSpec], weights: StoredWeights | None, programs: Programs, console: Console, processes: Processes
) -> Any:
    """Returns a drawn state, with weights in the place of its parameters."""
    state = programs["init"]()
    if weights is None:
        return state
    check_content(weights, processes)
    for line in describe_weights(weights):
        announce(console, line)
    return with_weights(state, weights, plan, console)


def _changes(spec: RunSpec, restored: Restored, batches: BatchIterator) -> Iterator[str]:
    """Yields what is other than it was in the data and the schedule. Raises ConfigError if the data end before the
    run: batches that are larger now are fewer."""
    if restored.other_data:
        yield f"the data start at their beginning: not the same {', '.join(restored.other_data)}"
    elif restored.batch_before is not None:
        further = f", {counted(restored.num_skipped, 'sequence')} further, at a whole batch"
        sizes = f"batches have {counted(spec.global_batch_size, 'sequence')} in place of {restored.batch_before}"
        yield f"{sizes}; the data go on where they were{further if restored.num_skipped else ''}"
    num_steps, num_left = spec.num_steps - restored.step, batches.num_left
    if num_left < num_steps:
        left = counted(num_left, "more global batch", "more global batches")
        what = f"the data end after {left}, and {num_steps:,} {be(num_steps)} to come"
        raise ConfigError([Problem("data.num_epochs", what, "use more epochs, or null (no end), or fewer steps")])
    if change := describe_change(restored.schedule, schedule_record(spec, int(restored.state["step"]))):
        yield change
