"""Makes the tables that can run the declared pipeline: of a schedule, a file or a class; or tells why there is none.

pipeline=zb_h1 pipeline.ticks=auto   ->  a table for each form of ticks, by what a reason calls it
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshloom.models import Model

from ..core.errors import ConfigError, Problem, raise_if_any
from ..core.format import be, counted
from ..core.partition_spec import STAGE
from ..core.user_code import blamed_on_user
from ..core.user_imports import is_class_path, load_class
from ..pipeline.own_schedule import OwnSchedule, own_tables
from ..pipeline.schedules import SCHEDULES, build_table
from ..pipeline.table import PipelineTable, StagePlacement, TickForm, microbatches
from ..pipeline.table_file import read_table
from ..spec.plan_spec import PlanSpec
from ..target.mesh import MeshPlan
from .stage_times import recomputes_layers

KEY, TABLE = f"mesh.{STAGE}", "pipeline.table"
TablesByLabel = Mapping[str, PipelineTable]  # by what a reason calls them
ALONE = "ticks with recomputation apart"  # R is an operation of its own


def read_tables(spec: PlanSpec, mesh: MeshPlan, model: Model) -> TablesByLabel:
    """Returns the tables that can run the declared pipeline; none without stages. Raises ConfigError with all problems
    of a declaration that no pipeline can run."""
    if mesh.sizes[STAGE] == 1:
        return {}
    problems, tables = list(_unused(spec)), dict[str, PipelineTable]()
    if not spec.pipeline.table:
        numbers = (mesh.sizes[STAGE], spec.pipeline.num_chunks, spec.num_microbatches)
        lacks = SCHEDULES[spec.pipeline.schedule].requirement(*numbers)
        problems += [] if lacks is None else [Problem("pipeline.schedule", *lacks)]
    try:
        tables = _own(spec, mesh) if spec.pipeline.table else {} if problems else _candidates(spec, mesh)
    except ConfigError as error:
        problems += error.problems
    num_chunks = next((each.placement.num_chunks for each in tables.values()), spec.pipeline.num_chunks)
    raise_if_any([*_problems_of_model(spec, mesh, model, num_chunks), *problems])
    return tables


def layers_stay(spec: PlanSpec, model: Model, tables: Callable[[], TablesByLabel]) -> bool:
    """Returns True if the state can hold the layers of each stage on that stage: all virtual stages have as many. Else
    it splits another dimension of their weights over the stages. tables: `read_tables`, which tells what is wrong."""
    stack, *others = model.stacks
    if others or spec.pipeline.layers != "even":
        return False
    try:
        return all(stack.num_layers % table.placement.num_virtual == 0 for table in tables().values())
    except ConfigError:
        return True


def _candidates(spec: PlanSpec, mesh: MeshPlan) -> TablesByLabel:
    """Returns the tables of the declared schedule, by the form of their ticks."""
    chosen = spec.pipeline
    forms = [form for form in TickForm if chosen.ticks in ("auto", form.value)]
    made = {f"{form} ticks": (form, False) for form in forms}
    if recomputes_layers(spec.remat):
        apart = [form for form in forms if form == TickForm.UNIT or chosen.ticks == "auto"]
        made |= {f"{form} {ALONE}": (form, True) for form in apart}
    size = (mesh.sizes[STAGE], chosen.num_chunks, spec.num_microbatches)
    return {label: build_table(chosen.schedule, *size, form, alone) for label, (form, alone) in made.items()}


def _own(spec: PlanSpec, mesh: MeshPlan) -> TablesByLabel:
    """Returns the tables of the user's file or class. Raises ConfigError if they are wrong, or are not of this mesh and
    these microbatches."""
    path, ticks = str(spec.pipeline.table), spec.pipeline.ticks
    form = None if ticks == "auto" else TickForm(ticks)
    if is_class_path(path):
        kind: Any = load_class(path, TABLE, OwnSchedule)
        size = (mesh.sizes[STAGE], spec.pipeline.num_chunks, spec.num_microbatches)
        with blamed_on_user(TABLE, f"{path}().orders{size}", is_theirs=True):
            made = kind().orders(*size)
        tables = own_tables(made, StagePlacement(*size[:2], kind.is_v), path, TABLE, form)
    else:
        tables = {f"pipeline.table={path}": read_table(Path(path), form)}
    table, problems = next(iter(tables.values())), list[Problem]()
    if (num_stages := table.placement.num_stages) != mesh.sizes[STAGE]:
        what = f"{path} has {counted(num_stages, 'stage')}, and the mesh has {mesh.sizes[STAGE]}"
        problems.append(Problem(TABLE, what, f"set {KEY}={num_stages}, or name another table"))
    if table.num_microbatches != spec.num_microbatches:
        what = f"{path} has {microbatches(table.num_microbatches)}, and the declaration has {spec.num_microbatches}"
        fix = f"set num_microbatches={table.num_microbatches}, or name another table"
        problems.append(Problem(TABLE, what, fix))
    raise_if_any(problems)
    return tables


def _problems_of_model(spec: PlanSpec, mesh: MeshPlan, model: Model, num_chunks: int) -> Iterator[Problem]:
    """Yields why the layers of a model cannot be split over stages."""
    num_layers, num_stages = sum(stack.num_layers for stack in model.stacks), mesh.sizes[STAGE]
    num_parts, declared = num_stages * num_chunks, spec.pipeline.layers
    if isinstance(declared, tuple):
        if len(declared) != num_parts or sum(declared) != num_layers:
            has = f"{counted(sum(declared), 'layer')} in {counted(len(declared), 'part')}"
            what = f"has {has}, and {counted(num_layers, 'layer')} run in {counted(num_parts, 'part')}"
            fix = f"give a number for each stage{' and chunk' if num_chunks > 1 else ''}, in the order of the model"
            yield Problem("pipeline.layers", what, f"{fix}, or even")
    elif num_layers < num_parts:
        parts = counted(num_stages, "stage") + (f" of {counted(num_chunks, 'chunk')} each" if num_chunks > 1 else "")
        what = f"{parts} {be(num_stages)} more than the {counted(num_layers, 'layer')} of the model"
        yield Problem(KEY, what, _fewer_parts(spec, mesh, num_layers, num_chunks))


def _fewer_parts(spec: PlanSpec, mesh: MeshPlan, num_layers: int, num_chunks: int) -> str:
    """Returns the fix for more parts than layers: fewer chunks where they can be chosen, or fewer stages."""
    if spec.pipeline.table:
        return f"name a table of at most {counted(num_layers, 'part')}"
    fewer = num_layers // mesh.sizes[STAGE]
    if SCHEDULES[spec.pipeline.schedule].num_chunks is None and fewer >= 2:
        return f"use pipeline.num_chunks={fewer}, or fewer stages"
    fits = (size for size in range(num_layers // num_chunks, 1, -1) if mesh.num_devices % size == 0)
    return f"use {KEY}={next(fits, 1)}"


def _unused(spec: PlanSpec) -> Iterator[Problem]:
    """Yields settings that a pipeline would not follow: it has its own order of layers and microbatches."""
    loop = spec.overlap.layers
    values = {
        "prefetch": (loop.prefetch, 0, "gathers weights as pipeline.gather says"),
        "unroll": (loop.unroll, 1, "runs the layers of a stage one by one"),
        "reduce_in_backward": (loop.reduce_in_backward, False, "reduces gradients after its last microbatch"),
    }
    for name, (value, plain, why) in values.items():
        if value != plain:
            fix = f"set overlap.layers.{name}={str(plain).lower()}, or choose overlap=xla"
            yield Problem(f"overlap.layers.{name}", f"is {str(value).lower()}, and a pipeline {why}", fix)
