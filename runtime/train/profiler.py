"""A trace of some steps, by `jax.profiler`: every process writes its own, with the program that it is of beside it.

    RUN/profile/process-0/plugins/profile/TIME/HOST.xplane.pb     for `meshloom profile`, TensorBoard and XProf
    RUN/profile/train.hlo.txt, predicted.json                     the compiled step and its prediction, by process 0

Steps are dispatched ahead, so the step before the first is waited for, and then the trace has these steps and no other.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.profile.trace import STEP_ANNOTATION
from meshloom.compiler.xla.hlo import HloError

from ..core.files import replace_text
from ..processes.distributed import Processes
from ..rundir.profile_files import FOLDER, place_of
from .time_spent import Stopwatch
from .watchdog import Watchdog

KEY = "profile.steps"


def check_profile(spec: RunSpec) -> None:
    """Raises ConfigError for steps that the run does not have."""
    steps = spec.profile.steps
    if steps is not None and steps[1] > spec.num_steps:
        what = f"step {steps[1]} is traced last, and num_steps is {spec.num_steps}"
        raise ConfigError([Problem(KEY, what, f"choose steps up to {spec.num_steps}, or raise num_steps")])


class Profiler:
    """Traces `profile.steps` within the `with`. files: what is written beside the traces, by name. say: takes what came
    of it; warn: what kept it from being written, which does not end the run."""

    def __init__(
        self,
        spec: RunSpec,
        processes: Processes,
        run_dir: Path,
        *,
        watch: Stopwatch,
        watchdog: Watchdog,
        files: Callable[[], Mapping[str, str]],
        say: Callable[[str], None],
        warn: Callable[[Problem], None],
    ):
        self._steps, self._processes, self._run_dir = spec.profile.steps, processes, run_dir
        self._watch, self._watchdog = watch, watchdog
        self._files, self._say, self._warn = files, say, warn
        self._last_begun: int | None = None  # None: no trace was begun
        self._is_on = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def begin_run(self, first_step: int) -> None:
        """Says what of the trace is left to a run that goes on after `first_step` steps."""
        if self._steps is None or first_step < self._steps[0]:
            return
        first, last = self._steps
        self._steps = (first_step + 1, last) if first_step < last else None
        left = f"only {_named(*self._steps)} can be traced" if self._steps else "nothing is traced"
        self._say(f"{KEY}=[{first},{last}]: {left}, as the run goes on after step {first_step}")

    def end_run(self, done: int) -> None:
        """Says which steps were not traced, because the run ended before them."""
        if self._steps is not None and done < self._steps[1]:
            first = max(self._steps[0], done + 1)
            self._say(f"{KEY}: {_named(first, self._steps[1])} not traced, as the run ended after step {done}")

    def is_first(self, step: int) -> bool:
        """Returns whether the trace begins before this step."""
        return self._steps is not None and step == self._steps[0]

    def is_last(self, step: int) -> bool:
        """Returns whether a trace is under way that ends with this step."""
        return self._is_on and self._steps is not None and step == self._steps[1]

    def start(self, state: Any) -> None:
        """Begins the trace, once the step that made this state is done on all devices."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python functions would make it large, and the steps slow
        with self._set_aside():
            jax.block_until_ready(state)  # metrics are there when one device has them
            jax.profiler.start_trace(place_of(self._run_dir, self._processes.index), profiler_options=options)
            self._is_on = True

    def step(self, step: int) -> AbstractContextManager[object]:
        """Returns what a step is dispatched within."""
        if not self._is_on:
            return nullcontext()
        self._last_begun = step
        return jax.profiler.StepTraceAnnotation(STEP_ANNOTATION, step_num=step)

    def stop_after(self, step: int, state: Any) -> None:
        """Ends the trace if this is its last step, which made this state."""
        if self.is_last(step):
            self.stop(state)

    def stop(self, state: Any = None) -> None:
        """Ends the trace, if one is under way, and writes it, once the step that made this state is done."""
        if not self._is_on:
            return
        self._is_on = False
        with self._set_aside():
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            if self._processes.is_first:
                for name, text in self._files().items():
                    replace_text(self._run_dir / FOLDER / name, text)
            if self._steps and self._last_begun:
                steps = _named(self._steps[0], self._last_begun)
                self._say(f"traced {steps}: read it with `meshloom profile {self._run_dir}`")

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Within the `with`, time is not that of a step, and a failure is a warning."""
        try:
            with self._watch.spending("profile"), self._watchdog.paused():
                yield
        except (
            OSError,
            RuntimeError,
            HloError,
        ) as error:  # a full disk, a session of another profiler, an unknown form
            what = f"the trace, or what belongs to it, is not written: {error}"
            self._warn(Problem(KEY, what, "the run goes on; train again to trace it"))


def _named(first: int, last: int) -> str:
    """Returns 'step 10' or 'steps 10 to 13'."""
    return f"step {first}" if first == last else f"steps {first} to {last}"
