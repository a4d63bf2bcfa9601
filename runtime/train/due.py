"""When a run evaluates and saves."""

import time

from meshloom.compiler.config.spec import RunSpec


class Due:
    """What is due after a step, by the declaration and, of saves, by the clock."""

    def __init__(self, spec: RunSpec):
        self._spec, self._last_save = spec, time.perf_counter()

    def saved(self) -> None:
        """Takes note that the state was saved now."""
        self._last_save = time.perf_counter()

    def is_evaluation(self, step: int) -> bool:
        """Returns whether the held-out loss is due, as it always is at the end, unless nothing is held out."""
        if not self._spec.data.held_out_fraction:
            return False
        return step % self._spec.evaluation.every_num_steps == 0 or step == self._spec.num_steps

    def is_save(self, step: int) -> bool:
        """Returns whether a checkpoint is due."""
        checkpoint = self._spec.checkpoint
        if checkpoint.every_num_steps is not None and step % checkpoint.every_num_steps == 0:
            return True
        minutes = (time.perf_counter() - self._last_save) / 60
        return checkpoint.every_num_minutes is not None and minutes >= checkpoint.every_num_minutes
