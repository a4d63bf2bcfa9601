"""Programs of one shape, as numbers that grow by powers: a few are traced, and the others follow.

The bytes of an array on a device are a product of sizes of the model, the number of sequences on a device, and one over
the sizes of mesh axes: c * sequences^1 * fsdp^-1 * tensor^-1. So are FLOPs, and trips of loops. Two or three points of
each family are traced, and the exponents of each number follow, exactly if it is a product:

  of the mesh axes    by least squares on logarithms, from points on other meshes
  of the counts       from one point that has 2 times the sequences, 8 times the chunks of the loss and 512 times the
                      microbatches: an exponent is -1, 0 or 1, so that a ratio of 2^-1 2^3 2^9 gives all three
  of both at once     from one point on another mesh with 5 times the sequences, 7 times the microbatches, and chunks by
                      a power of 2 that no product of mesh axes grows by, as long as every number is such a product.
                      Otherwise the mesh and the counts are traced apart

Where all candidates of a family have the same counts, it is traced with these.

Programs that differ in more than sizes are in other families: another variant, an axis that splits activations on one
device, one microbatch, another number of stages. A family is traced with the strategies that its candidates share, and
else with the fallback.

What a pipeline's ticks cost is no product of powers: their number, and what each stage runs in each of them, are those
of the candidate's own table (price.py). Its buffers grow with their slots in that table, as with a count.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from typing import TypeVar

import numpy as np
import scipy.linalg

from ..driver import plan_run
from ..estimate.estimated_step import BATCH_SPLIT, can_split_batch, plan_assumed, read_step
from ..estimate.program_costs import Costs, Numbers, ProgramShape, read_costs
from ..estimate.regions import price_regions
from ..estimate.step_time import Hiding, plan_hiding
from ..parallel.operation import loop_trips, runs_beside_compute
from ..parallel.pipeline_plan import PipelinePlan
from ..parallel.registry import OPERATIONS
from ..sharding.roles import plan_roles
from ..spec.overlap_spec import StrategyChoice
from ..spec.plan_spec import PlanSpec
from .space import MeshCandidate, Sizes, Variant, shape_of, slots_of, with_layout

Key = tuple[str, tuple[tuple[str, str], ...], tuple[str, ...], bool]
T = TypeVar("T")
R = TypeVar("R")
ParallelMap = Callable[[Callable[[T], R], Sequence[T]], Iterable[R]]

NUM_CHUNKS = 2  # in which the first reference computes its logits
NUM_MICROBATCHES = 64  # of the first reference; the one that may be outside of their loop is then a small part
COUNT_RATIOS = (2, 8, 512)  # ratios of sequences, chunks and microbatches
RATIOS_AT_ONCE = (5, 7)  # of sequences and microbatches, on another mesh: its sizes are products of 2 and 3
RANK_TOLERANCE = 1e-6
PRODUCT_TOLERANCE = 1e-6  # of a logarithm to the base of 2


@dataclass(frozen=True)
class TracePoint:
    """The choices that a program is traced for. sizes: those of all mesh axes. num_loss_chunks: the largest number of
    chunks. pipeline: over the stages of the mesh; None without."""

    variant: Variant
    sizes: Sizes
    num_microbatches: int
    sequences_of_device: int
    num_loss_chunks: int
    strategies: tuple[tuple[str, StrategyChoice], ...]
    pipeline: PipelinePlan | None

    def variables(self, num_slots: tuple[int, ...], *, is_last_apart: bool) -> tuple[float, ...]:
        """Returns the logarithms, to the base of 2, of the variables that numbers depend on: sizes of mesh axes, then
        counts. num_slots: of `slots_of`. is_last_apart: the loop over microbatches has one trip less than there are
        microbatches."""
        trips = self.num_microbatches - is_last_apart
        counts = (self.sequences_of_device, self.num_loss_chunks, trips, *num_slots)
        return tuple(np.log2([*(size for _, size in self.sizes), *counts]).tolist())


@dataclass(frozen=True)
class Reference:
    """A traced point. point: with the number of chunks in which the loss was computed. is_last_apart: gradients are
    reduced in the backward pass of the last microbatch, which is not part of the loop of the others."""

    point: TracePoint
    shape: ProgramShape
    numbers: Numbers
    hiding: Hiding
    is_last_apart: bool

    @property
    def variables(self) -> Numbers:
        return np.array(self.point.variables(slots_of(self.point.pipeline), is_last_apart=self.is_last_apart))


@dataclass(frozen=True)
class Family:
    """Programs of one shape. origin: variables of the first reference, and logarithms of its numbers. exponents: by
    variable and number."""

    shape: ProgramShape
    hiding: Hiding
    is_last_apart: bool
    origin: tuple[Numbers, Numbers]
    exponents: Numbers

    def costs(self, candidates: Sequence[MeshCandidate]) -> Costs:
        """Returns the costs of candidates of the family; of a pipeline, of candidates with one table."""
        variables, numbers = self.origin
        num_slots = slots_of(candidates[0].pipeline)
        points = [point_of(one).variables(num_slots, is_last_apart=self.is_last_apart) for one in candidates]
        steps = np.array(points) - variables
        with np.errstate(over="ignore"):
            found = np.exp2(numbers[:, None] + self.exponents.T @ steps.T)
        return Costs(self.shape, found)

    def hiding_of(self, candidates: Sequence[MeshCandidate]) -> Hiding:
        """Returns the overlap to assume for each candidate; some have no compute to hide activations behind. The
        family's own hiding is for an even number of sequences."""
        target = candidates[0].variant.target()
        # A device's sequences can be split, or a matmul runs in a ring.
        can_hide = [_has_rings(one) or can_split_batch(one.sequences_of_device, target) for one in candidates]
        shares = [self.hiding.activations_exposed if can else 1.0 for can in can_hide]
        return replace(self.hiding, activations_exposed=np.array(shares))


