"""Cuts a declaration down to one that simulated devices run in seconds, and that has the same kind of program.

    80 layers of 64 heads, mesh fsdp 64 x tensor 4, 8,192 tokens
    -> 3 layers of 4 heads, fsdp 2 x tensor 2, 32 tokens

Each mesh axis of several devices becomes one of two. Layers, widths, experts, vocabulary and length become as small as
what splits them allows. All else stays: the rules of sharding, the strategies that the plan chose for the declared
target, the schedule, remat, packing, precision, adapters, tied weights, the kinds of layers. What cannot stay, such as
a kernel of a TPU on a processor, is named.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from meshloom.models.record import Record

from ..core.errors import ConfigError, Problem
from ..core.partition_spec import STAGE
from ..driver import plan_run
from ..formats.operands import operand_formats
from ..parallel.operation import OpPlan, ParallelOp
from ..plan import Plan
from ..spec.overlap_spec import AUTO
from ..spec.plan_spec import AnyPlanSpec
from ..spec.step_spec import PrecisionSpec
from ..spec.target_spec import CpuTarget
from .small_model import Cuts, Room, small_layers, small_model

AnyRecord = TypeVar("AnyRecord", bound=Record)
FLOAT32 = PrecisionSpec(
    parameters="float32", master=None, compute="float32", gradients="float32", gradient_reduction="float32",
    frozen=None, loss_scale=None, matmuls=(), dispatch=None,
    dispatch_gradients=None, emulate=False,
)  # fmt: skip
_LENGTH = 32  # tokens of a sequence, or of a part that a device has, where blocks of tokens share a scale
_LONGEST_BLOCK = 8  # numbers of a small matrix that share a scale
_MOST_STAGES = 4  # of a table of the user's own, whose stages cannot be cut


class KeyCut(Record):
    """A key that the small program has another value of. why: the reason for the value."""

    key: str
    declared: str
    value: str
    why: str


@dataclass(frozen=True)
class Shrunk(Generic[AnyPlanSpec]):
    """A small declaration like another one. cuts: of its keys. replaced: strategies that a processor does not run, and
    what runs instead."""

    plan: Plan[AnyPlanSpec]
    cuts: tuple[KeyCut, ...]
    replaced: tuple[str, ...]


@dataclass(frozen=True)
class Shrinking(Generic[AnyPlanSpec]):
    """The cuts of a declaration that was planned for its target."""

    declared: Plan[AnyPlanSpec]

    def shrunk(self) -> Shrunk[AnyPlanSpec]:
        """Returns a small declaration like it. Raises ConfigError where a rule does not let it shrink, with the nearest
        declaration that does."""
        spec = self.declared.spec
        cuts = {**self._mesh(), **self._batch(), **self._pipeline(), **self._others()}
        model, of_model = small_model(spec.model, self.room)
        values = {**{key: value for key, (value, _) in cuts.items()}, "model": model}
        target = CpuTarget(kind="cpu", num_devices=math.prod(self.sizes.values()))
        small = _with_values(spec, {**values, "target": target})
        plan, replaced = _planned(small, self.declared.operations, self.declared.ops)
        shown = {**{f"model.{key}": cut for key, cut in of_model.items()}, **cuts}
        return Shrunk(plan, tuple(_cuts_of(spec, shown)), (*replaced, *self._left_out()))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Returns the sizes of the small mesh."""
        spec, sizes = self.declared.spec, self.declared.mesh.sizes
        small = {axis: min(size, 2) for axis, size in sizes.items()}
        if not self._has_table:
            return small
        if (stages := sizes[STAGE]) > _MOST_STAGES:
            what = f"is a table of {stages} stages, and a table cannot be cut: a check has at most {_MOST_STAGES}"
            near = f"pipeline.table=null pipeline.schedule={spec.pipeline.schedule}"
            fix = f"check the built-in schedule that is like it, {near}, or a table of {_MOST_STAGES} stages or fewer"
            raise ConfigError([Problem("pipeline.table", what, fix)])
        return {**small, STAGE: stages}

    @property
    def _has_table(self) -> bool:
        """Returns True for a pipeline by a table in a file, which has its stages and microbatches."""
        table = self.declared.spec.pipeline.table
        return table is not None and ":" not in str(table) and self.declared.mesh.sizes.get(STAGE, 1) > 1

    @cached_property
    def room(self) -> Room:
        """Returns what the numbers of the model depend on."""
        declared, loop = self.declared, self.declared.spec.overlap.layers
        layers = declared.spec.pipeline.layers
        placement = declared.pipeline.table.placement if declared.pipeline else None
        num_layers = sum(stack.num_layers for stack in declared.model.stacks)
        return Room(
            axes=tuple(axis for axis, size in self.sizes.items() if size > 1),
            declared_sizes=declared.mesh.sizes,
            parts=self.sizes[STAGE] * placement.num_chunks if placement else 1,
            is_even=placement is None or num_layers % placement.num_virtual == 0,
            stage_layers=layers if isinstance(layers, tuple) else None,
            least_rounds=max(loop.prefetch + 2 if loop.prefetch else 1, loop.unroll + 1 if loop.unroll > 1 else 1),
            length=self._length,
            declared_length=declared.spec.sequence_length,
            block=self._block,
        )

    @property
    def _block(self) -> int:
        """Returns how many numbers along what matmuls sum share a scale, in all types at once; 1 where none do."""
        rules, formats = self.declared.spec.precision.matmuls, operand_formats()
        used = [formats[name].blocks for rule in rules for name in (rule.forward, rule.gradients) if name]
        return math.lcm(*(blocks.block[-1] or 1 for blocks in used if blocks))

    @property
    def _length(self) -> int:
        """Returns the tokens of a sequence. Blocks of tokens lie within a device's."""
        parts = math.prod(self.sizes[axis] for axis in self.declared.roles.length)
        return _LENGTH * parts if self._block > 1 else _LENGTH

    def _mesh(self) -> Cuts:
        why = "two devices have all that many have: a neighbour, a part, a sum"
        return {f"mesh.{axis}": (size, why) for axis, size in self.sizes.items()}

    def _batch(self) -> Cuts:
        declared, spec, microbatches = self.declared, self.declared.spec, self.declared.spec.num_microbatches
        stages = declared.mesh.sizes.get(STAGE, 1)
        if stages > 1 and not self._has_table:
            microbatches = 2 * max(1, min(2, microbatches // stages))  # of two stages: as many for each, up to twice
        elif stages == 1:
            microbatches = min(microbatches, 2)
        split, axes = spec.overlap.layers.batch_split, declared.roles.sequence
        of_device = spec.global_batch_size // (spec.num_microbatches * declared.mesh.num_shards(axes))
        few = split * (2 if of_device > split or spec.has_pairs else 1)
        shards = math.prod(self.sizes[axis] for axis in axes)
        return {
            "num_microbatches": (microbatches, "a sum over microbatches has two terms"),
            "global_batch_size": (microbatches * shards * few, "so many for each device and microbatch"),
            "sequence_length": (self._length, "each chunk of a sequence has several tokens"),
            "num_steps": (10, "the schedule of the learning rate is whole"),
            "schedule.num_warmup_steps": (min(spec.schedule.num_warmup_steps, 1), "the first steps move the weights"),
        }

    def _pipeline(self) -> Cuts:
        declared, layers = self.declared, self.declared.spec.pipeline.layers
        if declared.pipeline is None:
            return {}
        planned = "as it was planned"
        cuts: Cuts = {"pipeline.head": ("stages" if declared.pipeline.shares_head else "last", planned)}
        cuts["pipeline.max_bubble"] = (None, "it is not judged")
        if declared.gather is not None:
            cuts["pipeline.gather"] = (declared.gather.when, planned)
        if isinstance(layers, tuple):
            cuts["pipeline.layers"] = (small_layers(layers, self.room.parts), "fewer where there were fewer")
        return cuts

    def _others(self) -> Cuts:
        """Returns what a processor, or a comparison, needs otherwise."""
        declared = self.declared
        of_compiler, judged = "it is of the target's compiler", "it is not judged"
        cuts: Cuts = {
            "overlap.flag_presets": ((), of_compiler),
            "overlap.pgle": (None, of_compiler),
            "overlap.search": (None, "nothing is searched"),
            "overlap.max_exposed": (None, judged),
            "compiler_options": ({}, of_compiler),
            "device_order": ((), "simulated devices have no links"),
        }
        if declared.spec.precision.has_few_bits:
            cuts["precision.emulate"] = (True, "a processor multiplies in no type of few bits")
        if declared.spec.adapter is not None and (base := declared.spec.adapter.base) is not None:
            fits = None if base.block is None else min(base.block, _LONGEST_BLOCK)
            cuts["adapter.base.block"] = (fits, "small matrices have as many")
            cuts["adapter.base.scales_block"] = (None, "weights are encoded more than once, to the same elements")
        for op in declared.ops:
            if plans := declared.operations_of(op.kind):
                cuts |= op.small_keys(plans)
        return cuts

    def _left_out(self) -> Iterator[str]:
        if presets := [name for name in self.declared.spec.overlap.flag_presets if name != AUTO]:
            yield f"compiler options of {', '.join(presets)}: they change the schedule, not what is computed"


def _planned(
    spec: AnyPlanSpec, operations: Sequence[OpPlan], ops: Sequence[ParallelOp]
) -> tuple[Plan[AnyPlanSpec], tuple[str, ...]]:
    """Plans the small declaration with the strategies of the declared one. Those that cannot run on a processor are
    left out, and named."""
    wanted = {(e.op.kind, e.site.path): e.chosen.name for e in operations if e.op.is_declared}
    named, why = dict(wanted), dict[tuple[str, str], str]()
    while True:
        parallel = dict[str, dict[str, str]]()
        for (kind, path), name in named.items():
            parallel.setdefault(kind, {})[path] = name
        try:
            plan = plan_run(spec.model_copy(update={"parallel": parallel}), ops)
        except ConfigError as error:
            sites = {f"parallel.{kind}.{path}": (kind, path) for kind, path in named}
            refused = {sites[p.where]: p.what for p in error.problems if p.where in sites}
            if not refused:
                raise _cannot_shrink(error) from error
            named = {site: name for site, name in named.items() if site not in refused}
            why |= refused
            continue
        found = {(each.op.kind, each.site.path): each.chosen.name for each in plan.operations}
        return plan, tuple(
            f"{' '.join(site)}: {found[site]} instead of {name}: {why.get(site, 'not there').split(': ', 1)[-1]}"
            for site, name in wanted.items()
            if found.get(site, name) != name
        )


def _cannot_shrink(error: ConfigError) -> ConfigError:
    """Returns the error of a small declaration that cannot be planned: which rule does not let it shrink."""
    return ConfigError(
        replace(each, what=f"a small declaration like this one cannot run: {each.what}") for each in error.problems
    )


def _with_values(spec: AnyRecord, values: Mapping[str, Any]) -> AnyRecord:
    """Returns the spec, or a part of it, with other values, by keys such as mesh.fsdp."""
    nested: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for key, value in values.items():
        outer, _, inner = key.partition(".")
        if inner:
            nested.setdefault(outer, {})[inner] = value
        else:
            top[outer] = value
    for outer, changed in nested.items():
        top[outer] = _with_values(getattr(spec, outer), changed)
    return spec.model_copy(update=top)


def _cuts_of(spec: Any, cuts: Cuts) -> Iterator[KeyCut]:
    for key, (value, why) in cuts.items():
        before: Any = spec
        for part in key.split("."):
            before = getattr(before, part, None)
        if before != value:
            yield KeyCut(key=key, declared=_shown(before), value=_shown(value), why=why)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Record):
        return "{" + ", ".join(f"{key}: {_shown(one)}" for key, one in value) + "}"
    return str(value)


def in_float32(spec: AnyPlanSpec) -> AnyPlanSpec:
    """Returns the declaration in float32, in which faults are not hidden by rounding."""
    return spec.model_copy(update={"precision": FLOAT32})


def in_float32_with_matmuls(spec: AnyPlanSpec) -> AnyPlanSpec:
    """Returns the declaration in float32, but for its matmuls in few bits, and what is sent to experts so. Roundings at
    random are to the nearest: no two meshes draw the same."""
    declared = spec.precision
    matmuls = tuple(each.model_copy(update={"rounding": "nearest"}) for each in declared.matmuls)
    sent = {"dispatch": declared.dispatch, "dispatch_gradients": declared.dispatch_gradients}
    precision = FLOAT32.model_copy(update={"matmuls": matmuls, **sent, "emulate": declared.emulate})
    return spec.model_copy(update={"precision": precision})


def without_matmuls(spec: AnyPlanSpec) -> AnyPlanSpec:
    """Returns the declaration without matmuls in few bits, which are multiplied in the compute type, and with tokens
    sent in it."""
    as_compute = {"matmuls": (), "dispatch": None, "dispatch_gradients": None, "emulate": False}
    precision = spec.precision.model_copy(update=as_compute)
    return spec.model_copy(update={"precision": precision})


def on_one_device(spec: AnyPlanSpec) -> AnyPlanSpec:
    """Returns the declaration on one device, without stages."""
    return on_mesh(spec, **{axis: 1 for axis, _ in spec.mesh})


def on_mesh(spec: AnyPlanSpec, **sizes: int) -> AnyPlanSpec:
    """Returns the declaration with other sizes of mesh axes, and as many devices."""
    mesh = spec.mesh.model_copy(update=sizes)
    num_devices = math.prod(size or 1 for _, size in mesh)
    target = CpuTarget(kind="cpu", num_devices=num_devices)
    return spec.model_copy(update={"mesh": mesh, "target": target})


def plainly(spec: AnyPlanSpec) -> AnyPlanSpec:
    """Returns a declaration whose operations and pipeline are chosen anew, for another mesh."""
    pipeline = spec.pipeline.model_copy(update={"layers": "even", "ticks": "auto", "head": "auto", "gather": "auto"})
    update: dict[str, Any] = {"parallel": {}}
    if spec.mesh.stage == 1:
        update["pipeline"] = pipeline
    return spec.model_copy(update=update)
