"""The space of a search: its declarations, and those of them that the rules allow.

A variant is a declaration with other options of config groups (remat=full); a candidate is a variant on a mesh, with a
number of microbatches. The rules are those of `plan_layout`, so that a candidate is refused here for the reason that
`explain` would give.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations, product
from typing import Any

from meshloom.models.config import divisors

from ..core.errors import ConfigError, Problem, raise_if_any
from ..core.partition_spec import STAGE
from ..driver import Layout, plan_layout
from ..estimate.stage_buffers import allocated_slots
from ..estimate.step_time import plan_rates
from ..parallel.operation import loop_trips
from ..parallel.pipeline_plan import PipelinePlan
from ..parallel.remat import check_remat
from ..search.candidates import Candidate
from ..sharding.arrays import Arrays, build_model, find_arrays
from ..sharding.roles import AxisRoles, plan_roles
from ..spec.plan_spec import PlanSpec
from ..target.accuracy import ProgramKind, program_kinds
from ..target.compiler_options import with_options
from ..target.mesh import MeshPlan
from ..target.placement import plan_placement, square_block
from ..target.target import TargetPlan, calibrate_target, plan_target

PIPELINE = "pipeline"  # the group of schedules
NO_STAGES = f"{PIPELINE}: there are no stages, and a candidate of another schedule is the same"
PARAMETERS_TOO_LARGE = "the parameters alone are larger than a device's memory"
GroupChoices = tuple[tuple[str, str], ...]  # the option of each config group
Sizes = tuple[tuple[str, int], ...]  # of mesh axes
MeshPoint = tuple[Sizes, tuple[str, ...], int]  # sizes of all axes, order of devices, number of microbatches


@dataclass(frozen=True)
class Variant:
    """A declaration of the space, without its mesh and microbatches. choices: the options of groups that it is made
    by."""

    choices: GroupChoices
    spec: PlanSpec

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Returns the mesh axes whose sizes are searched."""
        staged = (STAGE,) if STAGE in self.spec.tune.mesh else ()
        return tuple(dict.fromkeys((*mesh_axes(self.spec), *staged, *_pinned_sizes(self.spec))))

    def target(self) -> TargetPlan:
        """Returns the target, with the figures of the type that the variant computes in."""
        target = calibrate_target(plan_target(self.spec.target, self.spec.precision.compute), self.spec.calibration)
        return with_options(target, self.spec.overlap.flag_presets, self.spec.compiler_options)


@dataclass(frozen=True)
class MeshCandidate(Candidate):
    """A variant on a mesh. values: the searched keys with their values. device_order: the order of mesh axes on the
    links. num_loss_chunks: the number of chunks in which logits are computed. strategies: (kind, site, name) of each
    declared operation. kinds: of program. pipeline: over its stages; None without."""

    values: Mapping[str, str | int]
    variant: Variant
    mesh: MeshPlan
    roles: AxisRoles
    device_order: tuple[str, ...]
    num_microbatches: int
    sequences_of_device: int  # of one microbatch
    num_loss_chunks: int
    strategies: tuple[tuple[str, str, str], ...]
    kinds: tuple[ProgramKind, ...]
    pipeline: PipelinePlan | None

    @property
    def num_stages(self) -> int:
        return self.mesh.num_shards(self.roles.stage)

    @property
    def sizes(self) -> Sizes:
        return tuple((axis, size) for axis, size in self.mesh.sizes.items() if size > 1)

    def spec(self) -> PlanSpec:
        """Returns the whole declaration."""
        return with_layout(self.variant.spec, self.mesh.sizes, self.num_microbatches, self.device_order)


