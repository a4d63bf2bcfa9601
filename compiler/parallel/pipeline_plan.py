"""Plans the pipeline of a declaration: the table that its stages run, with which layers and which head, and why.

mesh.stage=4 pipeline=1f1b num_microbatches=8  ->  PipelinePlan(table of 4 stages and 8 microbatches, ..)
mesh.stage=1                                   ->  None
pipeline=zb_h1 pipeline.ticks=auto             ->  a table for each form of ticks, of which one is chosen

A stage gathers the weights of its layers once per step, or where each layer is used:

step   whole weights of the stage, and their gradients accumulated whole in it: little is sent, much is held
use    each layer gathers its weights in its forward pass and again in each part of its backward pass, and reduces its
       gradient there: sent for each microbatch, accumulated as shards
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from meshloom.models import Model

from ..core.errors import ConfigError, Problem, raise_if_any
from ..core.format import be, counted, human_bytes, human_seconds, human_share
from ..core.partition_spec import STAGE
from ..core.user_code import blamed_on_user, is_class_path, load_class
from ..pipeline.buffers import buffer_bytes
from ..pipeline.makespan import AS_SHORT, ChosenTable, TableTime, choose_table
from ..pipeline.own_schedule import OwnSchedule, own_tables
from ..pipeline.schedules import SCHEDULES, build_table
from ..pipeline.stage_layers import StageLayers, layers_of, split_evenly
from ..pipeline.table import PipelineTable, StagePlacement, TickForm, max_in_flight_of, microbatches
from ..pipeline.table_file import read_table
from ..sharding.arrays import EXPERTS
from ..sharding.rules import ArrayPlan
from ..sharding.sharding import gathered_bytes
from ..spec.pipeline_spec import HeadPlace, PipelineSpec
from ..spec.plan_spec import PlanSpec
from ..target.mesh import MeshPlan
from .operation import OpInputs
from .shared_head import why_not_shared
from .stage_times import StageTimes, plan_slot_bytes, plan_stage_times, recomputes_layers, x_bytes

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


UNDECLARED = {  # of conf/config.yaml and conf/pipeline/_base.yaml: what nobody chose where there are no stages
    "schedule": "1f1b",
    "layers": "even",
    "ticks": "auto",
    "head": "last",
    "gather": "auto",
    "table": None,
    "max_bubble": None,
}
LAST: Literal["last"] = "last"
STAGES: Literal["stages"] = "stages"


@dataclass(frozen=True)
class HeadChoice:
    """The stages that run the head, and why. place: `LAST`, the one of the last virtual stage, or `STAGES`, all of them
    (shared_head.py)."""

    place: HeadPlace
    reason: str

    @property
    def how(self) -> str:
        """Returns what runs and why, in words."""
        where = "over all stages, a part of the vocabulary on each" if self.place == STAGES else "on the last stage"
        return f"{where}: {self.reason}"


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline. layers: of each virtual stage. time: of the table, by the arithmetic of its layers and head and the
    permutes between stages. reason: why it runs by this table. head: which stages run the head, and why."""

    table: PipelineTable
    layers: StageLayers
    time: TableTime
    reason: str
    head: HeadChoice

    @property
    def shares_head(self) -> bool:
        return self.head.place == STAGES

    @property
    def how(self) -> str:
        """Returns what runs and why, in words."""
        of, over = microbatches(self.table.num_microbatches), counted(self.num_stages, "stage")
        bubble = f"bubble about {human_share(self.bubble)}"
        return f"{self.table.name} of {of} over {over}, {bubble}: {self.reason}"

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Returns for each stage the most chunks that it holds for a backward pass, each for one microbatch. All stages
        have room for as many as the one with most, as they run one program."""
        return max_in_flight_of(self.table)

    @property
    def num_stages(self) -> int:
        return self.table.placement.num_stages

    @property
    def bubble(self) -> float:
        """Returns the share of the table's time that stages wait for others, on average."""
        return self.time.bubble_fraction


