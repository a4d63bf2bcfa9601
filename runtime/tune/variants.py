"""Composes the variants of a request, one for each combination of options of the searched groups.

Where they are too many to list, Optuna tries combinations. A trial is one combination, priced on all its meshes with
all its microbatches at once; its value is the best of these. Trials are saved in the run directory, so that the same
command in the same directory continues the search. The winner becomes a file of the config group `experiment`.

Several processes trace and estimate them, as JAX traces in Python, on one core per process; others compile the best.
"""

import gc
import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pebble import ProcessExpired, ProcessPool

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, raise_if_any
from meshloom.compiler.core.format import human_bytes, human_seconds
from meshloom.compiler.core.known import known
from meshloom.compiler.core.user_code import allowed_modules, code_allowed_from
from meshloom.compiler.declare.choices import as_config_file
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.compositions import compositions_kept
from meshloom.compiler.declare.overrides import parse_override
from meshloom.compiler.spec.plan_spec import PlanSpec
from meshloom.compiler.spec.target_spec import TargetSpec
from meshloom.compiler.tune.answer import TOO_LARGE, Answer, Estimated, Runner, value_of_variants
from meshloom.compiler.tune.space import GroupChoices, Variant, check_pins, num_points, product_of

from ..core.failures import RunFailed
from ..core.files import replace_text
from ..core.garbage import collect_seldom
from ..processes.devices import plan_without_devices
from ..processes.process_log import announce
from ..sweep.pool import OwnProcess, end_with
from ..sweep.rows import Outcome, Task, directory_name

T = TypeVar("T")
R = TypeVar("R")


SECONDS_PER_LINE = 15.0  # between two lines of progress, where there is no terminal


if TYPE_CHECKING:
    import optuna

JOURNAL = "optuna.jsonl"
PER_ROUND = 4  # trials that are requested at once, so that their programs are traced side by side
MOST_ASKED = 4  # times tune.num_trials: Optuna may propose a combination again
NUM_CHOSEN = 8  # best variants, which are then searched as a listed space is


@dataclass(frozen=True)
class Space:
    """The space of a request.

    request: the request without pins. pinned: the pins, as `tune.pin` holds them. groups: the options of each config
    group. choices: all combinations of options. variants: one for each combination; none if the space is too large to
    list. pins: the overrides that are not searched, as typed. about_num_candidates: the number of candidates before the
    rules, as if every variant had as many as the first.
    """

    request: Request
    spec: PlanSpec
    pinned: Mapping[str, Any]
    groups: Mapping[str, tuple[str, ...]]
    choices: tuple[GroupChoices, ...]
    variants: tuple[Variant, ...]
    pins: tuple[str, ...]
    about_num_candidates: int

    @property
    def is_listed(self) -> bool:
        """Returns True if all variants are searched."""
        return bool(self.variants)

    def variant(self, choices: GroupChoices) -> Variant:
        """Returns the variant of these options. Raises ConfigError if Hydra cannot compose it."""
        return _variant(self.request, choices, self.pinned)


def find_space(request: Request) -> Space:
    """Returns the space of a request. Raises ConfigError with all of its problems.

    A key that the user types is not searched: `remat=full`, `mesh.tensor=8` and `num_microbatches=1` are pins, like the
    keys of tune.pin.
    """
    declared = read_spec(request, then=lambda spec: spec)
    groups = dict(declared.tune.groups)
    typed = _typed_pins(request, groups)
    mesh = {**dict(declared.tune.pin.get("mesh", {})), **typed.get("mesh", {})}
    pinned = {**declared.tune.pin, **typed, **({"mesh": mesh} if mesh else {})}
    check_pins(pinned, tuple(groups))
    options = {group: (str(pinned[group]),) if group in pinned else found for group, found in groups.items()}
    kept = tuple(text for text in request.overrides if not _is_pin(text, groups))
    plain = replace(request, overrides=kept)
    every = tuple(product_of(options))
    with compositions_kept():
        first = _variant(plain, every[0], pinned)
        about = num_points(first) * len(every)
        is_listed = about <= declared.tune.max_candidates or len(every) == 1
        variants = (first, *(_variant(plain, choices, pinned) for choices in every[1:])) if is_listed else ()
    pins = tuple(text for text in request.overrides if _is_pin(text, groups))
    return Space(plain, first.spec, pinned, options, every, variants, pins, about)


def _variant(request: Request, choices: GroupChoices, pinned: Mapping[str, Any]) -> Variant:
    words = tuple(f"{group}={option}" for group, option in choices)
    try:
        spec = read_spec(replace(request, overrides=(*request.overrides, *words)), then=lambda spec: spec)
    except ConfigError as error:
        raise ConfigError([replace(each, where=f"tune.groups: {' '.join(words)}: {each.where}")
                           for each in error.problems]) from error  # fmt: skip
    return Variant(choices, spec.model_copy(update={"tune": spec.tune.model_copy(update={"pin": dict(pinned)})}))


