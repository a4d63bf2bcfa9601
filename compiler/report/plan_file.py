"""Says what plan.json holds: its keys and their types, of which `meshloom schema plan` prints the JSON schema.

`plan_as_json` (explain.py) writes it. Bytes and FLOP/s are of a device where a name says so; `estimated` has the
figures of the step under the names that report.json has.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, Field

from meshloom.models.record import Record

from ..core.known import OrUnknown, Reasoned
from ..core.traffic import Crossing, LinkKind
from ..estimate.stage_buffers import StageBuffer
from ..figures import StepFigures
from ..jaxpr.unknown import UnknownPrimitive
from ..parallel.operation import Cost
from ..plan import MemoryPlan
from ..schema import RooflinePart
from ..spec.calibration_spec import Calibration
from ..target.axis_segments import AxisSegment


class PlannedTarget(Record):
    name: str
    chip: str | None
    num_chips: int
    num_devices: int
    num_slices: int
    shape: list[int] | None  # of the torus
    peak_flops_per_second_per_device: float | None
    hbm_bytes_per_device: int | None
    calibration: Calibration | None


class PlannedAxis(Record):
    """Where a mesh axis lies. reason: why its links are not known."""

    where: str
    parts: list[AxisSegment]
    link: LinkKind
    bytes_per_second_per_device: float | None
    latency_seconds: float | None
    reason: str = ""


class PlannedWarning(Record):
    where: str
    what: str
    fix: str


class PlannedProgram(Record):
    num_parameters: int
    tokens_per_step: int
    model_flops_per_step: OrUnknown[int]
    saved_seconds: float = 0.0  # that matmuls in types of few bits take less than at the peak of the compute type
    auxiliary: list[str]


@dataclass(frozen=True)
class PlannedTraffic(Crossing):
    """Collectives that are equal. bytes_each: of one; direction: the pass."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    group_size: int
    bytes_each: int
    count: int
    direction: str


@dataclass(frozen=True)
class PlannedCommunication(PlannedTraffic):
    dtype: str
    source: str
    rule: str | None
    bytes: int


class RejectedStrategy(Record):
    strategy: str
    cost: Cost | None
    why_not: str | None


class PlannedPrecision(Record):
    """The types in which a site multiplies; null: as its operands are. emulated: whether float32 does so instead."""

    forward: str | None
    gradients: str | None
    emulated: bool
    reason: str


class PlannedOperation(Record):
    """How an operation of the model runs over the mesh, and what else it could have been."""

    operation: str
    site: str
    piece: int | str | None
    parameters: list[str]
    strategy: str
    what: str
    reason: str
    cost: Cost | None
    precision: PlannedPrecision | None = None
    collectives: list[PlannedTraffic]
    rejected: list[RejectedStrategy]


class PlannedPipeline(Record):
    schedule: str
    num_stages: int
    num_chunks: int
    num_microbatches: int
    layers_per_virtual_stage: list[int]
    in_flight_by_stage: list[int]
    buffers: list[StageBuffer]
    buffer_bytes_in_use_by_stage: list[int]
    table_bubble_fraction: float
    ticks: list[list[str]]
    reason: str
    gather: dict[Literal["when", "reason"], str]
    head: dict[Literal["place", "reason"], str]


class PlannedArray(Record):
    """An array and its layout. spec: for each dimension a mesh axis, several, or null for none. format: of an encoded
    one, in words; dtype is the type of its elements."""

    path: str
    shape: list[int]
    dtype: str
    format: str | None = None
    logical_axes: list[str | None]
    spec: list[str | list[str] | None]
    reason: str
    bytes_per_device: int


class PlannedParameter(PlannedArray):
    is_trained: bool
    updated_by: str | None


class PlannedArrays(Record):
    parameters: list[PlannedParameter]
    optimizer: list[PlannedArray]
    activations: list[PlannedArray]


class PlannedEstimate(Record):
    """What `estimated` follows from. time: under the keys that plan.json has had for it."""

    assumed_overlap: list[str]
    peak_memory_bytes_per_device: dict[str, int | bool | str | None]  # by class; part: where the peak is
    communication: list[PlannedCommunication]
    roofline: list[RooflinePart]
    roofline_seconds: OrUnknown[float]
    bound_seconds: OrUnknown[float]
    time: OrUnknown[dict[str, Any]]
    usual_imbalance: dict[str, Any] = Field(default_factory=dict)
    unknown_primitives: list[UnknownPrimitive]


class PlanFile(Reasoned):
    """The content of plan.json. mesh: the size of each axis, and mesh_reasons why. assumed: figures that nobody
    measured. chosen_here: what the declaration left to this machine's processor, in words.
    optimizer_bytes_by_type: on a device."""

    schema_version: Literal[17]
    target: PlannedTarget
    chosen_here: str | None = None
    mesh: dict[str, int]
    mesh_reasons: dict[str, str]
    flag_presets: list[str]
    placement: dict[str, PlannedAxis]
    assumed: list[str]
    warnings: list[PlannedWarning]
    program: PlannedProgram
    pipeline: PlannedPipeline | None
    operations: list[PlannedOperation]
    memory_bytes_per_device: MemoryPlan
    optimizer_bytes_by_type: dict[str, int] = Field(default_factory=dict)
    estimated: StepFigures
    estimate: PlannedEstimate
    arrays: PlannedArrays