def plan_pipeline(tables: TablesByLabel, inputs: OpInputs) -> PipelinePlan | None:
    """Returns the pipeline by the table that `choose_table` finds; None without stages. tables: of `read_tables`."""
    if not tables:
        return None
    spec, model, sharding, times = inputs.spec, inputs.model, inputs.sharding, plan_stage_times(inputs)
    declared = spec.pipeline.head
    refusal = why_not_shared(inputs) if declared != LAST else None
    if refusal and declared == STAGES:
        what = f"is stages, and they cannot share the head: {refusal}"
        raise ConfigError([Problem("pipeline.head", what, "set pipeline.head=last, or auto")])
    placement = next(iter(tables.values())).placement
    splits = list(_splits(spec, model, placement))
    # A device has room for buffers beside the parameters and one set of optimizer state: more than buffers get.
    state, limit = (
        sum(x.bytes_per_device for x in (*sharding.parameters, *sharding.optimizer)),
        inputs.target.hbm_bytes_per_device,
    )
    choose = partial(
        choose_table,
        tables,
        permute_seconds=times.permute,
        num_bytes=partial(buffer_bytes, slot_bytes=plan_slot_bytes(inputs, placement.num_virtual)),
        room_bytes=math.inf if limit is None else limit - state,
    )
    is_open = declared == "auto" and not refusal and times.head_sent is not None
    head_seconds = {LAST: None, STAGES: times.head_seconds(inputs.mesh.sizes[STAGE])}
    places = (LAST, STAGES) if is_open else (STAGES,) if declared == STAGES else (LAST,)
    by_place = {place: _choose_split(splits, choose, times, head_seconds[place]) for place in places}
    head = _choose_head(declared, refusal, {place: each.time.seconds for place, (each, _) in by_place.items()})
    chosen, layers = by_place[head.place]
    within = f"the shortest that fits, or the smallest that takes at most {human_share(AS_SHORT - 1)} longer"
    others = f"; of {', '.join(tables)} {within}" if len(tables) > 1 else ""
    return PipelinePlan(chosen.table, layers, chosen.time, f"{chosen.label}{others}{_uneven(layers)}", head)


def _choose_split(
    splits: Sequence[StageLayers], choose: Callable[..., ChosenTable], times: StageTimes, head_seconds: float | None
) -> tuple[ChosenTable, StageLayers]:
    """Returns the table that takes the least time, with its layers. choose: `choose_table`. head_seconds: of a head
    that stages share; None of one on the last stage."""
    shares_head = head_seconds is not None
    found = [
        (choose(partial(times.op_seconds, layers, shares_head=shares_head), head_seconds=head_seconds or 0.0), layers)
        for layers in splits
    ]
    return min(found, key=lambda each: each[0].time.seconds)


def _choose_head(
    declared: HeadPlace | Literal["auto"], refusal: str | None, seconds: Mapping[str, float]
) -> HeadChoice:
    """Returns the stages that run the head. refusal: why stages cannot share it. seconds: of the best table, by
    the places that are compared."""
    if declared != "auto":
        return HeadChoice(declared, f"pipeline.head={declared}")
    if refusal:
        return HeadChoice(LAST, f"stages cannot share it: {refusal}")
    if len(seconds) == 1:
        return HeadChoice(LAST, "how long stages would take to share it is not known")
    shared, on_last = seconds[STAGES], seconds[LAST]
    figures = f"{human_seconds(shared)} of ticks if stages share it, {human_seconds(on_last)} on the last one"
    return HeadChoice(STAGES if shared < on_last else LAST, figures)