def find_families(
    groups: Mapping[Key, Sequence[MeshCandidate]], run: ParallelMap[TracePoint, Reference]
) -> dict[Key, Family]:
    """Returns the family of each group of candidates. run: maps `trace` over points, in several processes if it can.

    A group whose meshes turn out to have programs of different shapes is as many families as it has meshes.
    """
    traced = _trace_groups({key: choose_points(ones) for key, ones in groups.items()}, run)
    # Where the counts do not follow from a reference on another mesh: one for the mesh, and one for the counts.
    others = {key: ones for key, ones in traced.items() if _is_at_once(ones) and _exponents_at_once(ones) is None}
    points = {key: choose_points(groups[key], at_once=False)[len(ones) - 1 :] for key, ones in others.items()}
    traced |= {key: [*others[key][:-1], *more] for key, more in _trace_groups(points, run).items()}
    alike = dict[Key, list[Reference]]()
    for key, (first, *others) in traced.items():  # are the programs of all meshes of one shape?
        meshes = (one for one in others if one.point.sizes != first.point.sizes)
        if all(one.shape.operations == first.shape.operations for one in meshes):
            alike[key] = [first, *others]
    apart: dict[Key, list[MeshCandidate]] = defaultdict(list)
    for key, ones in groups.items():
        for one in ones if key not in alike else ():
            apart[_mesh_key(one)].append(one)
    of_meshes = {key: choose_points(ones) for key, ones in apart.items()}
    return {key: fit_family(references) for key, references in (alike | _trace_groups(of_meshes, run)).items()}


def _trace_groups(
    points: Mapping[Key, Sequence[TracePoint]], run: ParallelMap[TracePoint, Reference]
) -> dict[Key, list[Reference]]:
    traced = iter(list(run(trace, [point for ones in points.values() for point in ones])))
    return {key: [next(traced) for _ in ones] for key, ones in points.items()}


