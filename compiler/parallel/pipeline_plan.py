"""Plans the pipeline of a declaration: the table that its stages run, and why; or all reasons why there can be none.

mesh.stage=4 pipeline=1f1b num_microbatches=8  ->  PipelinePlan(table of 4 stages and 8 microbatches, ..)
mesh.stage=1                                   ->  None
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from meshloom.models import Model

from ..core.errors import ConfigError, Problem, raise_if_any
from ..core.format import be, counted, human_seconds, human_share
from ..core.partition_spec import STAGE
from ..core.user_code import blamed_on_user
from ..core.user_imports import is_class_path, load_class
from ..pipeline.buffers import buffer_bytes
from ..pipeline.invariants import max_in_flight_of
from ..pipeline.makespan import AS_SHORT, ChosenTable, TableTime, choose_table
from ..pipeline.own_schedule import OwnSchedule, own_tables
from ..pipeline.schedules import SCHEDULES, build_table
from ..pipeline.stage_layers import StageLayers, layers_of, split_evenly
from ..pipeline.table import PipelineTable, StagePlacement, microbatches
from ..pipeline.table_file import read_table
from ..pipeline.ticks import TickForm
from ..sharding.sharding import ShardingPlan
from ..spec.pipeline_spec import HeadPlace, PipelineSpec
from ..spec.plan_spec import PlanSpec
from ..target.mesh import MeshPlan
from ..target.target import TargetPlan
from .shared_head import why_not_shared
from .stage_times import StageTimes, plan_slot_bytes, plan_stage_times, recomputes_layers

WITHOUT_STAGES = "1f1b"  # the schedule of conf/config.yaml, which nobody chose where there are no stages
KEY, TABLE = f"mesh.{STAGE}", "pipeline.table"
LAST: Literal["last"] = "last"
STAGES: Literal["stages"] = "stages"
TablesByLabel = Mapping[str, PipelineTable]  # by what a reason calls them
ALONE = "ticks with recomputation apart"  # R is an operation of its own


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
    head: "HeadChoice"

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
        """Returns the share of the table's time that the busiest stage waits for others."""
        return self.time.bubble / self.time.seconds if self.time.seconds else 0.0


def read_tables(spec: PlanSpec, mesh: MeshPlan, model: Model) -> TablesByLabel:
    """Returns the tables that can run the declared pipeline; none without stages. Raises ConfigError with all problems
    of a declaration that no pipeline can run."""
    if mesh.sizes[STAGE] == 1:
        return {}
    problems, tables = list(_unused(spec)), dict[str, PipelineTable]()
    problems += [] if spec.pipeline.table else _problems_of_schedule(spec, mesh)
    try:
        tables = _own(spec, mesh) if spec.pipeline.table else {} if problems else _candidates(spec, mesh)
    except ConfigError as error:
        problems += error.problems
    num_chunks = next((each.placement.num_chunks for each in tables.values()), spec.pipeline.num_chunks)
    raise_if_any([*_problems_of_model(spec, mesh, model, num_chunks), *problems])
    return tables


def plan_pipeline(
    tables: TablesByLabel, spec: PlanSpec, mesh: MeshPlan, model: Model, sharding: ShardingPlan, target: TargetPlan
) -> PipelinePlan | None:
    """Returns the pipeline by the table that `choose_table` finds; None without stages. tables: those of
    `read_tables`."""
    if not tables:
        return None
    times = plan_stage_times(spec, mesh, model, sharding, target)
    refusal = why_not_shared(spec, mesh, model, sharding) if spec.pipeline.head != LAST else None
    if refusal and spec.pipeline.head == STAGES:
        what = f"is stages, and they cannot share the head: {refusal}"
        raise ConfigError([Problem("pipeline.head", what, "set pipeline.head=last, or auto")])
    placement = next(iter(tables.values())).placement
    splits = list(_splits(spec, model, placement))
    num_bytes = partial(buffer_bytes, slot_bytes=plan_slot_bytes(spec, model, sharding, placement.num_virtual))
    by_place: dict[HeadPlace, tuple[ChosenTable, StageLayers]] = {
        LAST: _choose_split(splits, tables, times, num_bytes),
        STAGES: _choose_split(splits, tables, times, num_bytes, times.head_seconds(mesh.sizes[STAGE])),
    }
    head = _choose_head(spec.pipeline.head, refusal, by_place if times.head_sent is not None else None)
    chosen, layers = by_place[head.place]
    within = f"the shortest, or the smallest that takes at most {human_share(AS_SHORT - 1)} longer"
    others = f"; of {', '.join(tables)} {within}" if len(tables) > 1 else ""
    return PipelinePlan(chosen.table, layers, chosen.time, f"{chosen.label}{others}{_uneven(layers)}", head)


