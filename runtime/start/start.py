"""Decides where a run starts, and makes the state that it starts from.

    Fresh      parameters are drawn, or of a published folder, or of another run: steps, optimizer, schedule begin anew
    Resumed    a checkpoint of this run, or the one of checkpoint.restore_from, goes on

Each has `lines()` to show, and `state(programs, ...)`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan

from ..checkpoint.find import Checkpoint
from ..checkpoint.restore_plan import plan_restore
from ..processes.distributed import Processes
from ..weights.find import StoredWeights, describe_weights, find_weights
from .find import find_restorable

if TYPE_CHECKING:  # what makes a state imports Orbax and Grain, and what shows a start has no need of them
    from meshloom.compiler.xla.programs import Programs

    from ..data import BatchIterator
    from .state import Started


@dataclass(frozen=True)
class Fresh:
    """Every parameter is drawn, or weights take the place of those that they hold."""

    plan: Plan[RunSpec]
    weights: StoredWeights | None
    step: int = 0
    is_own: bool = False

    def lines(self) -> list[str]:
        """Returns the lines that say what is read, and what is not."""
        return describe_weights(self.weights) if self.weights else []

    def state(
        self, programs: "Programs", _batches: "BatchIterator", console: Console, processes: Processes
    ) -> "Started":
        """Returns the state before the first step. Raises RunFailed in all processes if the weights are damaged."""
        from .state import fresh_state

        return fresh_state(self.plan, self.weights, programs, console, processes)


@dataclass(frozen=True)
class Resumed:
    """A checkpoint goes on. weights: the declared ones, which the base of adapters is loaded from; None: from where it
    was when they were saved."""

    plan: Plan[RunSpec]
    checkpoint: Checkpoint
    weights: StoredWeights | None

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def is_own(self) -> bool:
        return self.checkpoint.is_own

    def lines(self) -> list[str]:
        """Returns the plan of the restore, as lines to show, and what is read of the declared weights."""
        weights = describe_weights(self.weights) if self.weights else []
        return [*plan_restore(self.checkpoint, self.plan).lines(), *weights]

    def state(
        self, programs: "Programs", batches: "BatchIterator", console: Console, processes: Processes
    ) -> "Started":
        """Returns the state of the checkpoint, and moves the batches to its place in the data. Raises ConfigError if
        it cannot go on with this declaration."""
        from .state import resumed_state

        return resumed_state(self, programs, batches, console, processes)


RunStart = Fresh | Resumed


def declared_start(plan: Plan[RunSpec]) -> RunStart:
    """Returns where the declaration says that a new run starts, as far as can be seen without reading arrays. Raises
    ConfigError for what it cannot start from."""
    checkpoint, weights = find_restorable(plan.spec.checkpoint, plan.abstract), find_weights(plan)
    return Fresh(plan, weights) if checkpoint is None else Resumed(plan, checkpoint, weights)


def find_start(
    run_dir: Path, plan: Plan[RunSpec], weights: StoredWeights | None, console: Console, processes: Processes
) -> RunStart:
    """Returns where a run starts, the same in all processes: from a checkpoint of its directory, if there is one.

    weights: of `declared_start`. Process 0 reads each byte of the checkpoint once, and warns about a lack of disk
    space. Raises in all processes for damage, and if one of them does not see the checkpoint.
    """
    from .state import checkpoint_of_first, find_for_run

    checkpoint = checkpoint_of_first(
        lambda: find_for_run(run_dir, plan.spec.checkpoint, plan.abstract, console), processes
    )
    return Fresh(plan, weights) if checkpoint is None else Resumed(plan, checkpoint, weights)


def check_steps_left(start: RunStart, num_steps: int) -> None:
    """Raises ConfigError if the checkpoint of another run has done all the steps of this one."""
    if isinstance(start, Resumed) and start.step >= num_steps:
        done = f"{counted(num_steps, 'step')} leave nothing to do after the {start.step:,}"
        fix = f"use num_steps={start.step + num_steps} for as many more, or an earlier checkpoint"
        raise ConfigError([Problem("num_steps", f"{done} of {start.checkpoint.path}", fix)])