def group_candidates(candidates: Iterable[MeshCandidate]) -> dict[Key, list[MeshCandidate]]:
    """Returns the candidates by family.

    A mesh where an axis of the batch has one device has the same shape as the others: collectives over one device take
    no time. Where this leaves too few meshes to learn from, as on few devices, each set of axes is a family.
    """
    groups: dict[Key, list[MeshCandidate]] = defaultdict(list)
    for one in candidates:
        groups[_wide_key(one)].append(one)
    found: dict[Key, list[MeshCandidate]] = {}
    for key, ones in groups.items():
        spanning = _spanning(ones)
        if spanning and _rank(spanning) == _rank(_mesh_sizes(ones)):
            found[key] = ones
            continue
        for one in ones:
            found.setdefault(_narrow_key(one), []).append(one)
    return found


def family_key(one: MeshCandidate, families: Mapping[Key, Family]) -> Key | None:
    """Returns the key of a candidate's family; None if it has none."""
    return next((key for key in (_wide_key(one), _narrow_key(one), _mesh_key(one)) if key in families), None)


def _wide_key(one: MeshCandidate) -> Key:
    hard = tuple(axis for axis in _named_axes(one) if axis not in one.roles.sequence)
    return "any axes of the batch", one.variant.choices, hard, one.num_microbatches > 1


def _narrow_key(one: MeshCandidate) -> Key:
    return "these axes", one.variant.choices, _named_axes(one), one.num_microbatches > 1


def _mesh_key(one: MeshCandidate) -> Key:
    sizes = tuple(f"{axis}={size}" for axis, size in one.sizes)
    return "this mesh", one.variant.choices, (*sizes, *shape_of(one.pipeline)), one.num_microbatches > 1


def _named_axes(one: MeshCandidate) -> tuple[str, ...]:
    """Returns the axes of more than one device. An axis with a ring, which has a step for each device, is named with
    its size, and so are the stages of a pipeline."""
    with_size = {*one.roles.length, *one.roles.stage}
    if _has_rings(one):
        with_size |= set(one.roles.partitioner)
    named = (f"{axis}={size}" if axis in with_size else axis for axis, size in one.sizes)
    return (*named, *shape_of(one.pipeline))


def _has_rings(one: MeshCandidate) -> bool:
    return runs_beside_compute(OPERATIONS, ((kind, strategy) for kind, _, strategy in one.strategies))


def point_of(one: MeshCandidate) -> TracePoint:
    """Returns the point of a candidate, whose variables its numbers follow from."""
    sizes = tuple(one.mesh.sizes.items())
    return TracePoint(
        one.variant, sizes, one.num_microbatches, one.sequences_of_device, one.num_loss_chunks, (), one.pipeline
    )


