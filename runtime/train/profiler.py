"""Traces some steps by `jax.profiler`: each process writes its own trace, and process 0 the program beside it.

    RUN/profile/process-0/plugins/profile/TIME/HOST.xplane.pb     for `meshloom profile`, TensorBoard and XProf
    RUN/profile/train.hlo.txt, predicted.json                     the compiled step and its prediction, by process 0

Steps are dispatched ahead. So the profiler waits for the step before the first one, and the trace has only these steps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.profile.prediction import predict
from meshloom.compiler.profile.trace import STEP_ANNOTATION
from meshloom.compiler.xla.hlo import HloError
from meshloom.compiler.xla.programs import Programs

from ..core.files import replace_text
from ..processes.distributed import Processes
from ..rundir.profile_files import FOLDER, PREDICTED, TEXT, place_of
from .metrics import TimeKind
from .observer import ObservedRun, Observer, StepTimes, TakeStep

KEY = "profile.steps"


def check_profile(steps: tuple[int, ...] | None, num_steps: int) -> None:
    """Raises ConfigError for steps that the run does not have."""
    if steps is not None and steps[1] > num_steps:
        what = f"step {steps[1]} is traced last, and num_steps is {num_steps}"
        raise ConfigError([Problem(KEY, what, f"choose steps up to {num_steps}, or raise num_steps")])


class Profiler(Observer):
    """Traces `profile.steps` within the `with`. steps: the first and the last; None: nothing is traced.

    pause: counts time as not that of a step. files: returns the files beside the traces, by name. say: takes a message.
    warn: takes a failure, which does not end the run.
    """

    def __init__(
        self,
        steps: tuple[int, ...] | None,
        processes: Processes,
        run_dir: Path,
        *,
        pause: Callable[[TimeKind], AbstractContextManager[object]],
        files: Callable[[], Mapping[str, str]],
        say: Callable[[str], None],
        warn: Callable[[Problem], None],
    ):
        self._steps, self._processes, self._run_dir = steps, processes, run_dir
        self._pause, self._files, self._say, self._warn = pause, files, say, warn
        self._last_begun: int | None = None  # None: no trace was begun
        self._is_on = False

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self:
        """Returns the profiler of this process."""
        files, pause = partial(predicted_files, run.plan, run.programs, run.model), run.observers.pause
        steps = run.spec.profile.steps
        return cls(steps, run.processes, run.run_dir, pause=pause, files=files, say=run.announce, warn=run.warn)

    def left(self, error: BaseException | None) -> None:  # noqa: ARG002
        self.stop()

    def run_started(self, first_step: int) -> None:
        """Says which steps can still be traced, if the run continues after some of them."""
        if self._steps is None or first_step < self._steps[0]:
            return
        first, last = self._steps
        self._steps = (first_step + 1, last) if first_step < last else None
        left = f"only {_named(*self._steps)} can be traced" if self._steps else "nothing is traced"
        self._say(f"{KEY}=[{first},{last}]: {left}, as the run goes on after step {first_step}")

    def run_ended(self, num_steps_done: int) -> None:
        """Says which steps were not traced because the run ended before them."""
        if self._steps is not None and num_steps_done < self._steps[1]:
            first, done = max(self._steps[0], num_steps_done + 1), num_steps_done
            self._say(f"{KEY}: {_named(first, self._steps[1])} not traced, as the run ended after step {done}")

    def reads_at_once(self, step: int) -> bool:
        """Returns True for the step before the trace and for its last step."""
        return self._is_last(step) or (self._steps is not None and step + 1 == self._steps[0])

    def _is_last(self, step: int) -> bool:
        """Returns True if a trace is in progress that ends with this step."""
        return self._is_on and self._steps is not None and step == self._steps[1]

    def start(self, state: Any) -> None:
        """Begins the trace, once the step that made this state is done on all devices."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing Python calls would make it large, and the steps slow
        with self._set_aside():
            jax.block_until_ready(state)  # metrics are ready once one device has them
            jax.profiler.start_trace(place_of(self._run_dir, self._processes.index), profiler_options=options)
            self._is_on = True

    def around_step(self, take: TakeStep) -> TakeStep:
        """Returns a function that begins the trace before its first step, and marks the steps in it."""

        def traced(state: Any, batch: dict[str, jax.Array], step: int, position: dict[str, Any]) -> tuple[Any, Any]:
            if self._steps is not None and step == self._steps[0]:
                self.start(state)
            if not self._is_on:
                return take(state, batch, step, position)
            self._last_begun = step
            with jax.profiler.StepTraceAnnotation(STEP_ANNOTATION, step_num=step):
                return take(state, batch, step, position)

        return traced

    def step_ended(self, step: int, times: StepTimes, state: Any) -> None:  # noqa: ARG002
        """Ends the trace if this is its last step."""
        if self._is_last(step):
            self.stop(state)

    def stop(self, state: Any = None) -> None:
        """Ends the trace, if one is in progress, and writes it, once the step that made this state is done."""
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
        """Within the `with`, time counts as profiling, and a failure is a warning."""
        try:
            with self._pause("profile"):
                yield
        except (OSError, RuntimeError, HloError) as error:  # a full disk, another profiler's session, an unknown form
            what = f"the trace, or what belongs to it, is not written: {error}"
            self._warn(Problem(KEY, what, "the run goes on; train again to trace it"))


def predicted_files(plan: Plan, programs: Programs, model: str | None = None) -> dict[str, str]:
    """Returns the compiled step and its prediction, as the files beside its trace. model: the declaration's name for
    its model."""
    text = programs["train"].as_text()
    prediction = predict(text, plan, estimate_step(plan).communication, model=model)
    return {TEXT: text, PREDICTED: prediction.model_dump_json() + "\n"}


def _named(first: int, last: int) -> str:
    """Returns "step 10" or "steps 10 to 13"."""
    return f"step {first}" if first == last else f"steps {first} to {last}"
