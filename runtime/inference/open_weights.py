"""Opens the weights alone of a declaration, on any mesh: no optimizer state, no gradients.

    session = start_session(spec)                      devices are there, and the plan
    weights = open_weights(session, console)           weights.params, as planned; from where they came
    programs = compile_programs(session, lower, ...)   the programs that are asked for, and no train step

The weights are those of `checkpoint.weights_from`: a run, one of its checkpoints, or published files.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.places import is_published
from meshloom.compiler.core.visible import write_error
from meshloom.compiler.declare.run_spec import CheckpointSpec, RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.xla.programs import Programs

from ..checkpoint.adapters import find_saved, load_parameters, read_base
from ..checkpoint.find import describe_damage
from ..checkpoint.meaning import meaning_of
from ..compile.artifact import cached_compilation
from ..compile.run_programs import WatchedBuild, check_devices, check_program_memory, mesh_of, smaller_types
from ..compile.watched import LOWER, Phases
from ..processes.agreement import check_same_declaration, check_same_program
from ..processes.devices import start_devices
from ..processes.distributed import COMPILED, Processes, join, together
from ..processes.process_log import announce
from ..start.state import checkpoint_of_first
from ..weights.find import describe_weights, find_weights
from ..weights.load import load_adapted, load_params
from .run_request import WEIGHTS_FROM


@dataclass(frozen=True)
class Session:
    """A plan on the devices that it needs, in all processes. said: lines that were printed while devices were found."""

    plan: Plan[RunSpec]
    mesh: Mesh
    processes: Processes
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpenedWeights:
    """Parameters on the devices. place: where they came from. step: of a run's checkpoint; None for published files.
    base: the place of the base of a run's adapter; None if there is no adapter, or its base was drawn."""

    params: Any
    place: str
    step: int | None
    base: str | None = None


def start_session(spec: RunSpec, warn: Callable[[str], None] = write_error) -> Session:
    """Returns the plan of a declaration, with its devices started. Raises ConfigError for a declaration that cannot be
    planned or names no weights, RunFailed if the parameters alone need more memory than there is.

    warn: takes a warning about attached devices.
    """
    try:
        processes = join(spec.distributed, spec.target)
    except ConfigError:
        plan_run(spec)  # raises its own problems, which explain more
        raise
    check_same_declaration(spec, processes)
    said = start_devices(spec.target, processes, warn)
    place_of_weights(spec.checkpoint)
    plan = plan_run(spec)
    if spec.on_out_of_memory == "refuse":
        needed = plan.memory.parameters + plan.memory.batch
        types = smaller_types(plan.spec.precision, is_adapted=bool(plan.model.adapters))
        check_devices(plan.target, needed, "for parameters and batch alone", processes, types)
    return Session(plan, mesh_of(plan), processes, said)


def open_weights(
    session: Session, console: Console, identity: Mapping[str, Any] | None = None
) -> OpenedWeights:  # fmt: skip
    """Returns the weights that the declaration names, laid out as planned; says where they come from, and what is
    declared otherwise than they were trained. identity: of the tokenizer that is used with them, by key.

    Raises ConfigError in all processes for weights of another model, and RunFailed if every checkpoint is damaged.
    """
    plan, mesh = session.plan, session.mesh
    place = place_of_weights(plan.spec.checkpoint)
    if plan.spec.chosen_here:
        announce(console, plan.spec.chosen_here)
    if is_published(place):
        published = together("published weights", lambda: find_weights(plan), processes=session.processes)
        assert published is not None
        for line in describe_weights(published):
            announce(console, line)
        return OpenedWeights(load_params(plan, mesh, published, console), place, None)
    start = checkpoint_of_first(lambda: find_saved(place, WEIGHTS_FROM), session.processes)
    assert start is not None
    if start.damaged:
        announce(console, f"warning: damaged, so an older one is used: {describe_damage(start.damaged)}")
    announce(console, f"weights: step {start.step} of {place}")
    for line in meaning_of(start.path).differences(plan.spec.as_written(), identity):
        announce(console, line)
    if plan.model.adapters:
        params = load_adapted(plan, mesh, start, console)
        return OpenedWeights(params, place, start.step, plan.spec.checkpoint.base_from or read_base(start)["place"])
    abstract = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        plan.abstract["params"],
        plan.specs["params"],
    )
    return OpenedWeights(load_parameters(start, abstract), place, start.step)


def place_of_weights(checkpoint: CheckpointSpec) -> str:
    """Returns the place of the declared weights. Raises ConfigError if there is none."""
    if checkpoint.weights_from is None:
        fix = "set it to RUN, RUN/checkpoints/STEP or hf:DIR"
        raise ConfigError([Problem(WEIGHTS_FROM, "names no weights to open", fix)])
    return checkpoint.weights_from


def compile_programs(session: Session, lower: Callable[[], Programs], doing: str, console: Console) -> Programs:
    """Returns compiled programs, in all processes at once. lower: traces and lowers them. doing: for the terminal, as
    "compiling the evaluation". Raises RunFailed if one needs more memory than there is; a compiler that fails leaves
    its log in the folder that the error names."""
    plan, processes = session.plan, session.processes
    with _folder_of_log() as folder, Phases(console, doing) as phases:
        compile_ = WatchedBuild(folder / "compiler.log", phases)
        phases.begin(LOWER)
        lowered = lower()
        check_same_program(lowered, processes)

        def made() -> Programs:
            programs = compile_(lowered)
            for name, program in programs.items():
                check_program_memory(plan, program, processes, f"program `{name}`")
            return programs

        # JAX's own cache serves process 0 alone, and the others would be minutes behind it.
        with cached_compilation(plan.spec.compilation_cache if processes.count == 1 else None):
            timeout = plan.spec.distributed.compile_timeout_seconds
            return together(COMPILED, made, processes=processes, timeout_seconds=timeout)


@contextmanager
def _folder_of_log() -> Iterator[Path]:
    """Yields a folder that is removed afterwards, unless something failed."""
    folder = Path(tempfile.mkdtemp(prefix="meshloom-"))
    yield folder
    shutil.rmtree(folder)
