"""Runs tasks of lm-evaluation-harness on opened weights, through its model interface.

    pip install 'meshloom[evals]'
    meshloom evaluate RUN tasks=[arc_easy] sequence_length=1024

A request is a context and a continuation, whose log-probability and greediness are asked for. Each is a row of a batch:
targets are the continuation's alone, cut at the left to `sequence_length`. One program scores all of them, on any mesh.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any, use_one_of
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.sections import EVALUATION, EvaluationSpec
from meshloom.compiler.xla.programs import Programs, lower
from meshloom.models import IGNORED_TARGET

from ..core.stderr_capture import captured_stderr
from ..data.tokenizers import Tokenizer
from ..processes.process_log import announce
from ..train.feed import in_token_order, local_rows, sequences_of, to_devices
from .generate import Completion, Generator
from .generation_job import DeclaredPrompt, PromptMaker
from .open_weights import OpenedWeights, Session, compile_programs, open_weights

SCORES = "scores"
DEFAULT_MAX_TOKENS = 256  # of a completion, where a task names none; the harness's own


@dataclass(frozen=True)
class Query:
    """A row to score. tokens: of context and continuation. num_scored: the last tokens, those of the continuation."""

    tokens: tuple[int, ...]
    num_scored: int


@dataclass
class Scorer:
    """Scores rows by one compiled program. num_cut: rows whose context was cut at the left."""

    session: Session
    weights: OpenedWeights
    programs: Programs
    num_cut: int = 0

    def score(self, requests: Sequence[Query], console: Console) -> list[tuple[float, bool]]:
        """Returns the summed log-probability of each continuation, in nats, and whether it is the greedy one."""
        size = self.session.plan.spec.global_batch_size
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].tokens))
        found: dict[int, tuple[float, bool]] = {}
        bar = console.bar("scoring", "doing", "bar", "count", "left")
        bar.start()
        try:
            for first in range(0, len(order), size):
                places = order[first : first + size]
                log_probs, misses = self._score_batch([requests[i] for i in places])
                found |= {i: (float(log_probs[row]), not misses[row]) for row, i in enumerate(places)}
                bar.update(len(found), total=len(requests))
        finally:
            bar.stop()
        return [found[i] for i in range(len(requests))]

    def _score_batch(self, requests: Sequence[Query]) -> np.ndarray:
        plan, batch = self.session.plan, self.programs.batch
        length = plan.spec.sequence_length
        shape = (plan.spec.global_batch_size, length)
        inputs, targets = np.zeros(shape, np.int32), np.full(shape, IGNORED_TARGET, np.int32)
        for row, request in enumerate(requests):
            tokens = request.tokens[-(length + 1) :]
            self.num_cut += len(tokens) < len(request.tokens)
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            scored = min(request.num_scored, len(tokens) - 1)
            targets[row, len(tokens) - 1 - scored : len(tokens) - 1] = tokens[len(tokens) - scored :]
        rows = local_rows(batch)
        numbers = list(sequences_of(plan.batch.row_order, rows))
        mine = {"inputs": inputs[numbers], "targets": targets[numbers]}
        placed = to_devices(batch, rows, in_token_order(mine, plan.batch.token_order.of_sequence(length)))
        return np.asarray(jax.device_get(self.programs[SCORES](self.weights.params, placed)))


@dataclass(frozen=True)
class TaskResults:
    """Results of tasks. metrics: by task and metric. num_cut: requests whose context was cut. more: for the record."""

    place: str
    step: int | None
    metrics: dict[str, dict[str, Any]]
    num_cut: int
    version: str
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {
            "schema_version": 1,
            "weights": {"place": self.place, "step": self.step},
            "tasks": self.metrics,
            "num_cut": self.num_cut,
            "lm_eval": self.version,
            **self.more,
        }

    @property
    def lines(self) -> Iterator[str]:
        """Yields a line for each task."""
        for task, metrics in self.metrics.items():
            shown = (f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, float))
            yield f"{task}: {', '.join(shown)}"


def find_tasks(settings: EvaluationSpec) -> Any:
    """Returns the harness's manager of the tasks that the declaration names. Raises ConfigError if the harness is not
    installed, or a task does not exist."""
    if settings.tasks_path is not None and not Path(settings.tasks_path).is_dir():
        what = f"there is no directory {settings.tasks_path}"
        raise ConfigError([Problem(f"{EVALUATION}.tasks_path", what, "name a folder of task files in YAML")])
    try:
        of_tasks: Any = import_module("lm_eval.tasks")
    except ImportError as error:
        what = f"the tasks are lm-evaluation-harness's, and it is not installed: {error}"
        raise ConfigError([Problem(f"{EVALUATION}.tasks", what, "pip install 'meshloom[evals]'")]) from error
    with captured_stderr():
        manager = of_tasks.TaskManager(include_path=settings.tasks_path, include_defaults=settings.tasks_path is None)
        if not set(settings.tasks) <= set(manager.all_tasks):
            manager = of_tasks.TaskManager(include_path=settings.tasks_path)  # reads thousands of files
    known = manager.all_tasks
    problems = []
    for task in settings.tasks:
        if task not in known:
            nearest = use_one_of(task, known).partition("use one of")[0]
            fix = f"{nearest}`lm_eval ls tasks` lists all; {EVALUATION}.tasks_path=DIR adds your own"
            problems.append(Problem(f"{EVALUATION}.tasks", f"there is no task '{task}'", fix))
    raise_if_any(problems)
    return manager


def run_tasks(session: Session, tokenizer: Tokenizer, console: Console) -> TaskResults:
    """Opens the weights, compiles the scoring program alone, and runs the declared tasks."""
    lm_eval: Any = import_module("lm_eval")  # an extra
    harness_model = import_module(".harness_model", __package__)  # imports the extra
    plan, settings = session.plan, session.plan.spec.evaluation
    manager = find_tasks(settings)
    weights = open_weights(session, console)
    programs = compile_programs(
        session, lambda: lower(plan, session.mesh, (SCORES,)), "compiling the scoring of rows", console
    )
    scorer = Scorer(session, weights, programs)
    model = harness_model.HarnessModel(scorer, tokenizer, console)
    try:
        with captured_stderr():  # bars, warnings of each default of a task, and git's complaints
            found = lm_eval.simple_evaluate(
                model=model, tasks=list(settings.tasks), num_fewshot=settings.num_fewshot, limit=settings.num_examples,
                task_manager=manager, bootstrap_iters=0, log_samples=False, random_seed=plan.spec.seed,
            )  # fmt: skip
    except OSError as error:  # all that `datasets` raises for data that are not there
        what = f"the data of a task cannot be read: {str(error).splitlines()[0]}"
        fix = "let this machine reach the Hugging Face Hub once, or name tasks of files of your own by tasks_path"
        raise ConfigError([Problem(f"{EVALUATION}.tasks", what, fix)]) from error
    if scorer.num_cut:
        rows = counted(scorer.num_cut, "request")
        announce(console, f"warning: {rows} cut at the left to sequence_length={plan.spec.sequence_length}")
    return TaskResults(
        weights.place, weights.step, _metrics(found["results"]), scorer.num_cut, lm_eval.__version__,
        {"num_fewshot": settings.num_fewshot, "num_examples": settings.num_examples},
    )  # fmt: skip


def _metrics(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns results by task and metric, without the harness's errors of means that are not computed."""
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in metrics.items()
            if isinstance(value, int | float) and "_stderr" not in name
        }
        for task, metrics in results.items()
    }


