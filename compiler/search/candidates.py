"""Generates and judges the candidates of searches.

All candidates have the same figures; searches differ in how they generate them.

find_alternatives     other remat policies, shardings and overlaps        by the estimate
suggest_changes       changes that save memory, to make a step fit        by the estimate
overlap_candidates    loops over layers, strategies and flag presets      by the compiled schedule (`overlap.search`)
tune/space.py         meshes, microbatches and options of groups          by prices, the best by the estimate

A program grows neither with its layers (a loop's body repeats) nor with the devices, so the candidates of
`overlap.search` are full programs. A simple model orders them; the schedules of the compiled ones decide.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import jax

from ..core.errors import ConfigError, Problem
from ..core.known import Unknown
from ..estimate.estimate import StepEstimate, estimate_step
from ..estimate.estimated_step import overrides_of_imbalance, plan_usual_imbalance
from ..figures import StepFigures
from ..parallel.weight_plan import WeightPlan
from ..plan import Plan
from ..schema import Alternative, MemoryChange, TriedReport
from ..sharding.sharding import ShardingPlan, check_gradients
from ..spec.flag_presets import FlagPreset, begin_early
from ..spec.overlap_spec import LayerLoop, OverlapConfig, StrategyChoice
from ..spec.plan_spec import AnyPlanSpec, PlanSpec
from ..target.compiler_options import aborts_unrolled, hidden_kinds, options_with, presets_for
from ..target.target import TargetPlan

Replan = Callable[[tuple[str, ...]], Plan]  # the plan with these additional overrides; raises ConfigError


@dataclass(frozen=True)
class Candidate:
    """A declaration that a search tries. overrides: the overrides of the searched declaration that lead to it; () for
    that declaration itself. cost: in words, its cost besides the figures of its evaluation."""

    overrides: tuple[str, ...]
    cost: str = field(default="", kw_only=True)


def estimate_allowed(one: Candidate, replan: Replan) -> tuple[Plan, StepFigures] | None:
    """Returns the plan of a candidate and its estimated figures; None if the declaration does not allow it."""
    try:
        plan = replan(one.overrides)
        return plan, estimate_step(plan).figures
    except ConfigError:
        return None


POLICIES = ("full", "save_names", "save_dots", "minimal", "none")
OVERLAPS = (("overlap=none",), ("overlap=xla",), ("overlap=auto",))
_AXES = ("replica", "data", "fsdp", "tensor")
UNTIMED = "the time of a step cannot be estimated: see `meshloom explain`"
_TENSOR = 4  # shards of a layer: as many as fit on the shortest links of all chips


def find_alternatives(plan: Plan, estimate: StepEstimate, replan: Replan) -> tuple[Alternative, ...]:
    """Returns the declared step and steps that differ from it in one thing, by the estimate. If experts have room for
    any imbalance, the step with room for the usual one is among them.

    Left out are declarations that are not allowed, and overlaps that make no difference to the estimate. Empty if there
    is no other step, or if times cannot be estimated.
    """
    if isinstance(estimate.figures.step_seconds, Unknown):
        return ()

    def allowed(some: Iterable[tuple[str, ...]]) -> list[Alternative]:
        found = ((overrides, estimate_allowed(Candidate(overrides), replan)) for overrides in some)
        return [Alternative(overrides=overrides, figures=each[1]) for overrides, each in found if each]

    remats = ((f"remat={policy}",) for policy in POLICIES if policy != plan.spec.remat.policy)
    others = allowed((*remats, *_of_sharding(plan)))
    others += [one for one in allowed(OVERLAPS) if one.figures.step_seconds != estimate.figures.step_seconds]
    if usual := plan_usual_imbalance(plan):
        others.append(
            Alternative(
                overrides=overrides_of_imbalance(usual.spec.moe.max_imbalance), figures=estimate_step(usual).figures
            )
        )
    return (Alternative(overrides=(), figures=estimate.figures), *others) if others else ()


def _of_sharding(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yields FSDP, HSDP, and FSDP with tensor parallelism, except the one whose mesh is declared. Replicas of HSDP are
    nodes, blocks of chips over which gradients stay reduce-scattered, or halves. Yields nothing if other axes split the
    devices."""
    sizes = {axis: plan.mesh.sizes.get(axis, 1) for axis in _AXES}
    num_devices = math.prod(sizes.values())
    if num_devices == 1 or num_devices != plan.mesh.num_devices:
        return
    target = plan.target
    inner = target.shape[1] if target.platform == "gpu" and target.shape else num_devices // 2
    block, order = target.compiler.scattered_block, tuple[str, ...]()
    if block and num_devices > math.prod(block):
        inner, order = math.prod(block), (f"device_order=[fsdp:{'x'.join(map(str, block))}]",)
    for name, mesh in (
        ("fsdp", {"fsdp": num_devices}),
        ("hsdp", {"replica": num_devices // inner, "fsdp": inner}),
        ("fsdp_tensor", {"fsdp": num_devices // _TENSOR, "tensor": _TENSOR}),
    ):
        wanted = {axis: mesh.get(axis, 1) for axis in _AXES}
        if wanted != sizes and math.prod(wanted.values()) == num_devices and 1 not in mesh.values():
            changed = (f"mesh.{axis}={size}" for axis, size in wanted.items() if size != sizes[axis])
            yield (f"sharding={name}", *changed, *(order if name == "hsdp" else ()))


def suggest_changes(plan: Plan, needed_bytes: int, limit_bytes: int, replan: Replan) -> tuple[MemoryChange, ...]:
    """Returns changes that save memory, by the estimate: those that fit first, then by the time that they cost. If no
    single change fits, several are combined. needed_bytes: the bytes that the compiled program needs on a device.
    Changes that the declaration does not allow are omitted. Changes that affect the result of training, or the number
    of tokens in a step, are tried only if nothing that costs time alone fits."""
    now, per_chip = estimate_step(plan).figures, plan.target.used_devices_per_chip

    def change(one: Candidate) -> MemoryChange | None:
        found = estimate_allowed(one, replan)
        if found is None:
            return None
        changed, then = found
        assert now.peak_bytes, "an estimate has a peak"
        assert then.peak_bytes, "an estimate has a peak"
        saved, slower = (now.peak_bytes - then.peak_bytes) // per_chip, Unknown(UNTIMED)
        if now.step_seconds and then.step_seconds:
            tokens = changed.spec.tokens_per_step / plan.spec.tokens_per_step
            slower = then.step_seconds / tokens / now.step_seconds - 1
        fits = needed_bytes - saved <= limit_bytes
        made = MemoryChange(
            overrides=one.overrides, saved_bytes=saved, fits=fits, slower_fraction=slower, cost=one.cost
        )
        return made if saved > 0 else None

    singles: list[MemoryChange] = []
    for kind in _memory_changes(plan):
        for of_one_key in kind:
            for made in filter(None, map(change, of_one_key)):
                singles.append(made)
                if made.fits:
                    break  # later ones cost more
        if any(each.fits for each in singles):
            return tuple(sorted(singles, key=lambda each: (not each.fits, each.slower_fraction or 0.0)))
    together = _together(singles, change)
    return (together, *singles) if together else tuple(singles)


def _together(
    singles: Sequence[MemoryChange], change: Callable[[Candidate], MemoryChange | None]
) -> MemoryChange | None:
    """Returns the cheapest changes, one per key, that fit together; None if even all of them do not."""
    chosen: dict[str, MemoryChange] = {}
    for single in singles:
        key = single.overrides[0].split("=")[0]
        if key not in chosen or single.saved_bytes > chosen[key].saved_bytes:
            chosen[key] = single
            overrides = tuple(text for each in chosen.values() for text in each.overrides)
            one = Candidate(overrides, cost="; ".join(each.cost for each in chosen.values()))
            found = change(one) if len(chosen) > 1 else None
            if found and found.fits:
                return found
    return None


def _memory_changes(plan: Plan) -> Iterator[list[Sequence[Candidate]]]:
    """Yields candidates that cost time, then those that change the result of training, then those that change the
    number of tokens in a step. Those of one key are together, the cheapest first."""
    spec, num_shards = plan.spec, plan.mesh.num_shards(plan.roles.tokens)

    def only(is_possible: bool, override: str, cost: str) -> list[Sequence[Candidate]]:
        return [[Candidate((override,), cost=cost)]] if is_possible else []

    most = spec.global_batch_size // num_shards
    counts = [n for n in range(spec.num_microbatches + 1, most + 1) if most % n == 0]
    cost = "smaller matmuls, and weights are gathered for each microbatch"
    dimensions = (dimension for array in plan.sharding.parameters for dimension in array.dimensions)
    policies = {
        "minimal": "all but matmuls and attention is computed twice",
        "full": "the forward pass is computed twice",
    }
    recomputing = [(name, cost) for name, cost in policies.items() if spec.remat.policy not in (name, "full")]
    is_whole = plan.mesh.num_devices > 1 and not any(dimension.axes for dimension in dimensions)
    yield [
        [Candidate((f"remat={policy}",), cost=cost) for policy, cost in recomputing],
        [Candidate((f"num_microbatches={count}",), cost=cost) for count in counts],
        *only(is_whole, "sharding=fsdp", "weights are gathered for each layer"),
    ]
    has_moments = getattr(spec.optimizer, "moment_dtype", None) == "float32"
    is_mixed = spec.precision.parameters == "float32" and spec.precision.compute == "bfloat16"
    is_mixed = is_mixed and not spec.precision.matmuls  # whose types the other precision does not have
    other = "another optimizer, which has to be tuned again"
    yield [
        *only(has_moments, "optimizer.moment_dtype=bfloat16", "optimizer moments have 8 bits of precision"),
        *only(is_mixed, "precision=bfloat16_pure", "weights have 8 bits of precision"),
        *only(spec.optimizer.name != "adafactor", "optimizer=adafactor", other),
    ]
    can_halve = spec.global_batch_size % (2 * num_shards * spec.num_microbatches) == 0
    yield only(can_halve, f"global_batch_size={spec.global_batch_size // 2}", "half as many tokens per step")


FLAT = LayerLoop(unroll=1, batch_split=1, prefetch=0, deferred_reduce_scatter=False, reduce_in_backward=False)


@dataclass(frozen=True, order=True)
class ExpectedWait:
    """The time and bytes that compute waits for in a step, by the model. unknown_bytes: bytes of communication whose
    time is not known. seconds: the time of everything else."""

    unknown_bytes: float
    seconds: float


@dataclass(frozen=True)
class OverlapCandidate(Candidate):
    """A way to run the layers. wait: the time that it is expected to wait for communication and copies."""

    way: OverlapConfig
    wait: ExpectedWait


def applied(way: OverlapConfig, spec: AnyPlanSpec) -> AnyPlanSpec:
    """Returns the declaration with these settings and without a search."""
    overlap = {"layers": way.layers, "flag_presets": way.flag_presets, "search": None}
    parallel = {**spec.parallel, **way.parallel}
    return spec.model_copy(update={"overlap": spec.overlap.model_copy(update=overlap), "parallel": parallel})


def overrides_of_way(way: OverlapConfig, declared: PlanSpec) -> tuple[str, ...]:
    """Returns the overrides that select it on a command line, after those of the declaration: the settings that
    differ."""
    layers, loop = way.layers.model_dump(), declared.overlap.layers.model_dump()
    keys = [f"overlap.layers.{key}={str(value).lower()}" for key, value in layers.items() if value != loop[key]]
    for kind, choice in way.parallel.items():
        if choice != declared.parallel.get(kind):  # plain, or {attention_output:plain,mlp_output:collective_matmul}
            typed = choice if isinstance(choice, str) else f"{{{','.join(f'{k}:{v}' for k, v in choice.items())}}}"
            keys.append(f"parallel.{kind}={typed}")
    is_split_anew = way.layers.batch_split != declared.overlap.layers.batch_split  # and `auto` may mean other presets
    if is_split_anew or tuple(way.flag_presets) != tuple(declared.overlap.flag_presets):
        keys.append(f"overlap.flag_presets=[{','.join(way.flag_presets)}]")
    return (*keys, "overlap.search=null")


def check_can_judge(plan: Plan) -> None:
    """Raises ConfigError if a search is declared for a target whose schedules have no times."""
    if plan.spec.overlap.search is not None and plan.target.chip is None:
        what = f"the clock and the links of {plan.target.name} are not known, so schedules cannot be compared"
        fix = "choose overlap=xla or overlap=prefetch, or set target to the chips that you will train on"
        raise ConfigError([Problem("overlap.search", what, fix)])


def overlap_candidates(plan: Plan, estimate: StepEstimate) -> tuple[OverlapCandidate, ...]:
    """Returns the declared candidate, then the others that the plan allows, ordered by expected exposure.

    First come the best candidates with each flag preset for weights, and with and without rings in one batch part and
    in two: only a schedule shows what those cost matmuls.
    """
    overlap, presets = plan.spec.overlap, plan.target.flag_presets
    # The combinations of the strategies that operations ask to try, those of the plan first.
    each_op = ([(op.kind, choice) for choice in op.candidates(plan.operations_of(op.kind))] for op in plan.ops)
    choices: list[dict[str, StrategyChoice]] = [dict(chosen) for chosen in product(*filter(None, each_op))]
    declared = OverlapConfig(layers=overlap.layers, parallel=choices[0], flag_presets=overlap.flag_presets)
    presets_to_try = list(_flag_presets(plan.target, has_partitioner=bool(plan.roles.partitioner)))
    ways = (
        OverlapConfig(layers=loop, parallel=strategies, flag_presets=sets)
        for loop, strategies, sets in product(_loops(plan), choices, presets_to_try)
    )

    def candidate(way: OverlapConfig) -> OverlapCandidate:
        return OverlapCandidate(overrides_of_way(way, plan.spec), way, expected_wait(plan, estimate, way))

    rest = [candidate(way) for way in ways if way != declared]
    rest.sort(key=lambda one: one.wait)
    seen, firsts = _choices(declared, presets), list[OverlapCandidate]()
    for one in rest:
        if not _choices(one.way, presets) <= seen:
            firsts.append(one)
            seen |= _choices(one.way, presets)
    rest.sort(key=lambda one: one not in firsts)
    return (candidate(declared), *rest)


def _choices(way: OverlapConfig, presets: Mapping[str, FlagPreset]) -> set[str]:
    """Returns a way's flag presets for weights, and its strategy for activations."""
    of_weights = {name for name in way.flag_presets if "weights" in presets[name].tried_for}
    return {f"{', '.join(way.strategies)} in {way.layers.batch_split} parts", *of_weights}


def expected_wait(plan: Plan, estimate: StepEstimate, way: OverlapConfig) -> ExpectedWait:
    """Returns the time of a step that is not arithmetic: exposed collectives, copies of weights that a loop carries,
    and ring sums.

    Collectives that overlap with their own layer's arithmetic expose the first of them, unless the options start it
    early; those that a neighbouring layer hides expose none. Weights prefetched for a later iteration are copied into
    their buffer; if the layers of an unrolled body alternate buffers, only one of them is. A ring's sends overlap with
    its matmuls; without the ring they are a reduce-scatter after them, in half the time, as it uses both directions.
    With a batch split, the collectives of one part's activations stay exposed. A hidden collective counts as hidden,
    however long it takes.
    """
    loop, flag_presets = way.layers, way.flag_presets
    stacks = {stack.name for stack in plan.model.stacks}
    hidden = hidden_kinds(flag_presets, plan.spec, plan.target)
    begins_early = begin_early(options_with(flag_presets, plan.spec, plan.target), plan.target.option_effects)
    passes = max((op.beside_compute.get(name, 0) for op in plan.ops for name in way.strategies), default=0)
    turns = 1 if loop.unroll % (loop.prefetch + 1) else loop.prefetch + 1
    is_copied = plan.target.compiler.copies_loop_carry and loop.prefetch
    # The mesh axes over which the gradient of a parameter is reduced after the whole backward pass.
    layouts: list[WeightPlan] = [] if loop.reduce_in_backward else jax.tree.leaves(plan.weights)
    behind = {each.path: (each.reduced, *(axes for _, axes in each.split_late)) for each in layouts}
    unknown_bytes, exposed, link_seconds, passed_bytes = 0.0, 0.0, 0.0, 0.0
    of_layers = [one for one in estimate.communication if one.origin.parameter.split("/")[0] in stacks]
    for one in estimate.communication:
        seconds = plan.mesh.alone_seconds(one.kind, one.bytes_each, one.mesh_axes, one.groups)
        is_gather = one.kind == "all-gather"
        is_late = not is_gather and one.mesh_axes in behind.get(one.origin.parameter, ())
        share = 0.0  # the exposed fraction of its time
        if one.kind == "collective-permute":
            if passes:
                passed_bytes += passes * one.bytes
            else:
                share = 1 / 2 / loop.batch_split
        elif not one.origin.parameter:
            if one.kind != "all-to-all" or one.kind not in hidden:  # other chips' tokens are independent compute
                share = 1 / loop.batch_split if one.kind in hidden else 1.0
        elif one.kind not in hidden or one not in of_layers or is_late:
            share = 1.0
        elif not begins_early and not (loop.prefetch if is_gather else loop.deferred_reduce_scatter):
            share = 1 / sum((other.kind, other.origin.in_pass) == (one.kind, one.origin.in_pass) for other in of_layers)
        if is_copied and is_gather and one in of_layers:
            passed_bytes += 2 * one.bytes // turns  # read and written
        if seconds is None:
            unknown_bytes += share * one.bytes
        else:
            link_seconds += one.count * seconds
            exposed += share * one.count * seconds
    compute = sum(max(part.flops_seconds or 0.0, part.hbm_seconds or 0.0) for part in estimate.roofline)
    bandwidth = plan.target.hbm_bytes_per_second_per_device or float("inf")
    return ExpectedWait(unknown_bytes, max(exposed, link_seconds - compute) + passed_bytes / bandwidth)


def best_of(tried: Sequence[StepFigures], max_exposed: float | None) -> int | None:
    """Returns the index of the shortest predicted step that fits, preferring those within max_exposed; None if none
    fits or no step is predicted."""

    def rank(one: StepFigures) -> tuple[bool, float]:
        exposed = 1.0 if isinstance(one.exposed_fraction, Unknown) else one.exposed_fraction
        return max_exposed is not None and exposed > max_exposed, one.step_seconds or 0.0

    fitting = [n for n, one in enumerate(tried) if one.runs is not False and not isinstance(one.step_seconds, Unknown)]
    return min(fitting, key=lambda place: rank(tried[place]), default=None)


def could_gain(way: OverlapConfig, tried: Sequence[TriedReport], min_gain: float, max_exposed: float | None) -> bool:
    """Returns False for a way whose step could not be shorter than the best one by the fraction `min_gain`, even with
    nothing exposed.

    Its arithmetic is assumed to take as long as in the shortest compiled step with the same options, strategies and
    batch split: the loop decides what runs beside the arithmetic, options and strategies change it. Returns True if no
    such step is known, or if the best one does not meet max_exposed.
    """
    place = best_of([each.figures for each in tried], max_exposed)
    best = None if place is None else tried[place].figures
    if best is None or isinstance(best.step_seconds, Unknown) or isinstance(best.exposed_fraction, Unknown):
        return True
    if max_exposed is not None and best.exposed_fraction > max_exposed:
        return True

    def kind(way: OverlapConfig) -> tuple[tuple[str, ...], tuple[str, ...], int]:
        return way.flag_presets, way.strategies, way.layers.batch_split

    computes = [
        each.figures.step_seconds - each.figures.exposed_seconds
        for each in tried
        if kind(each) == kind(way)
        and not isinstance(each.figures.step_seconds, Unknown)
        and not isinstance(each.figures.exposed_seconds, Unknown)
    ]
    return not computes or min(computes) < best.step_seconds * (1 - min_gain)


def _loops(plan: Plan) -> Iterator[LayerLoop]:
    """Yields the loops that can differ. Without gathered weights there is nothing to prefetch; if every gradient is
    reduced at once, there is nothing to reduce earlier; if nothing splits matmuls, a batch split has nothing to
    hide."""
    split_axes = plan.roles.partitioner
    is_even = plan.batch.sequences_of_device % 2 == 0
    batch_split = (1, 2) if split_axes and is_even else (1,)
    if plan.pipeline is not None:  # it has its own order of layers and microbatches
        yield from (FLAT.model_copy(update={"batch_split": num_parts}) for num_parts in batch_split)
        return
    layers_in_a_trip = (1,) if aborts_unrolled(split_axes, plan.target) else (1, 2)
    layouts = plan.weights
    own = [layout for stack in plan.model.stacks for layout in jax.tree.leaves(layouts[stack.name])]
    ahead = (0, 1) if any(layout.gathered for layout in own) else (0,)
    choices = product((False, True), ahead, layers_in_a_trip, batch_split, (False, True))
    for is_early, distance, unroll, num_parts, is_deferred in choices:
        loop = LayerLoop(
            unroll=unroll,
            batch_split=num_parts,
            prefetch=distance,
            deferred_reduce_scatter=bool(distance and is_deferred),
            reduce_in_backward=is_early,
        )
        crosses = any(layout.scattered or (is_early and layout.is_reduced_once) for layout in own)
        if (is_early and not _can_reduce_early(plan.spec, plan.sharding, layouts, loop)) or (
            is_deferred and not (distance and crosses)
        ):
            continue
        yield loop


def _can_reduce_early(spec: PlanSpec, sharding: ShardingPlan, weights: Any, loop: LayerLoop) -> bool:
    """Returns True if some gradient is reduced once per step, and the layout of the update lets each layer's gradient
    be reduced."""
    try:
        way = OverlapConfig(layers=loop, parallel={}, flag_presets=())
        check_gradients(applied(way, spec), sharding)
    except ConfigError:
        return False
    return any(layout.is_reduced_once for layout in jax.tree.leaves(weights))


def _flag_presets(target: TargetPlan, *, has_partitioner: bool) -> Iterator[tuple[str, ...]]:
    """Yields combinations of at most one preset for weights and one for the activations of tensor parallelism. Of
    presets that the model rates equal, the compiler's own choice, which splits matmuls, comes last
    (docs/tensor_parallelism.md)."""
    sets = presets_for(target)
    weights = [(), *((name,) for name, one in sets.items() if "weights" in one.tried_for)]
    others = [(name,) for name, one in sets.items() if "activations" in one.tried_for] if has_partitioner else []
    for weight, activation in product(weights, [*others, ()]):
        yield weight + activation