def _splits(spec: PlanSpec, model: Model, placement: StagePlacement) -> Iterator[StageLayers]:
    """Yields the layers of virtual stages to choose from: the declared ones; or fewer and fewer on the last one."""
    sizes, declared = {stack.name: stack.num_layers for stack in model.stacks}, spec.pipeline.layers
    num_layers = sum(sizes.values())
    if isinstance(declared, tuple):
        yield layers_of(sizes, placement, declared)
        return
    most = num_layers // placement.num_virtual if declared == "balanced" else 1
    for fewer in range(most):
        yield layers_of(sizes, placement, split_evenly(num_layers, placement, fewer))


def _uneven(layers: StageLayers) -> str:
    """Returns how many layers stages have, if not all have as many."""
    if len(set(layers.totals)) == 1:
        return ""
    least, most, last = min(layers.totals), max(layers.totals), layers.totals[-1]
    return f"; {least} to {counted(most, 'layer')} in each part of the model, {last} in the last"


def warnings_of_pipeline(pipeline: PipelineSpec, mesh: MeshPlan) -> Iterator[Problem]:
    """Yields a warning about each setting of a pipeline that was made for a mesh without stages."""
    if mesh.sizes[STAGE] > 1:
        return
    for key, usual in UNDECLARED.items():
        if (value := getattr(pipeline, key)) != usual:
            declared = list(value) if isinstance(value, tuple) else value
            what = f"is {declared}, and the mesh has no stages: nothing runs by it"
            yield Problem(f"pipeline.{key}", what, f"set {KEY}, or leave it out")


@dataclass(frozen=True)
class StageGather:
    """When stages gather the weights of their layers, and why. weights, gradients: the bytes on a device of those of a
    stage, whole in the types in which they are used and accumulated; gradients: 0 if they are accumulated as shards."""

    when: Literal["step", "use"]
    reason: str
    weights: int
    gradients: int

    @property
    def how(self) -> str:
        where = {"step": "once per step", "use": "where a layer is used"}[self.when]
        return f"weights of layers are gathered {where}: {self.reason}"


def plan_gather(pipeline: PipelinePlan | None, inputs: OpInputs, state_bytes: int) -> StageGather | None:
    """Returns when the stages gather; None without stages. state_bytes: those of a device."""
    if pipeline is None:
        return None
    spec, mesh, sharding, target = inputs.spec, inputs.mesh, inputs.sharding, inputs.target
    chosen, tokens = spec.pipeline.gather, sharding.roles.tokens
    split = [each for each in sharding.parameters if _is_gathered(each, tokens)]
    weights = sum(gathered_bytes(each, mesh, sharding.roles) for each in split)
    gradients = sum(
        gathered_bytes(each, mesh, sharding.roles)
        * jnp.dtype(spec.precision.gradients).itemsize
        // jnp.dtype(each.array.compute_dtype).itemsize
        for each in split
        if each.array.is_trained and spec.sharding.gradients == "parameters"
    )
    whole, limit = weights + gradients, target.hbm_bytes_per_device
    if chosen != "auto":
        return StageGather(chosen, f"pipeline.gather={chosen}", weights, gradients)
    if not split:
        return StageGather("step", "each device holds them whole", 0, 0)
    if limit is None:
        return StageGather("step", "the memory of the target is unknown", weights, gradients)
    inputs_of_layers = max(pipeline.in_flight) * max(pipeline.layers.totals) * x_bytes(sharding)
    needed = state_bytes + whole + inputs_of_layers
    kinds = "whole weights and gradients" if gradients else "whole weights"
    told = f"with {human_bytes(whole)} of {kinds} a device needs {human_bytes(needed)} of {human_bytes(limit)}"
    return StageGather("step" if needed <= limit else "use", told, weights, gradients)


def _is_gathered(plan: ArrayPlan, tokens: tuple[str, ...]) -> bool:
    """Returns True for a parameter of layers that axes of the tokens split, besides its experts."""
    axes = {axis for d in plan.dimensions if d.logical != EXPERTS for axis in d.axes}
    return plan.dimensions[0].logical == "layers" and bool(axes & set(tokens))
