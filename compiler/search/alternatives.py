"""Estimates other declarations of a step: other choices beside its own, and changes that make it fit."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..core.known import Unknown
from ..estimate.estimate import StepEstimate, estimate_step
from ..estimate.estimated_step import overrides_of_imbalance, plan_usual_imbalance
from ..plan import Plan
from ..schema import Alternative, MemoryChange
from .evaluation import Candidate, Replan, estimate_allowed

POLICIES = ("full", "save_names", "save_dots", "none")
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
    """Yields FSDP, HSDP with replicas across nodes or with two replicas, and FSDP with tensor parallelism, except the
    one whose mesh is declared. Yields nothing if other axes split the devices."""
    sizes = {axis: plan.mesh.sizes.get(axis, 1) for axis in _AXES}
    num_devices = math.prod(sizes.values())
    if num_devices == 1 or num_devices != plan.mesh.num_devices:
        return
    target = plan.target
    inner = target.shape[1] if target.platform == "gpu" and target.shape else num_devices // 2
    for name, mesh in (
        ("fsdp", {"fsdp": num_devices}),
        ("hsdp", {"replica": num_devices // inner, "fsdp": inner}),
        ("fsdp_tensor", {"fsdp": num_devices // _TENSOR, "tensor": _TENSOR}),
    ):
        wanted = {axis: mesh.get(axis, 1) for axis in _AXES}
        if wanted != sizes and math.prod(wanted.values()) == num_devices and 1 not in mesh.values():
            changed = (f"mesh.{axis}={size}" for axis, size in wanted.items() if size != sizes[axis])
            yield (f"sharding={name}", *changed)


def suggest_changes(plan: Plan, needed_bytes: int, limit_bytes: int, replan: Replan) -> tuple[MemoryChange, ...]:
    """Returns changes that save memory, by the estimate: those that fit first, then by the time that they cost. If no
    single change fits, several are combined.

    needed_bytes: the bytes that the compiled program needs on a device. Changes that the declaration does not allow are
    omitted. Changes that affect the result of training, or the number of tokens in a step, are tried only if nothing
    that costs time alone fits.
    """
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
    is_whole = plan.mesh.num_devices > 1 and not any(dimension.axes for dimension in dimensions)
    yield [
        *only(spec.remat.policy != "full", "remat=full", "the forward pass is computed twice"),
        [Candidate((f"num_microbatches={count}",), cost=cost) for count in counts],
        *only(is_whole, "sharding=fsdp", "weights are gathered for each layer"),
    ]
    has_moments = getattr(spec.optimizer, "moment_dtype", None) == "float32"
    is_mixed = spec.precision.parameters == "float32" and spec.precision.compute == "bfloat16"
    other = "another optimizer, which has to be tuned again"
    yield [
        *only(has_moments, "optimizer.moment_dtype=bfloat16", "optimizer moments have 8 bits of precision"),
        *only(is_mixed, "precision=bfloat16_pure", "weights have 8 bits of precision"),
        *only(spec.optimizer.name != "adafactor", "optimizer=adafactor", other),
    ]
    can_halve = spec.global_batch_size % (2 * num_shards * spec.num_microbatches) == 0
    yield only(can_halve, f"global_batch_size={spec.global_batch_size // 2}", "half as many tokens per step")
