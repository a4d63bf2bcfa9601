"""Estimates other declarations of a step beside its own: another remat policy, sharding or overlap."""

import math
from collections.abc import Iterator

from ..analysis.compiled_step import used_devices_per_chip
from ..estimate.estimate import StepEstimate
from ..estimate.usual_imbalance import overrides_of_imbalance, plan_usual_imbalance
from ..plan import Plan
from ..schema import Alternative
from .evaluation import Candidate, Evaluation, Replan, evaluate_allowed, evaluate_estimate, evaluate_plan

POLICIES = ("full", "save_names", "save_dots", "none")
OVERLAPS = (("overlap=none",), ("overlap=xla",), ("overlap=auto",))
_AXES = ("replica", "data", "fsdp", "tensor")
_TENSOR = 4  # shards of a layer: what fits on the shortest links of all chips


def find_alternatives(plan: Plan, estimate: StepEstimate, replan: Replan) -> tuple[Alternative, ...]:
    """Returns the declared step, and those that differ from it in one thing, by the estimate; of experts with room for
    any imbalance the step with room for the usual one, too. Those that the declaration does not allow are left out, and
    overlaps that the estimate knows no difference for; () where there is no other, or where times cannot be
    estimated."""
    own = _alternative(Candidate(()), plan, evaluate_estimate(estimate))
    if own is None:
        return ()
    others = [other for overrides in (*_of_remat(plan), *_of_sharding(plan)) if (other := _allowed(overrides, replan))]
    overlaps = [other for overrides in OVERLAPS if (other := _allowed(overrides, replan))]
    others += [other for other in overlaps if other.seconds != own.seconds]
    others += [usual] if (usual := _at_usual_imbalance(plan)) else []
    return (own, *others) if others else ()


def _allowed(overrides: tuple[str, ...], replan: Replan) -> Alternative | None:
    one = Candidate(overrides)
    found = evaluate_allowed(one, replan)
    return _alternative(one, *found) if found else None


def _alternative(one: Candidate, plan: Plan, found: Evaluation) -> Alternative | None:
    if found.seconds is None or found.exposed_seconds is None or found.peak_bytes is None:
        return None
    return Alternative(
        overrides=one.overrides,
        seconds=found.seconds,
        exposed_seconds=found.exposed_seconds,
        peak_bytes_per_chip=found.peak_bytes * used_devices_per_chip(plan.target),
        fits=found.fits,
    )


def _at_usual_imbalance(plan: Plan) -> Alternative | None:
    usual = plan_usual_imbalance(plan)
    return usual and _alternative(Candidate(overrides_of_imbalance(usual)), usual, evaluate_plan(usual))


def _of_remat(plan: Plan) -> Iterator[tuple[str, ...]]:
    return ((f"remat={policy}",) for policy in POLICIES if policy != plan.spec.remat.policy)


def _of_sharding(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yields FSDP, HSDP with replicas across nodes or two of them, and FSDP with tensor parallelism, where no other
    axis splits the devices; without the one whose mesh is declared."""
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