def choose_points(candidates: Sequence[MeshCandidate], *, at_once: bool = True) -> list[TracePoint]:
    """Returns the points of a family to trace: one in the middle, one in each direction in which meshes differ, and one
    with other counts if candidates differ in them, which is also the last of the meshes where both can be read off at
    once. A pipeline is traced with the fewest microbatches that its candidates have, and with the most, as
    its schedule may not run with others, by the tables of these candidates.

    Each axis of the batch has more than one device in all of them, if possible: its collectives then belong to the
    shape, and take no time on one device.
    """
    sizes = _meshes(candidates)
    middle = float(np.median(np.log2([one.sequences_of_device for one in candidates])))
    # Arrays of one sequence are like those without the dimension, and a split batch has half of the sequences in each.
    sequences = max(2 * BATCH_SPLIT, int(2 ** round(middle)))
    numbers, is_staged = {one.num_microbatches for one in candidates}, candidates[0].num_stages > 1
    is_counted = candidates[0].num_microbatches > 1 and not is_staged
    num_microbatches = NUM_MICROBATCHES if is_counted else min(numbers)
    strategies = _common_strategies(candidates)
    tables = {one.num_microbatches: one.pipeline for one in candidates}
    counts = {(one.num_microbatches, one.sequences_of_device, one.num_loss_chunks) for one in candidates}
    if len(counts) == 1 and not is_staged:
        only = TracePoint(candidates[0].variant, sizes[0], *counts.pop(), strategies, None)
        return [only, *(replace(only, sizes=other) for other in sizes[1:])]
    pipeline, variant = tables.get(num_microbatches), candidates[0].variant
    first = TracePoint(variant, sizes[0], num_microbatches, sequences, NUM_CHUNKS, strategies, pipeline)
    more_sequences, more_chunks, more_microbatches = COUNT_RATIOS
    others = replace(
        first,
        sequences_of_device=sequences * more_sequences,
        num_loss_chunks=NUM_CHUNKS * more_chunks,
        num_microbatches=num_microbatches * more_microbatches if is_counted else num_microbatches,
    )
    if at_once and len(sizes) > 1 and not is_staged and (both := _with_counts(first, sizes[-1], is_counted)):
        return [first, *(replace(first, sizes=other) for other in sizes[1:-1]), both]
    most = max(numbers)
    more = [replace(first, num_microbatches=most, pipeline=tables[most])] if is_staged and len(numbers) > 1 else []
    return [first, *(replace(first, sizes=other) for other in sizes[1:]), others, *more]


def _with_counts(first: TracePoint, sizes: Sizes, is_counted: bool) -> TracePoint | None:
    """Returns a point on another mesh with other counts than the first; None if too many chunks would be needed to read
    off both. is_counted: whether candidates differ in their microbatches."""
    more_sequences, more_microbatches = RATIOS_AT_ONCE
    growths = _mesh_growths(first.sizes, sizes)
    differences = {round(abs(one - other), 9) for one, other in product(growths, repeat=2)}
    num_chunks = first.num_loss_chunks * 2 ** next(n for n in count(1) if not {n, 2 * n} & differences)
    if num_chunks > first.variant.spec.sequence_length // math.prod(size for _, size in sizes):
        return None
    return replace(
        first,
        sizes=sizes,
        sequences_of_device=first.sequences_of_device * more_sequences,
        num_loss_chunks=num_chunks,
        num_microbatches=first.num_microbatches * (more_microbatches if is_counted else 1),
    )


def _mesh_growths(sizes: Sizes, others: Sizes) -> list[float]:
    """Returns the logarithms of the ratios that a number may have between two meshes: it grows with some of the axes,
    and with one over others."""
    ratios = [np.log2(other / size) for (_, size), (_, other) in zip(sizes, others, strict=True) if other != size]
    signs = product((-1, 0, 1), repeat=len(ratios))
    return sorted({round(float(np.dot(each, ratios)), 9) for each in signs})


def trace(point: TracePoint) -> Reference:
    """Returns the reference of a point, whose step it traces. That takes half a second and no devices."""
    plan = plan_assumed(replace(plan_run(_spec_of(point)), pipeline=point.pipeline))
    weights = frozenset(array.array.path for array in plan.sharding.parameters)
    shape, numbers = read_costs(price_regions(read_step(plan), plan.target.compiler), weights, plan.ops)
    loss = loop_trips(plan.operations)
    trips = {int(numbers[region[0][0]]) for region in shape.regions if len(region) == 1}  # trips of outer loops
    number = point.num_microbatches
    is_last_apart = plan.spec.overlap.layers.reduce_in_backward and number not in trips and number - 1 in trips
    hiding, point = plan_hiding(plan), replace(point, num_loss_chunks=loss)
    return Reference(point, shape, numbers, hiding, is_last_apart)


