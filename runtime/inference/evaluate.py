"""Evaluates weights: their loss on any data, on any mesh, by the evaluate program alone."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, all_of
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.xla.programs import Programs, lower

from ..core.failures import NONFINITE, RunFailed
from ..data.splits import EvaluatedData, EvaluatedPart, open_evaluated
from ..data.tokenizers import Tokenizer
from ..processes.agreement import check_same_data
from ..train.feed import in_token_order, local_rows, sequences_of, to_devices
from .generation_job import tokenizer_of
from .harness import TaskResults, find_tasks, run_tasks
from .open_weights import Session, compile_programs, open_weights, place_of_weights, start_session

EVALUATE = "evaluate"
TargetUnit = Literal["byte", "token"]


@dataclass(frozen=True)
class PartLoss:
    """The loss of one part of the data. name: "data", or a part of a mixture. loss: mean cross-entropy in nats per
    target; None without a target. num_targets: tokens that have a loss."""

    name: str
    loss: float | None
    num_targets: int
    num_sequences: int
    unit: TargetUnit

    @property
    def perplexity(self) -> float | None:
        """Returns e to the loss; infinity where that is too large for a float."""
        if self.loss is None:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Returns the loss in bits; None where a token is not a byte."""
        return self.loss / math.log(2) if self.loss is not None and self.unit == "byte" else None

    def __str__(self) -> str:
        many = f"{counted(self.num_targets, 'target')} in {counted(self.num_sequences, 'sequence')}"
        if self.loss is None or self.perplexity is None:
            return f"no loss: no token has a target ({many})"
        bits = f", {self.bits_per_byte:.4f} bits per byte" if self.bits_per_byte is not None else ""
        return f"loss {self.loss:.4f} nats per {self.unit}, perplexity {self.perplexity:.4g}{bits} ({many})"


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of weights. place, step: where they came from. losses: of the whole, then of each source of a
    mixture."""

    place: str
    step: int | None
    split: str
    losses: tuple[PartLoss, ...]
    seconds: float

    @property
    def loss(self) -> float | None:
        """Returns the mean loss of the whole, in nats per target."""
        return self.losses[0].loss

    @property
    def json(self) -> dict[str, Any]:
        """Returns what `--json` prints; a number that is not finite is null."""
        return {
            "schema_version": 1,
            "weights": {"place": self.place, "step": self.step},
            "split": self.split,
            "losses": [
                {
                    "name": each.name, "loss": _finite(each.loss), "perplexity": _finite(each.perplexity),
                    "bits_per_byte": _finite(each.bits_per_byte), "num_targets": each.num_targets,
                    "num_sequences": each.num_sequences,
                }
                for each in self.losses
            ],
            "seconds": round(self.seconds, 3),
        }  # fmt: skip

    @property
    def lines(self) -> tuple[str, ...]:
        """Returns the losses as lines for people."""
        return tuple(f"{self.split if each.name == 'data' else each.name}: {each}" for each in self.losses)

    def __repr__(self) -> str:
        return f"<Evaluation: {self.lines[0]}>"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class EvaluationJob:
    """An evaluation that passed all checks of its declaration: on data, or of tasks with a tokenizer."""

    session: Session
    data: EvaluatedData | None
    tokenizer: Tokenizer | None


def prepare_evaluation(spec: RunSpec, warn: Callable[[str], None] = write_error) -> EvaluationJob:
    """Checks everything that can fail because of the declaration. Raises ConfigError with all problems."""
    has_tasks = bool(spec.evaluation.tasks)
    if has_tasks:  # each row holds one text, from its first token on
        unpacked = spec.data.model_copy(update={"packing": "concatenate", "isolate_documents": False})
        spec = spec.model_copy(update={"data": unpacked})
    data, tokenizer, *_ = all_of(
        lambda: None if has_tasks else open_evaluated(spec),
        lambda: tokenizer_of(spec.data) if has_tasks else None,
        lambda: find_tasks(spec.evaluation) if has_tasks else None,
        lambda: plan_run(spec),
        lambda: place_of_weights(spec.checkpoint),
    )
    if spec.has_pairs:
        what = "compares the two texts of a pair, and an evaluation gives the loss of each text"
        raise ConfigError([Problem("objective", what, "leave it out")])
    session = start_session(spec, warn)
    if has_tasks and session.processes.count > 1:
        what = f"lm-evaluation-harness runs in one process, and there are {session.processes.count}"
        raise ConfigError([Problem("evaluation.tasks", what, "start one process for all devices of a host")])
    check_same_data(data.identity if data else {}, session.processes)
    return EvaluationJob(session, data, tokenizer)


def evaluate_weights(job: EvaluationJob, console: Console) -> Evaluation | TaskResults:
    """Opens the weights, compiles one program, and returns the losses, the same in all processes, or the results of
    tasks. Raises RunFailed if a loss is not finite."""
    if job.data is None:
        assert job.tokenizer is not None
        return run_tasks(job.session, job.tokenizer, console)
    session, plan, unit, began = job.session, job.session.plan, job.data.unit, time.perf_counter()
    weights = open_weights(session, console, job.data.identity)
    programs = compile_programs(
        session, lambda: lower(plan, session.mesh, (EVALUATE,)), "compiling the evaluation", console
    )
    losses = tuple(_loss(part, weights.params, job, unit, programs, console) for part in job.data.parts)
    seconds = time.perf_counter() - began
    found = Evaluation(weights.place, weights.step, plan.spec.evaluation.split, losses, seconds)
    for each in losses:
        if each.loss is not None and not math.isfinite(each.loss):
            what = f"the loss of {each.name} is {each.loss}"
            fix = "choose an earlier checkpoint, RUN/checkpoints/STEP, or precision=float32"
            raise RunFailed(Problem(weights.place, what, fix), NONFINITE)
    return found


def _loss(
    part: EvaluatedPart, params: Any, job: EvaluationJob, unit: TargetUnit, programs: Programs, console: Console
) -> PartLoss:
    plan, batch = job.session.plan, programs.batch
    rows = local_rows(batch)
    order = plan.batch.token_order.of_sequence(plan.spec.sequence_length)
    mine = part.batches.of_rows(sequences_of(plan.batch.row_order, rows))
    sums, bar = np.zeros(2), console.bar(f"evaluating {part.name}", "doing", "bar", "count", "numbers", "left")
    bar.start()
    try:
        # One at a time: with many in flight on CPU, several processes were seen to hang.
        for number, each in enumerate(mine, 1):
            placed = to_devices(batch, rows, in_token_order(each, order))
            sums += jax.device_get(programs[EVALUATE](params, placed))
            bar.update(number, total=len(mine), numbers=f"loss {sums[0] / max(sums[1], 1):.4f}")
    finally:
        bar.stop()
    loss = float(sums[0] / sums[1]) if sums[1] else None
    return PartLoss(part.name, loss, round(sums[1]), part.num_sequences, unit)
