"""Defines `report.json`: the typed report of a compiled step.

A program that nobody declared (`meshloom inspect`) has a report too, without what only a declaration says.

Seconds are of one step; bytes and FLOPs of one chip unless a name says otherwise, those of the program of all chips.
A value that cannot be known is an `Unknown` with its reason: null in the file, which has the reasons in `unknown`, by
the path of the value ("compiled.mfu"), or of that value in all elements ("collectives[*].alone_seconds").

The file repeats some figures under the keys that tools have read since before a step's figures had one form
(`steady_keys`). They are written, and never read back.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshloom.models.record import Record

from .core.known import OrUnknown, Reasoned, Unknown, all_known, each_known
from .core.traffic import ComputeKind, TimedTraffic
from .figures import StepFigures, StepWork
from .spec.overlap_spec import OverlapConfig

SCHEMA_VERSION = 17  # of report.json and plan.json


class TargetReport(Record):
    name: str
    chip: str
    num_chips: PositiveInt
    num_devices: PositiveInt  # devices of JAX
    num_slices: PositiveInt
    hbm_bytes_per_chip: OrUnknown[PositiveInt]
    hbm_bytes_per_second: OrUnknown[PositiveFloat]  # of one chip
    peak_flops_per_second: OrUnknown[PositiveFloat]  # of one chip, in the compute type
    calibration: str  # the figures that were measured, and on which runs; empty: none
    placement: dict[str, str]  # mesh axis -> where it lies: "fsdp": "ICI x (16, wraps) x ICI y (16, wraps)"


class ProgramReport(Record):
    """model: the chosen option, with the keys that were set besides: "llama2_7b (num_layers=4)"; else the family. For a
    program that nobody declared it is the name of its module, "jit_train_step"."""

    model: str
    num_parameters: OrUnknown[NonNegativeInt]
    num_active_parameters: OrUnknown[NonNegativeInt]  # used by one token
    tokens_per_step: OrUnknown[PositiveInt]
    model_flops_per_step: OrUnknown[NonNegativeInt]


class MemoryChange(Record):
    """A change of the declaration that saves memory. overrides: as they are typed. fits: True if this change alone is
    enough. slower_fraction: the additional time of a token, by the estimate, as a fraction."""

    overrides: tuple[str, ...]
    saved_bytes: int
    fits: bool
    slower_fraction: OrUnknown[float]
    cost: str  # "the forward pass is computed twice"


MAX_IMBALANCE = "moe.max_imbalance"  # the key of an alternative with room for the usual imbalance of experts


class Alternative(Record):
    """A declaration, and its figures by the estimate. overrides: how it differs from the declared one; () for that
    itself."""

    overrides: tuple[str, ...]
    figures: StepFigures


class MemoryReport(Record):
    """The memory of a chip at the worst moment of a step. breakdown: bytes by class: parameters (with
    adapters: base, adapters), master, optimizer, working_parameters (cast for use), gathered_weights, gradients,
    activations, temporaries, code, reserved, where the compiled program tells them apart; `arguments` instead of the
    first three if no plan names them."""

    breakdown: dict[str, OrUnknown[NonNegativeInt]]
    changes: tuple[MemoryChange, ...]  # the cheapest first; empty where it fits


@dataclass(frozen=True, kw_only=True)
class CollectiveReport(TimedTraffic):
    """All collectives of a step that are equal: one place in the program, once per trip of its loops. source: the text
    of `origin`."""

    hidden_behind: tuple[str, ...]  # names of instructions that run meanwhile, the longest first
    is_async: bool
    form: str  # its form in the program: "all-gather-start", "collective fusion", "SparseCore call", "synchronous"
    source: str = ""  # "layers/attention/query_EHD, forward", "... (inferred from its size)", "made by the compiler"
    line: str  # of the code that it comes from, "train.py:42"; if all are a library's, its scope: "conv5_block1_3_bn"
    where: str  # computation or loop: "while body, 32 trips"
    confidence: Literal["high", "low"]  # low: size, group or bandwidth is not certain
    name: str  # of the instruction; "NAME (all-gather)": one that shares its call with another kind

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", str(self.origin))


class StepReport(StepFigures):
    """The figures of a compiled step, and what they were read from in its schedule."""

    compute_seconds_by_kind: dict[ComputeKind, NonNegativeFloat]
    least_seconds: OrUnknown[NonNegativeFloat]  # the sum of all parts whose time is known
    roofline_seconds: OrUnknown[NonNegativeFloat]  # of this program: the time of its own operations at the full rates
    bound_seconds: OrUnknown[NonNegativeFloat]  # of the declaration: no program of it takes less
    num_unpriced: NonNegativeInt  # kernels of an unknown time, which count with the least that they can take
    counted_once: tuple[str, ...]  # loops whose number of iterations is not known
    num_bounded: NonNegativeInt  # matmuls whose estimate by the compiler is more than they can take
    bounded_seconds: NonNegativeFloat  # the sum by which these estimates are longer than their prices


class StageBufferReport(Record):
    """A buffer that each stage of a pipeline has. Stages run one program, so each allocates as many slots as the one
    that uses most. name: x, gradient, saved, kept or cut. what: what it holds. num_slots: those that each stage
    allocates. slot_bytes: of one, by the traced step. in_use_by_stage: the most slots that each stage uses at once."""

    name: str
    what: str
    num_slots: PositiveInt
    slot_bytes: NonNegativeInt
    in_use_by_stage: tuple[NonNegativeInt, ...]


class PipelineReport(Record):
    """The stages of a pipeline. bytes_in_use_by_stage: of all buffers, each at its own peak."""

    schedule: str
    num_stages: PositiveInt
    num_microbatches: PositiveInt
    in_flight_by_stage: tuple[NonNegativeInt, ...]  # microbatches of chunks that wait for a backward pass, at most
    buffers: tuple[StageBufferReport, ...]
    bytes_allocated: NonNegativeInt  # of all buffers, on each stage
    bytes_in_use_by_stage: tuple[NonNegativeInt, ...]


class RooflinePart(Record):
    """A part of the step with the bound of each resource: FLOPs over peak, bytes over bandwidth."""

    name: str  # "layers (x32)", "attention", "head", "optimizer"
    flops: OrUnknown[NonNegativeInt]
    hbm_bytes: OrUnknown[NonNegativeInt]
    link_bytes: OrUnknown[NonNegativeInt]
    flops_seconds: OrUnknown[NonNegativeFloat]
    hbm_seconds: OrUnknown[NonNegativeFloat]
    link_seconds: OrUnknown[NonNegativeFloat]
    bound: Literal["flops", "hbm", "link"] | None  # the longest


# The rules of the lint, by which a finding can be accepted; besides OPERATION-fallback, of each declared operation.
LINT_RULES = (
    "assumed-order", "attention-block", "exchange-over-torus", "float32-reduction", "gathered-then-sliced",
    "gathered-whole", "gradient-not-scattered", "held-whole", "host-copies-cannot-hide", "memory-by-text",
    "random-bits", "reduced-then-sliced", "repeated-gather", "repeated-work", "replicated-array",
    "silent-upcast", "slice-inside-tiles", "stack-gathered-whole", "synchronous-collective", "too-exposed",
    "too-much-bubble", "unplanned-collective", "upcast-transfer", "update-inside-tiles", "wide-collective",
)  # fmt: skip
FALLBACK = "-fallback"


class Finding(Record):
    """One finding of the lint of the compiled program."""

    rule: str  # one of LINT_RULES, or "attention-fallback"
    severity: Literal["warning", "note"]
    what: str
    where: str  # instruction, source op and config key, as far as known
    fix: str


class BuildReport(Record):
    lower_seconds: NonNegativeFloat
    compile_seconds: NonNegativeFloat
    cache: Literal["hit", "miss", "off"]
    jax: str
    jaxlib: str
    plugin: str | None  # "libtpu 0.0.42.1"
    compiler_options: dict[str, str | bool | int | float]
    compiler_options_left_out: tuple[str, ...]  # of overlap.flag_presets: the compiler does not know them
    fingerprint: str


class TriedReport(OverlapConfig):
    """A program that `overlap.search` compiled."""

    figures: StepFigures
    compile_seconds: NonNegativeFloat


class SearchReport(Record):
    """tried: the compiled programs in their order, beginning with the declared one. chosen: the place of the one that
    this report describes. Every other candidate is counted once: num_equal have the same program as one in `tried`;
    num_ruled_out could not save overlap.search.min_gain; num_untried might, and were not compiled because of `bound`,
    the key of overlap.search that ended the search. overrides: pin the chosen one."""

    tried: tuple[TriedReport, ...]
    chosen: NonNegativeInt
    num_equal: NonNegativeInt
    num_ruled_out: NonNegativeInt
    num_untried: NonNegativeInt
    bound: str | None  # "max_candidates=6"; None: nothing was left for it
    overrides: tuple[str, ...]
    cache: Literal["hit", "miss", "off"]  # hit: it was decided before


class Event(Record):
    """A stretch of the predicted step on one track. Loops show all their iterations, or the first few.

    name: what it does, "gather mlp/up", "matmul mlp_output". instruction: the instruction of the program; empty if it
    equals the name. loop: the innermost loop that it is part of, "layers, forward"; empty outside of loops. iteration:
    the iteration of that loop, from 1; 0 outside. live_bytes: the bytes of arrays in the device's memory meanwhile;
    None where that is not known, and on links. stage: the stage of a pipeline; of many, the first and the last few have
    events.
    """

    track: str  # "compute", "ICI x", one way of it "ICI x+", "DCN"
    stage: NonNegativeInt | None = None  # None: no pipeline
    name: str
    instruction: str = ""
    # ComputeKind, CollectiveKind, "exposed": compute waits for a collective, "bubble": a stage waits for other stages,
    # "loop": iterations left out
    kind: str
    start_seconds: NonNegativeFloat
    seconds: NonNegativeFloat
    loop: str = ""
    iteration: NonNegativeInt = 0
    live_bytes: NonNegativeInt | None = None
    arguments: dict[str, Any]


class Report(Reasoned):
    schema_version: Literal[17]
    target: TargetReport
    program: ProgramReport
    estimated: OrUnknown[StepFigures]  # without a compiler
    compiled: StepReport
    memory: MemoryReport
    collectives: tuple[CollectiveReport, ...]
    pipeline: PipelineReport | None  # None: the mesh has no stages, or nobody declared the program
    roofline: tuple[RooflinePart, ...]
    findings: tuple[Finding, ...]
    search: SearchReport | None  # None: nothing was searched
    alternatives: tuple[Alternative, ...]  # the declared step first; empty where nothing else could be estimated
    build: OrUnknown[BuildReport]
    overrides: tuple[str, ...]  # as typed; empty: nothing was declared

    def repeated(self) -> dict[str, Any]:
        return steady_keys(self)

    @classmethod
    def as_read(cls, node: dict[str, Any]) -> dict[str, Any]:
        return without_steady_keys(node)

    @property
    def work(self) -> StepWork:
        """Returns the work of a step, which turns its seconds into rates."""
        return StepWork(
            tokens_per_step=self.program.tokens_per_step,
            model_flops=self.program.model_flops_per_step,
            num_chips=self.target.num_chips,
            peak_flops_per_second=each_known(
                self.target.peak_flops_per_second, lambda of_one: of_one * self.target.num_chips
            ),
        )


def total(values: Iterable[float | Unknown]) -> float | Unknown:
    """Returns the sum, the same in whatever order the values come; the reason of the first unknown one, if one is."""
    return all_known(values, math.fsum)


def by_exposed(collectives: Iterable[CollectiveReport]) -> list[CollectiveReport]:
    """Returns the collectives, the most exposed first. Those whose exposed time is not known come before all others."""
    return sorted(collectives, key=lambda c: (-or_infinity(c.exposed_seconds), -or_infinity(c.alone_seconds), -c.bytes))


def or_infinity(seconds: float | Unknown) -> float:
    return math.inf if isinstance(seconds, Unknown) else seconds


STEP = {
    "compute_seconds": "compute_seconds", "compute_seconds_by_kind": "compute_seconds_by_kind",
    "exposed_seconds": "exposed_seconds", "exposed_fraction": "exposed_fraction", "bubble_seconds": "bubble_seconds",
    "bubble_fraction": "bubble_fraction", "least_seconds": "least_seconds", "predicted_seconds": "step_seconds",
    "predicted_range_basis": "range_basis", "predicted_mfu": "mfu", "roofline_seconds": "roofline_seconds",
    "bound_seconds": "bound_seconds", "num_unpriced": "num_unpriced", "counted_once": "counted_once",
    "num_bounded": "num_bounded", "bounded_seconds": "bounded_seconds",
}  # fmt: skip
MEMORY = {
    "peak_bytes_per_chip": ("compiled", "peak_bytes"), "limit_bytes_per_chip": ("compiled", "limit_bytes"),
    "fits": ("compiled", "fits"), "estimate_bytes_per_chip": ("estimated", "peak_bytes"),
    "host_bytes_per_chip": ("compiled", "host_bytes"), "host_limit_bytes_per_chip": ("compiled", "host_limit_bytes"),
    "host_fits": ("compiled", "host_fits"), "host_estimate_bytes_per_chip": ("estimated", "host_bytes"),
}  # fmt: skip
TRIED = {"predicted_seconds": "step_seconds", "exposed_fraction": "exposed_fraction",
         "peak_bytes_per_chip": "peak_bytes", "host_bytes_per_chip": "host_bytes"}  # fmt: skip
OF_TRIED = {*TRIED, "fits", "why_not"}
ALTERNATIVE = {"seconds": "step_seconds", "exposed_seconds": "exposed_seconds", "peak_bytes_per_chip": "peak_bytes",
               "fits": "fits"}  # fmt: skip


def steady_keys(report: Report) -> dict[str, Any]:
    """Returns these keys of a report with their values."""
    step = {key: getattr(report.compiled, name) for key, name in STEP.items()}
    keys: dict[str, Any] = {
        "step": step | {"predicted_range_seconds": report.compiled.range_of(report.compiled.step_seconds)},
        "memory": {
            key: figures if isinstance(figures, Unknown) else getattr(figures, name)
            for key, (part, name) in MEMORY.items()
            for figures in [getattr(report, part)]
        },
        "alternatives": [_values(one.figures, ALTERNATIVE) for one in report.alternatives],
    }
    return keys | ({"search": {"tried": [_tried(one.figures) for one in report.search.tried]}} if report.search else {})


def without_steady_keys(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON of a report without these keys, as it is read."""

    def without(node: Any, names: Collection[str]) -> Any:
        return {key: value for key, value in node.items() if key not in names} if isinstance(node, dict) else node

    found = {key: value for key, value in report.items() if key != "step"}
    if "memory" in found:
        found["memory"] = without(found["memory"], MEMORY)
    if isinstance(found.get("alternatives"), list):
        found["alternatives"] = [without(one, ALTERNATIVE) for one in found["alternatives"]]
    if isinstance(search := found.get("search"), dict) and isinstance(search.get("tried"), list):
        found["search"] = search | {"tried": [without(one, OF_TRIED) for one in search["tried"]]}
    return found


