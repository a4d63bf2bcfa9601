"""Plans the pipeline of a declaration: the table that its stages run, with which layers and which head, and why.

mesh.stage=4 pipeline=1f1b num_microbatches=8  ->  PipelinePlan(table of 4 stages and 8 microbatches, ..)
mesh.stage=1                                   ->  None
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from meshloom.models import Model

from ..core.errors import ConfigError, Problem
from ..core.format import counted, human_seconds, human_share
from ..core.partition_spec import STAGE
from ..pipeline.buffers import buffer_bytes
from ..pipeline.makespan import AS_SHORT, ChosenTable, TableTime, choose_table
from ..pipeline.stage_layers import StageLayers, layers_of, split_evenly
from ..pipeline.table import PipelineTable, StagePlacement, max_in_flight_of, microbatches
from ..sharding.batch import BatchPlan
from ..sharding.sharding import ShardingPlan
from ..spec.pipeline_spec import HeadPlace, PipelineSpec
from ..spec.plan_spec import PlanSpec
from ..target.mesh import MeshPlan
from ..target.target import TargetPlan
from .pipeline_tables import KEY, TablesByLabel
from .shared_head import why_not_shared
from .stage_times import StageTimes, plan_slot_bytes, plan_stage_times

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


def plan_pipeline(
    tables: TablesByLabel,
    spec: PlanSpec,
    mesh: MeshPlan,
    batch: BatchPlan,
    model: Model,
    sharding: ShardingPlan,
    target: TargetPlan,
) -> PipelinePlan | None:
    """Returns the pipeline by the table that `choose_table` finds; None without stages. tables: those of
    `read_tables`."""
    if not tables:
        return None
    times = plan_stage_times(spec, mesh, batch, model, sharding, target)
    declared = spec.pipeline.head
    refusal = why_not_shared(spec, mesh, model, sharding) if declared != LAST else None
    if refusal and declared == STAGES:
        what = f"is stages, and they cannot share the head: {refusal}"
        raise ConfigError([Problem("pipeline.head", what, "set pipeline.head=last, or auto")])
    placement = next(iter(tables.values())).placement
    splits = list(_splits(spec, model, placement))
    choose = partial(
        choose_table,
        tables,
        permute_seconds=times.permute,
        num_bytes=partial(buffer_bytes, slot_bytes=plan_slot_bytes(spec, model, sharding, placement.num_virtual)),
        room_bytes=_room_for_buffers(sharding, target),
    )
    is_open = declared == "auto" and not refusal and times.head_sent is not None
    head_seconds = {LAST: None, STAGES: times.head_seconds(mesh.sizes[STAGE])}
    places = (LAST, STAGES) if is_open else (STAGES,) if declared == STAGES else (LAST,)
    by_place = {place: _choose_split(splits, choose, times, head_seconds[place]) for place in places}
    head = _choose_head(declared, refusal, {place: each.time.seconds for place, (each, _) in by_place.items()})
    chosen, layers = by_place[head.place]
    within = f"the shortest that fits, or the smallest that takes at most {human_share(AS_SHORT - 1)} longer"
    others = f"; of {', '.join(tables)} {within}" if len(tables) > 1 else ""
    return PipelinePlan(chosen.table, layers, chosen.time, f"{chosen.label}{others}{_uneven(layers)}", head)


def _choose_split(
    splits: Sequence[StageLayers],
    choose: Callable[..., ChosenTable],
    times: StageTimes,
    head_seconds: float | None,
) -> tuple[ChosenTable, StageLayers]:
    """Returns the table that takes the least time, with its layers. choose: `choose_table`. head_seconds: of a head
    that stages share; None of one on the last stage."""
    shares_head = head_seconds is not None
    found = [
        (choose(partial(times.op_seconds, layers, shares_head=shares_head), head_seconds=head_seconds or 0.0), layers)
        for layers in splits
    ]
    return min(found, key=lambda each: each[0].time.seconds)


def _room_for_buffers(sharding: ShardingPlan, target: TargetPlan) -> float:
    """Returns the bytes of a device beside the parameters and one set of optimizer state: more than buffers have."""
    limit = target.hbm_bytes_per_device
    state = sum(plan.bytes_per_device for plan in (*sharding.parameters, *sharding.optimizer))
    return math.inf if limit is None else limit - state


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