@dataclass
class Refused:
    """Candidates that the rules refuse, counted by reason, with one example for each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, reason: str, overrides: tuple[str, ...], number: int = 1) -> None:
        self.counts[reason] += number
        self.examples.setdefault(reason, overrides)

    @property
    def total(self) -> int:
        return self.counts.total()


def with_layout(
    spec: PlanSpec, sizes: Mapping[str, int], num_microbatches: int, device_order: Sequence[str] | None = None
) -> PlanSpec:
    """Returns the declaration on a mesh of these sizes, with this number of microbatches, and with another order of
    devices if one is given."""
    order = spec.device_order if device_order is None else tuple(device_order)
    mesh = spec.mesh.model_copy(update=dict(sizes))
    return spec.model_copy(update={"mesh": mesh, "num_microbatches": num_microbatches, "device_order": order})


def find_candidates(variants: Sequence[Variant]) -> tuple[list[MeshCandidate], Refused]:
    """Returns the candidates that the rules allow, and the refused ones by reason. Raises ConfigError if one variant
    has more than `tune.max_candidates`."""
    found: list[MeshCandidate] = []
    refused = Refused()
    known: dict[str, dict[MeshPoint, Layout | ConfigError | None]] = {}  # None: not planned yet
    unstaged: dict[tuple[GroupChoices, MeshPoint], Variant] = {}  # the first variant without stages, whatever pipeline
    for variant in variants:
        rules, most = _Rules(variant), variant.spec.tune.max_candidates
        # Layouts do not depend on the optimizer, and without stages not on remat, which a pipeline's table depends on.
        unused = {"optimizer", "schedule", *(() if STAGE in variant.axes else ("remat",))}
        key = json.dumps(variant.spec.model_dump(mode="json", exclude=unused), sort_keys=True)
        if key not in known:
            known[key] = dict.fromkeys(rules.points())
            if (number := len(known[key])) > most:
                what = f"one variant has {number:,} candidates, more than tune.max_candidates={most:,}"
                fix = "narrow tune.mesh or tune.microbatches, pin an axis, or set tune.max_candidates"
                raise ConfigError([Problem("tune", what, fix)])
        layouts = known[key]
        if (refusal := rules.refusal()) is not None:
            refused.add(reason_of(refusal), tuple(f"{k}={v}" for k, v in variant.choices), len(layouts))
            continue
        for point, planned in layouts.items():
            sizes, device_order, num_microbatches = point
            others = tuple(each for each in variant.choices if each[0] != PIPELINE)
            if dict(sizes)[STAGE] == 1 and unstaged.setdefault((others, point), variant) is not variant:
                refused.add(NO_STAGES, tuple(f"{k}={v}" for k, v in variant.choices))
                continue
            layout = layouts[point] = planned or rules.layout(point)
            if isinstance(layout, ConfigError):
                axes = (f"mesh.{axis}={size}" for axis, size in sizes if size > 1)
                words = (f"{group}={option}" for group, option in variant.choices)
                refused.add(reason_of(layout), (*words, *axes, f"num_microbatches={num_microbatches}"))
                continue
            one = _candidate(variant, layout, device_order, num_microbatches, rules.kinds(layout))
            if (limit := rules.target.hbm_bytes_per_device) and layout.parameter_bytes > limit:
                refused.add(PARAMETERS_TOO_LARGE, one.overrides)
                continue
            found.append(one)
    return found, refused


def num_points(variant: Variant) -> int:
    """Returns the number of candidates that a variant has, before the rules."""
    return sum(1 for _ in _Rules(variant).points())


def mesh_axes(spec: PlanSpec) -> tuple[str, ...]:
    """Returns the mesh axes that the sharding rules use. Of axes with the same role, such as replica and data, which
    only split the batch, it returns the first."""
    roles: dict[str, frozenset[tuple[str, int]]] = {}
    tables = {"parameters": spec.sharding.parameters, "optimizer": spec.sharding.optimizer,
              "activations": spec.sharding.activations}  # fmt: skip
    for axis in type(spec.mesh).model_fields:
        role = frozenset(
            (name, i) for name, rules in tables.items() for i, rule in enumerate(rules) if axis in rule.mesh
        )
        if role and role not in roles.values():
            roles[axis] = role
    return tuple(roles)


def mesh_sizes(axes: Sequence[str], num_devices: int, allowed: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Yields the sizes of all meshes of these axes whose product is the number of devices. allowed: the sizes that an
    axis may have; any, where it is not named."""
    if not axes:
        if num_devices == 1:
            yield {}
        return
    first, *rest = axes
    for size in divisors(num_devices):
        if first not in allowed or size in allowed[first]:
            yield from ({first: size, **others} for others in mesh_sizes(rest, num_devices // size, allowed))


def reason_of(error: ConfigError) -> str:
    """Returns the reason of a refusal, equal for similar candidates: the key, and what is wrong without its numbers."""
    problem = error.problems[0]
    return f"{problem.where}: {problem.what}"


class _Rules:
    """The rules for one variant."""

    def __init__(self, variant: Variant) -> None:
        self.spec, self.axes = variant.spec, variant.axes
        spec = variant.spec
        self.model = build_model(spec)
        self.target = variant.target()
        self.arrays: dict[int, Arrays] = {}

    def refusal(self) -> ConfigError | None:
        """Returns why the variant can run on no mesh, or cannot be priced; None if it can."""
        if plan_rates(self.target) is None:
            what = f"the speed of {self.target.name} in {self.spec.precision.compute} is not known"
            return ConfigError([Problem("precision.compute", what, "choose a precision whose speed it declares")])
        try:
            check_remat(self.spec.remat, self.arrays_of(1))
        except ConfigError as error:
            return error
        return None

    def points(self) -> Iterator[MeshPoint]:
        """Yields all meshes in all orders of devices with all numbers of microbatches."""
        wanted = {axis: sizes for axis, sizes in self.spec.tune.mesh.items() if sizes is not None}
        allowed = wanted | _pinned_sizes(self.spec)
        for sizes in mesh_sizes(self.axes, self.target.num_devices, allowed):
            whole = dict.fromkeys(type(self.spec.mesh).model_fields, 1) | sizes
            shards = math.prod(whole[axis] for axis in plan_roles(self.spec.sharding, whole).sequence)
            for order, number in product(self.device_orders(whole), _microbatches(self.spec, shards)):
                yield tuple(whole.items()), order, number

    def device_orders(self, sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
        """Returns the orders of devices of a mesh: one of those that place it in the same way, and those with the
        nearest axis as a block of chips. Of the declared one alone there may be such blocks, too."""
        if self.spec.tune.device_orders == "declared":
            return [self.spec.device_order, *self._in_scattered_blocks(sizes)]
        used = [axis for axis, size in sizes.items() if size > 1]
        found: dict[str, tuple[str, ...]] = {}
        for order in permutations(used):
            try:
                placed = plan_placement(sizes, self.target, order)
            except ConfigError:  # no axis can cross slices; the rules refuse it in any order
                return [self.spec.device_order]
            found.setdefault(str(placed.describe()), order)
            if order and (block := square_block(placed, order[0])):
                in_block = (f"{order[0]}:{'x'.join(map(str, block))}", *order[1:])
                found.setdefault(str(plan_placement(sizes, self.target, in_block).describe()), in_block)
        return list(found.values())

    def _in_scattered_blocks(self, sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
        """Returns the orders in which an axis that splits sequences is a block of chips over which gradients stay
        reduce-scattered, where no order is declared and the compiler has such blocks."""
        block = self.target.compiler.scattered_block
        if not block or self.spec.device_order or self.target.num_devices <= math.prod(block):
            return []
        axes = plan_roles(self.spec.sharding, sizes).sequence
        return [(f"{axis}:{'x'.join(map(str, block))}",) for axis in axes if sizes[axis] == math.prod(block)]

    def arrays_of(self, num_microbatches: int) -> Arrays:
        if num_microbatches not in self.arrays:
            spec = self.spec.model_copy(update={"num_microbatches": num_microbatches})
            self.arrays[num_microbatches] = find_arrays(spec, self.model)
        return self.arrays[num_microbatches]

    def kinds(self, layout: Layout) -> tuple[ProgramKind, ...]:
        has_experts = self.model.num_active_experts is not None
        return program_kinds(self.target, layout.mesh.sizes, self.spec.sequence_length, has_experts=has_experts)

    def layout(self, point: MeshPoint) -> Layout | ConfigError:
        sizes, device_order, num_microbatches = point
        spec = with_layout(self.spec, dict(sizes), num_microbatches, device_order)
        try:
            return plan_layout(spec, self.model, self.target, self.arrays_of(num_microbatches))
        except ConfigError as error:
            return error


def _candidate(
    variant: Variant,
    layout: Layout,
    device_order: tuple[str, ...],
    num_microbatches: int,
    kinds: tuple[ProgramKind, ...],
) -> MeshCandidate:
    shards = layout.mesh.num_shards(layout.sharding.roles.sequence)
    sequences = variant.spec.global_batch_size // num_microbatches // shards
    declared = (each for each in layout.operations if each.op.is_declared)
    strategies = tuple((each.op.kind, each.site.path, each.chosen.name) for each in declared)
    axes = {f"mesh.{axis}": layout.mesh.sizes[axis] for axis in variant.axes}
    is_searched = variant.spec.tune.device_orders == "all" or device_order != variant.spec.device_order
    placed = {"device_order": f"[{','.join(device_order)}]"} if is_searched else {}
    values = {**dict(variant.choices), **axes, **placed, "num_microbatches": num_microbatches}
    return MeshCandidate(
        overrides=tuple(f"{key}={value}" for key, value in values.items()),
        values=values,
        variant=variant,
        mesh=layout.mesh,
        roles=layout.sharding.roles,
        device_order=device_order,
        num_microbatches=num_microbatches,
        sequences_of_device=sequences,
        num_loss_chunks=loop_trips(layout.operations),
        strategies=strategies,
        kinds=kinds,
        pipeline=layout.pipeline,
    )


def _pinned_sizes(spec: PlanSpec) -> dict[str, tuple[int, ...]]:
    return {axis: (size,) for axis, size in dict(spec.tune.pin.get("mesh", {})).items()}


def _microbatches(spec: PlanSpec, shards: int) -> Sequence[int]:
    """Returns the numbers of microbatches that leave each shard whole sequences; 1 where none does, so that the refusal
    is counted."""
    pinned = spec.tune.pin.get("num_microbatches")
    if pinned is not None:
        return (int(pinned),)
    numbers = divisors(spec.global_batch_size // shards) if spec.global_batch_size % shards == 0 else [1]
    wanted = spec.tune.microbatches
    return [n for n in numbers if wanted is None or n in wanted]


def check_pins(pins: Mapping[str, Any], groups: Sequence[str]) -> None:
    """Raises ConfigError for pinned keys that are not searched."""
    known = (*groups, "mesh", "num_microbatches")
    raise_if_any(
        Problem(f"tune.pin.{key}", "is not a key that is searched", f"pin one of {', '.join(known)}")
        for key in pins
        if key not in known
    )


def product_of(groups: Mapping[str, Sequence[str]]) -> Iterator[GroupChoices]:
    """Yields all combinations of one option of each group."""
    keys = list(groups)
    yield from (tuple(zip(keys, options, strict=True)) for options in product(*groups.values()))


def shape_of(pipeline: PipelinePlan | None) -> tuple[str, ...]:
    """Returns what the program of a pipeline depends on, beside the length of its table."""
    if pipeline is None:
        return ()
    table, layers = pipeline.table, pipeline.layers.totals
    form = "multi" if any(len(slots) > 1 for row in table.rows for slots in row) else "unit"
    return f"head={pipeline.head.place}", f"layers={layers}", f"ticks={form}", f"operations={sorted(table.ops)}"


def slots_of(pipeline: PipelinePlan | None) -> tuple[int, ...]:
    """Returns the slots of each kind of buffer; at least one each, also of a buffer that the table lacks."""
    if pipeline is None:
        return ()
    return tuple(max(1, number) for number in allocated_slots(pipeline.table).values())