def report_schema() -> dict[str, Any]:
    """Returns the JSON schema of report.json, with the keys that repeat others."""
    found = Report.model_json_schema(mode="serialization")
    parts = found["$defs"]

    def add(place: dict[str, Any], keys: Mapping[str, Any]) -> None:
        place["properties"] |= keys
        place["required"] = [*place["required"], *keys]

    def types(part: str, names: Mapping[str, str]) -> dict[str, Any]:
        return {key: parts[part]["properties"][name] for key, name in names.items()}

    pair = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
    step = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    add(step, types("StepReport", STEP) | {"predicted_range_seconds": {"anyOf": [pair, {"type": "null"}]}})
    add(found, {"step": step})
    add(parts["MemoryReport"], types("StepFigures", {key: name for key, (_, name) in MEMORY.items()}))
    add(parts["Alternative"], types("StepFigures", ALTERNATIVE))
    why_not = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    add(parts["TriedReport"], types("StepFigures", TRIED | {"fits": "fits"}) | {"why_not": why_not})
    return found


def _tried(figures: StepFigures) -> dict[str, Any]:
    """Returns the keys of a program that was tried: whether it fits in both memories, and why its step is not known."""
    seconds = figures.step_seconds
    why = seconds.why if isinstance(seconds, Unknown) else None
    return _values(figures, TRIED) | {"fits": figures.runs, "why_not": why}


def _values(figures: StepFigures, keys: Mapping[str, str]) -> dict[str, Any]:
    return {key: getattr(figures, name) for key, name in keys.items()}