def complete(scorer: Scorer, tokenizer: Tokenizer, prompts: Sequence[str], wanted: dict[str, Any]) -> list[str]:
    """Returns the continuation of each prompt. wanted: the harness's settings: until, max_gen_toks, temperature, .."""
    session, settings = scorer.session, scorer.session.plan.spec.generate
    until = wanted.get("until") or []
    is_sampled = bool(wanted.get("do_sample", wanted.get("temperature", 0)))
    settings = settings.model_copy(
        update={
            "stop": (until,) if isinstance(until, str) else tuple(text for text in until if text),
            "max_new_tokens": int(wanted.get("max_gen_toks", wanted.get("max_new_tokens", DEFAULT_MAX_TOKENS))),
            "temperature": float(wanted.get("temperature", 1.0)) if is_sampled else 0.0,
            "top_k": wanted.get("top_k") or None,
            "top_p": wanted.get("top_p") or None,
        }
    )
    maker = PromptMaker.of(session.plan.spec, tokenizer)
    ends, quiet = maker.ends(is_chat=False), Console(is_quiet=True)
    generator = Generator(session, scorer.weights.params, tokenizer, ends, quiet)
    events = generator.run([maker.make(DeclaredPrompt("a task", text)) for text in prompts], settings)
    texts = {each.number: each.text for each in events if isinstance(each, Completion)}
    return [texts[number] for number in range(len(prompts))]