def fit_family(references: Sequence[Reference]) -> Family:
    """Returns the family of references in the order of `choose_points`. A reference with other counts is left out if
    its shape differs from the first. Arrays that reuse one another's memory, which depends on sizes, do as in the
    first."""
    first, *others = (one for one in references if one.shape.operations == references[0].shape.operations)
    origin, numbers = first.variables, _logarithms(first)
    meshes = [one for one in others if one.point.sizes != first.point.sizes]
    counts = [one for one in others if one.point.sizes == first.point.sizes]
    num_axes = len(first.point.sizes)
    exponents = np.zeros((len(origin), len(numbers)))
    if counts:
        steps = np.stack([one.variables for one in counts])[:, num_axes:] - origin[num_axes:]
        exponents[num_axes:] = count_exponents(_grown(counts, numbers), steps)
    elif (found := _exponents_at_once(references)) is not None:
        exponents[num_axes:] = found
    if meshes:
        steps = np.stack([one.variables for one in meshes]) - origin
        of_mesh, of_counts = steps[:, :num_axes], steps[:, num_axes:] @ exponents[num_axes:]
        exponents[:num_axes] = np.linalg.pinv(of_mesh, rcond=RANK_TOLERANCE) @ (_grown(meshes, numbers) - of_counts)
    origins = origin, numbers
    return Family(first.shape, first.hiding, first.is_last_apart, origins, exponents)


def count_exponents(grown: Numbers, steps: Numbers) -> Numbers:
    """Returns the exponents of each number, a row for each count: of the choices of -1, 0 and 1 for sequences and
    chunks, and for at most one of the others, the one that comes closest to the growth of the number. grown: log2 of
    its ratio, by point and number; steps: log2 of the ratio of each count, by point and count."""
    choices = _count_choices(steps.shape[1])
    off = np.abs(choices @ steps.T - grown.T[:, None, :]).sum(axis=2)
    # The first of equally close has most zeros.
    return choices[np.argmin(off.round(6), axis=1)].T.astype(float)


def _count_choices(num_counts: int) -> Numbers:
    """Returns the exponents that a number may have, the fewest first: a row for each choice."""
    num_others = num_counts - 2
    others = [(0,) * num_others, *(tuple(row) for sign in (1, -1) for row in (sign * np.eye(num_others, dtype=int)))]
    return np.array([(*two, *rest) for rest in others for two in product((0, 1, -1), repeat=2)])


def _is_at_once(references: Sequence[Reference]) -> bool:
    """Returns True if the last reference differs from the first in both its mesh and its counts."""
    first, last = references[0].point, references[-1].point
    return first.sizes != last.sizes and first.sequences_of_device != last.sequences_of_device