def _is_pin(text: str, groups: Mapping[str, Sequence[str]]) -> bool:
    key = parse_override(text).key_or_group
    return key in groups or key == "num_microbatches" or key.startswith("mesh.")


def _typed_pins(request: Request, groups: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns the pins of the request, in the form of `tune.pin`."""
    found: dict[str, Any] = {}
    problems = []
    for text in request.overrides:
        parsed = parse_override(text)
        key, value = parsed.key_or_group, parsed.value()
        if key == "mesh":
            problems.append(Problem("mesh", "the mesh is searched", "pin an axis of it: mesh.tensor=8"))
        elif key.startswith("mesh."):
            if value == -1:
                problems.append(Problem(key, "-1 pins nothing", "leave it out, or give a size"))
            found.setdefault("mesh", {})[key.removeprefix("mesh.")] = value
        elif key in groups or key == "num_microbatches":
            found[key] = value
    raise_if_any(problems)
    return found


def write_experiment(space: Space, winner: Estimated, path: Path, why: str) -> None:
    """Writes the declaration of the winner: the typed overrides, and the searched ones."""
    typed = [text for text in space.request.overrides if not text.startswith(("hydra.", "tune."))]
    searched = [f"{key}={value}" for key, value in winner.candidate.values.items()]
    groups, values = as_config_file(space.request, [*typed, *searched])
    text = "# @package _global_\n" + "".join(f"# {line}\n" for line in why.splitlines())
    text += yaml.safe_dump({"defaults": groups}, sort_keys=False) + yaml.safe_dump(values, sort_keys=False)
    replace_text(path, text)


def choose_variants(space: Space, run: Runner, run_dir: Path, console: Console) -> tuple[Variant, ...]:
    """Returns the best variants that Optuna finds in `tune.num_trials`. Raises ConfigError if it is not installed."""
    tune = space.spec.tune
    number = min(tune.num_trials, len(space.choices))
    study = _open_study(space, run_dir / JOURNAL)
    values = {_choices(one.params): one.value for one in study.trials if one.value is not None}
    known = f"; {len(values):,} are known" * bool(values)
    tried = f"Optuna tries {number:,} of {len(space.choices):,} combinations of {', '.join(space.groups)}{known}"
    announce(console, f"about {space.about_num_candidates:,} candidates: {tried}")
    with compositions_kept():
        for _ in range(0, MOST_ASKED * tune.num_trials, PER_ROUND):
            if len(values) >= number:
                break
            _run_round(study, space, values, run, min(PER_ROUND, number - len(values)))
            announce(console, f"{len(values):,} of {number:,} tried; the best so far: {_best(values, tune.objective)}")
        return _chosen(space, values)


def _run_round(
    study: "optuna.Study", space: Space, values: dict[GroupChoices, float], run: Runner, number: int
) -> None:
    """Asks Optuna for some trials, and reports their values. A known trial is reported again."""
    import optuna  # noqa: PLC0415 (an extra)

    options = {group: optuna.distributions.CategoricalDistribution(found) for group, found in space.groups.items()}
    trials = [study.ask(dict(options)) for _ in range(number)]
    asked = [_choices(trial.params) for trial in trials]
    new = [choices for choices in dict.fromkeys(asked) if choices not in values]
    if new:
        values |= zip(new, value_of_variants([space.variant(choices) for choices in new], run), strict=True)
    for trial, choices in zip(trials, asked, strict=True):
        study.tell(trial, values[choices])


def _open_study(space: Space, journal: Path) -> "optuna.Study":
    """Returns the study of this space from the journal: the one that an earlier start has left, or a new one."""
    try:
        import optuna  # noqa: PLC0415 (an extra)
        from optuna.storages import JournalStorage  # noqa: PLC0415
        from optuna.storages.journal import JournalFileBackend  # noqa: PLC0415
    except ImportError:
        what = f"the space has about {space.about_num_candidates:,} candidates, more than tune.max_candidates="
        what += f"{space.spec.tune.max_candidates:,}, and Optuna, which searches such a space, is not installed"
        fix = "pip install 'meshloom[optuna]', narrow tune.groups or tune.mesh, or set tune.max_candidates"
        raise ConfigError([Problem("tune", what, fix)]) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    name = _identity(space)
    known = next((one.n_trials for one in optuna.get_all_study_summaries(storage) if one.study_name == name), 0)
    # The seed differs when a search continues: otherwise its first trials would be known ones.
    sampler = optuna.samplers.TPESampler(seed=known, constant_liar=True)
    return optuna.create_study(storage=storage, study_name=name, sampler=sampler, load_if_exists=True)


def _identity(space: Space) -> str:
    """Returns a name that only the same declaration with the same options has."""
    declared: Any = space.spec.model_dump(mode="json")
    for limit in ("num_trials", "num_shown", "num_compiled"):  # the same search may go on with more
        del declared["tune"][limit]
    text = json.dumps([declared, [list(choices) for choices in space.choices]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _choices(parameters: dict[str, str]) -> GroupChoices:
    return tuple(parameters.items())


def _best(values: dict[GroupChoices, float], objective: str) -> str:
    choices, value = min(values.items(), key=lambda item: item[1])
    if value >= TOO_LARGE:
        return "none fits yet"
    shown = human_bytes(int(value)) if objective == "memory" else human_seconds(value)
    return f"{shown}, {' '.join(f'{group}={option}' for group, option in choices)}"


def _chosen(space: Space, values: dict[GroupChoices, float]) -> tuple[Variant, ...]:
    """Returns the best of the tried variants, at most as many as a listed space may have."""
    order: Sequence[GroupChoices] = sorted(values, key=lambda choices: values[choices])
    found: list[Variant] = []
    left = space.spec.tune.max_candidates
    for choices in order[:NUM_CHOSEN]:
        variant = space.variant(choices)
        if found and num_points(variant) > left:
            break
        left -= num_points(variant)
        found.append(variant)
    return tuple(found)


def progress(console: Console, doing: str, done: Iterable[T], total: int) -> Iterator[T]:
    """Yields what is done, and shows how far it is: a bar on a terminal, and elsewhere a line now and then."""
    bar = console.bar(doing, "doing", "bar", "count", "elapsed", "left", is_transient=True)
    start = last = time.monotonic()
    bar.start()
    try:
        bar.update(0, total=total)
        for number, result in enumerate(done, start=1):
            bar.update(number, total=total)
            now = time.monotonic()
            if not console.is_terminal and now - last >= SECONDS_PER_LINE:
                announce(console, f"{doing}: {number} of {total}, {human_seconds(now - start)}")
                last = now
            yield result
    finally:
        bar.stop()


@contextmanager
def workers(target: TargetSpec, console: Console) -> Iterator[Runner]:
    """Yields a runner that maps functions over values, in one process per core, and shows how far it is."""
    context = multiprocessing.get_context("spawn")
    count = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    initargs = (os.getpid(), target, allowed_modules())
    pool = ProcessPool(count, initializer=_start, initargs=initargs, context=context)
    pool.schedule(os.getpid)  # they start now, and import while this process applies the rules

    def over(doing: str) -> Callable[[Callable[[T], R], Sequence[T]], Iterator[R]]:
        def mapped(function: Callable[[T], R], values: Sequence[T]) -> Iterator[R]:
            def results() -> Iterator[R]:  # waits for the first one, so it begins within the bar
                yield from pool.map(function, values).result()

            return progress(console, doing, results(), len(values)) if values else iter(())

        return mapped

    try:
        yield Runner(over("tracing programs"), over("estimating the best"))
    except ProcessExpired as error:
        what, fix = "a process that traces candidates died", "look for what ended it: it may be a lack of memory"
        raise RunFailed(Problem("tune", what, fix), exit_code=1) from error
    finally:
        pool.stop()  # does not wait: a trace that runs when Ctrl-C is pressed takes seconds
        pool.join()


def _start(parent: int, target: TargetSpec, allowed: tuple[str, ...]) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the command, which ends this
    code_allowed_from(allowed).__enter__()  # as long as the process lives
    plan_without_devices(target)
    gc.freeze()  # all imported objects
    collect_seldom()


@dataclass(frozen=True)
class CompiledCandidate:
    """One of the best candidates, and the outcome of compiling it. directory: relative to the search's."""

    one: Estimated
    outcome: Outcome
    directory: str

    @property
    def seconds(self) -> float | None:
        """Returns the predicted step time; None if the candidate does not fit."""
        figures = self.outcome.figures
        return known(figures.step_seconds) if figures and self.outcome.status == "done" else None


def compile_best(space: Space, answer: Answer, run_dir: Path, console: Console) -> tuple[CompiledCandidate, ...]:
    """Compiles the first `tune.num_compiled` of the answer, each in a process of its own, which may abort."""
    ones = answer.best[: space.spec.tune.num_compiled]
    return tuple(progress(console, "compiling the best", _compiled(space, ones, run_dir), len(ones)))


def _compiled(space: Space, ones: tuple[Estimated, ...], run_dir: Path) -> Iterator[CompiledCandidate]:
    for one in ones:
        name = directory_name(one.candidate.overrides)
        request = replace(space.request, overrides=(*space.request.overrides, *one.compile_overrides))
        task = Task("compile", request, allowed_modules(), run_dir.resolve() / name)
        yield CompiledCandidate(one, OwnProcess(task, None).run(), name)


def best_compiled(compiled: tuple[CompiledCandidate, ...]) -> CompiledCandidate | None:
    """Returns the candidate with the shortest predicted step of those that fit; None if none does."""
    done = [(seconds, n) for n, one in enumerate(compiled) if (seconds := one.seconds) is not None]
    return compiled[min(done)[1]] if done else None
