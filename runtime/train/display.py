"""Shows a run: a progress bar and a summary on a terminal, plain lines elsewhere; commands to try after the first."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from meshloom.compiler.core.console import Column, Console, Table
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import counted, human_parameters, human_seconds, human_share
from meshloom.compiler.declare.hydra_settings import RUN_DIR
from meshloom.compiler.declare.overrides import overridden_key
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.declare.task import TITLES, TaskKind, task_of, usual_rate
from meshloom.compiler.optim.configs import OptimizerConfig
from meshloom.compiler.plan import Plan

from ..processes.process_log import announce
from .metrics import Metrics
from .observer import ObservedRun, Observer

LARGE = 1_000_000_000  # parameters; the 25 MB of Python's library teach such a model nothing
TRY_NEXT = (
    ("try: other layout", "meshloom train sharding=fsdp_tensor num_microbatches=2 remat=full"),
    ("try: large model", "meshloom explain model=llama3_405b target=cpu-4096 global_batch_size=4096"),
    ("try: all options", "meshloom train --help all"),
)


class Display(Observer):
    """Shows the metrics of each step."""

    def __init__(self, console: Console, plan: Plan[RunSpec], *, first_step: int, token_unit: str):
        self.console, self.plan, self.token_unit = console, plan, token_unit
        self._bar = console.bar("step", "doing", "count", "bar", "numbers", "elapsed", "left")
        self._bar.update(first_step, total=plan.spec.num_steps)

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self:
        """Returns the display of a run; it shows nothing in processes other than the first."""
        return cls(run.console, run.plan, first_step=run.first_step, token_unit=run.data.token_unit)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def left(self, error: BaseException | None) -> None:  # noqa: ARG002
        self._bar.stop()

    def step_reported(self, metrics: Metrics) -> None:
        """Moves the bar, or without a terminal prints a line every `logging.every_num_steps` steps and for each
        evaluation."""
        numbers = f"loss {metrics.loss:.3f}  {metrics.tokens_per_second:,.0f} tokens/s"
        if metrics.mfu is not None:
            numbers += f"  MFU {human_share(metrics.mfu)}"
        spec = self.plan.spec
        self._bar.update(metrics.step, total=spec.num_steps, numbers=numbers)
        is_due = metrics.step % spec.logging.every_num_steps == 0 or metrics.step == spec.num_steps
        if is_due:
            more = f"grad_norm {metrics.grad_norm:.2f}  learning_rate {metrics.learning_rate:.1e}"
            line = f"step {metrics.step}/{spec.num_steps}  {numbers}  {more}  {human_seconds(metrics.step_seconds)}"
            announce(self.console, line, is_shown=not self.console.is_terminal)
        if metrics.eval_loss is not None:
            announce(
                self.console, f"step {metrics.step}: held-out loss {metrics.eval_loss:.3f} nats per {self.token_unit}"
            )


def show_header(console: Console, plan: Plan[RunSpec]) -> None:
    """Shows the run that is about to start, in one line, and its warnings."""
    steps = f"{counted(plan.spec.num_steps, 'step')} of {counted(plan.spec.tokens_per_step, 'token')}"
    model = f"{plan.num_parameters / 1e6:,.1f} M parameters"
    announce(console, f"meshloom train: {model}, {plan.mesh} on {plan.target.described}, {steps}")
    if plan.spec.chosen_here:
        announce(console, plan.spec.chosen_here)
    task = task_of(plan.spec.model_dump(mode="json", include={"objective", "adapter", "checkpoint"}))
    announce(console, _rate_line(plan.spec.optimizer, task))
    if plan.adapter:
        announce(console, f"adapter: {plan.adapter}; the others are frozen")
    if plan.flag_presets:
        announce(console, f"flag presets: {plan.flag_presets}")
    own, spec = warnings_of_demo_data(plan), plan.spec
    # `train` compiles the step without an artifact, and does not judge it.
    limits = {"overlap.max_exposed": spec.overlap.max_exposed}
    limits |= {"pipeline.max_bubble": spec.pipeline.max_bubble} if plan.pipeline else {}
    fix = "compile with the same line by `meshloom compile`, and train with artifact=RUN_DIR"
    limited = [key for key, limit in limits.items() if limit is not None and spec.artifact is None]
    own += [Problem(key, "is not judged by `meshloom train`", fix) for key in limited]
    for one in plan.model_flops.unknown:
        own.append(Problem("model.family", f"MFU is not reported: {one.name} at {one.place}: {one.why}", one.fix))
    for warning in (*plan.warnings, *own):
        announce(console, warning.as_warning())


def _rate_line(optimizer: OptimizerConfig, task: TaskKind) -> str:
    """Returns the learning rate, and whether it is the one that the task usually has."""
    rate = optimizer.learning_rate
    usual = f", usual for {TITLES[task]}; optimizer.learning_rate=... sets another"
    shown = re.sub(r"e([+-])0*", r"e\1", f"{rate:.3g}" if rate >= 1e-3 else f"{rate:.2e}".replace(".00e", "e"))
    return f"learning rate: {shown} at its peak{usual if rate == usual_rate(str(optimizer.name), task) else ''}"


def warnings_of_demo_data(plan: Plan[RunSpec]) -> list[Problem]:
    """Returns a warning if a large model would train on the default data, which are only meant for trying the loop."""
    num_steps = plan.spec.num_steps
    if plan.spec.data.source.kind != "python_stdlib" or plan.num_parameters < LARGE:
        return []
    what = (
        f"python_stdlib, the default, is the source text of Python's library as bytes, for {num_steps} steps "
        f"(num_steps={num_steps}): a model of {human_parameters(plan.num_parameters)} parameters on "
        f"{plan.target.name} learns nothing of use from it"
    )
    return [Problem("data", what, "choose your data, such as data=tokens data.source.directory=..., and num_steps=")]


def show_rows(console: Console, rows: list[tuple[str, str]]) -> None:
    """Shows names and values, one per line."""
    for name, value in rows:
        announce(console, f"{name}: {value}", is_shown=not console.is_terminal)
    if console.is_terminal:
        table = [[(name, "bold"), value] for name, value in rows]
        console.table(Table((Column(), Column(overflow="fold")), table))


def next_steps(
    run_dir: Path, overrides: Sequence[str], *, is_saved: bool, is_terminal: bool
) -> Sequence[tuple[str, str]]:
    """Returns rows for the summary of a run with commands to try; none without a terminal, in a directory that has
    other runs, or if the run directory is named, as a sweep does for its points. is_saved: it has a checkpoint."""
    is_named = RUN_DIR in map(overridden_key, overrides)
    if not is_terminal or is_named or run_dir.is_absolute():
        return ()
    first, *others = run_dir.parts
    others_too = (path for path in Path(first).glob("/".join("*" for _ in others) or ".") if path.is_dir())
    if any(not path.resolve().is_relative_to(run_dir.resolve()) for path in others_too):  # outputs/latest is no other
        return ()
    words = ["meshloom", "generate", str(run_dir), "prompt=def "]
    return [*([("try: its text", shlex.join(words))] if is_saved else []), *TRY_NEXT]