def _exponents_at_once(references: Sequence[Reference]) -> Numbers | None:
    """Returns the exponents of the counts, a row for each, from a last reference that differs in its mesh and in its
    counts; None if there is none, or a number is no product that can be read off."""
    first, last = references[0], references[-1]
    if not _is_at_once(references) or last.shape.operations != first.shape.operations:
        return None
    steps = (last.variables - first.variables)[len(first.point.sizes) :]
    choices = _count_choices(len(steps))
    choices = choices[(choices[:, steps == 0] == 0).all(axis=1)]
    growths = np.array(_mesh_growths(first.point.sizes, last.point.sizes))
    expected = (choices @ steps)[:, None] + growths
    order = np.argsort(expected, axis=None)
    every = expected.ravel()[order]
    if np.diff(every).min() < 2 * PRODUCT_TOLERANCE:
        return None
    (grown,) = _grown([last], _logarithms(first))
    after = np.searchsorted(every, grown).clip(1, len(every) - 1)
    nearest = np.where(grown - every[after - 1] < every[after] - grown, after - 1, after)
    if np.abs(every[nearest] - grown).max() > PRODUCT_TOLERANCE:
        return None
    return choices[order[nearest] // len(growths)].T.astype(float)


def _logarithms(one: Reference) -> Numbers:
    with np.errstate(divide="ignore"):
        return np.log2(one.numbers)


def _grown(others: Sequence[Reference], numbers: Numbers) -> Numbers:
    with np.errstate(invalid="ignore"):
        grown = np.stack([_logarithms(one) for one in others]) - numbers
    grown[~np.isfinite(grown)] = 0.0  # zero in one of them
    return grown


def _spec_of(point: TracePoint) -> PlanSpec:
    """Returns the declaration of a point, with its batch, and with a limit on logits that gives its chunks."""
    base, staged = point.variant.spec, point.pipeline
    sizes, shares_head = dict(point.sizes), staged is not None and staged.shares_head
    roles = plan_roles(base.sharding, sizes)
    shards = math.prod(sizes[axis] for axis in roles.sequence)
    batch = point.sequences_of_device * point.num_microbatches * shards
    of_vocab = (axis for rule in base.sharding.activations if "vocab" in rule.logical for axis in rule.mesh)
    split = math.prod(sizes[axis] for axis in (*of_vocab, *(roles.stage if shares_head else ())))
    length = base.sequence_length // math.prod(sizes[axis] for axis in roles.length)
    tokens = point.sequences_of_device * length
    limit = max(1, -(-tokens * base.model.vocab_size * 4 // split // point.num_loss_chunks))
    loss = base.loss.model_copy(update={"max_logits_bytes": limit, "max_logits_share": 0.0, "num_chunks": None})
    pipeline = base.pipeline.model_copy(update={"head": staged.head.place} if staged else {})
    if staged and pipeline.layers == "balanced":
        pipeline = pipeline.model_copy(update={"layers": staged.layers.totals})
    update = {
        "global_batch_size": batch,
        "loss": loss,
        "pipeline": pipeline,
        "parallel": {**base.parallel, **dict(point.strategies)},
    }
    return with_layout(base, sizes, point.num_microbatches).model_copy(update=update)


def _meshes(candidates: Sequence[MeshCandidate]) -> list[Sizes]:
    """Returns meshes of the candidates that span all of theirs, beginning with the one in the middle."""
    known = _spanning(candidates) or _mesh_sizes(candidates)
    points = _logs(known)
    middle = int(np.argmin(np.abs(points - np.median(points, axis=0)).sum(axis=1)))
    steps = (points - points[middle]).T
    if not steps.any():
        return [known[middle]]
    _, order = scipy.linalg.qr(steps, mode="r", pivoting=True)  # pyright: ignore[reportAssignmentType]
    return [known[middle], *(known[i] for i in order[: _rank(known)])]


def _mesh_sizes(candidates: Sequence[MeshCandidate]) -> list[Sizes]:
    return list(dict.fromkeys(tuple(one.mesh.sizes.items()) for one in candidates))


def _spanning(candidates: Sequence[MeshCandidate]) -> list[Sizes]:
    """Returns the meshes in which every axis of the batch that some use has more than one device."""
    used = {axis for one in candidates for axis in one.roles.sequence}
    return [sizes for sizes in _mesh_sizes(candidates) if all(size > 1 for axis, size in sizes if axis in used)]


def _logs(meshes: Sequence[Sizes]) -> Numbers:
    return np.log2([[size for _, size in sizes] for sizes in meshes])


def _rank(meshes: Sequence[Sizes]) -> int:
    """Returns the number of directions in which meshes differ."""
    points = _logs(meshes)
    return int(np.linalg.matrix_rank(points - points[0], tol=RANK_TOLERANCE))


def _common_strategies(candidates: Sequence[MeshCandidate]) -> tuple[tuple[str, StrategyChoice], ...]:
    """Returns the strategies of each kind of operation: those that all candidates share, else the fallback."""
    found: dict[str, StrategyChoice] = {}
    for op in OPERATIONS:
        if op.is_declared:
            ways = {tuple((site, name) for kind, site, name in one.strategies if kind == op.kind) for one in candidates}
            found[op.kind] = dict(ways.pop()) if len(ways) == 1 else op.fallback
    return tuple(found.items())