def _choose_split(
    splits: Sequence[StageLayers],
    tables: TablesByLabel,
    times: StageTimes,
    num_bytes: Callable[[PipelineTable], float],
    head_seconds: float | None = None,
) -> tuple[ChosenTable, StageLayers]:
    """Returns the table that takes the least time, with its layers. head_seconds: of a head that stages share."""
    found = [
        (
            choose_table(
                tables,
                partial(times.op_seconds, layers, shares_head=head_seconds is not None),
                times.permute,
                head_seconds=head_seconds or 0.0,
                num_bytes=num_bytes,
            ),
            layers,
        )
        for layers in splits
    ]
    return min(found, key=lambda each: each[0].time.seconds)


def _choose_head(
    declared: HeadPlace | Literal["auto"],
    refusal: str | None,
    tables: Mapping[HeadPlace, tuple[ChosenTable, StageLayers]] | None,
) -> HeadChoice:
    """Returns the stages that run the head. refusal: why stages cannot share it. tables: the best one, by place; None
    if the times are not known."""
    if declared != "auto":
        return HeadChoice(declared, f"pipeline.head={declared}")
    if refusal:
        return HeadChoice(LAST, f"stages cannot share it: {refusal}")
    if tables is None:
        return HeadChoice(LAST, "how long stages would take to share it is not known")
    shared, on_last = (tables[place][0].time.seconds for place in (STAGES, LAST))
    figures = f"{human_seconds(shared)} of ticks if stages share it, {human_seconds(on_last)} on the last one"
    return HeadChoice(STAGES if shared < on_last else LAST, figures)


def layers_stay(spec: PlanSpec, mesh: MeshPlan, model: Model) -> bool:
    """Returns True if the state can hold the layers of each stage on that stage: all virtual stages have as many. Else
    it splits another dimension of their weights over the stages. Of a table that is wrong, `read_tables` tells."""
    (stack, *others), num_chunks = model.stacks, spec.pipeline.num_chunks
    if others or spec.pipeline.layers != "even":
        return False
    if spec.pipeline.table and mesh.sizes[STAGE] > 1:
        try:
            num_chunks = next(iter(_own(spec, mesh).values())).placement.num_chunks
        except ConfigError:
            return True
    return stack.num_layers % (mesh.sizes[STAGE] * num_chunks) == 0


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
    made = {
        "schedule": pipeline.schedule if pipeline.schedule != WITHOUT_STAGES else None,
        "table": pipeline.table,
        "max_bubble": pipeline.max_bubble,
    }
    for key, value in made.items():
        if mesh.sizes[STAGE] == 1 and value is not None:
            what = f"is {value}, and the mesh has no stages: nothing runs by it"
            yield Problem(f"pipeline.{key}", what, f"set {KEY}, or leave it out")


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
        tables = _of_class(path, spec, mesh, form)
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


def _of_class(path: str, spec: PlanSpec, mesh: MeshPlan, form: TickForm | None) -> TablesByLabel:
    """Returns the tables that the user's class makes for the declared numbers."""
    kind: Any = load_class(path, TABLE, OwnSchedule)
    size = (mesh.sizes[STAGE], spec.pipeline.num_chunks, spec.num_microbatches)
    with blamed_on_user(TABLE, f"{path}().orders{size}", is_theirs=True):
        made = kind().orders(*size)
    return own_tables(made, StagePlacement(*size[:2], kind.is_v), path, TABLE, form)


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
        yield Problem(KEY, what, _fitting(mesh, num_layers, num_chunks))


def _fitting(mesh: MeshPlan, num_layers: int, num_chunks: int) -> str:
    """Returns the fix for more parts than layers: fewer stages."""
    fits = (size for size in range(num_layers // num_chunks, 1, -1) if mesh.num_devices % size == 0)
    return f"use {KEY}={next(fits, 1)}"


def _problems_of_schedule(spec: PlanSpec, mesh: MeshPlan) -> Iterator[Problem]:
    """Yields what a schedule needs and does not get."""
    kind = SCHEDULES[spec.pipeline.schedule]
    lacks = kind.requirement(mesh.sizes[STAGE], spec.pipeline.num_chunks, spec.num_microbatches)
    if lacks is not None:
        yield Problem("pipeline.schedule", *lacks)


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
