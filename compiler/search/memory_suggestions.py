"""Suggests changes of a declaration that make a step fit; each is planned and estimated as a declaration."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..core.errors import ConfigError
from ..estimate.estimate import estimate_step
from ..plan import Plan
from ..schema import Change

Replan = Callable[[tuple[str, ...]], Plan]  # the plan with these additional overrides; raises ConfigError


@dataclass(frozen=True)
class Candidate:
    overrides: tuple[str, ...]
    cost: str


def suggest_changes(plan: Plan, needed_bytes: int, limit_bytes: int, replan: Replan) -> tuple[Change, ...]:
    """Returns changes that save memory, by the estimate: those that fit first, then by cost. If no single change fits,
    several are combined.

    needed_bytes: what the compiled program needs on a device. Changes that the declaration does not allow are omitted.
    """
    now = estimate_step(plan).memory.peak_bytes

    def change(overrides: tuple[str, ...], cost: str) -> Change | None:
        try:
            saved = now - estimate_step(replan(overrides)).memory.peak_bytes
        except ConfigError:
            return None
        fits = needed_bytes - saved <= limit_bytes
        return Change(overrides=overrides, saved_bytes=saved, fits=fits, cost=cost) if saved > 0 else None

    singles: list[Change] = []
    for candidate in _candidates(plan):
        if found := change(candidate.overrides, candidate.cost):
            singles.append(found)
            if found.fits:
                return (found, *singles[:-1])
    together = _together(singles, change)
    return (together, *singles) if together else tuple(singles)


def _together(singles: Sequence[Change], change: Callable[[tuple[str, ...], str], Change | None]) -> Change | None:
    """Returns the cheapest changes, one per key, that together fit; None if even all of them do not."""
    chosen: dict[str, Change] = {}
    for single in singles:
        key = single.overrides[0].split("=")[0]
        if key not in chosen or single.saved_bytes > chosen[key].saved_bytes:
            chosen[key] = single
            overrides = tuple(text for each in chosen.values() for text in each.overrides)
            found = change(overrides, "; ".join(each.cost for each in chosen.values())) if len(chosen) > 1 else None
            if found and found.fits:
                return found
    return None


def _candidates(plan: Plan) -> Iterator[Candidate]:
    """Yields candidates by what they cost: time first, then the result of training, then chips."""
    spec = plan.spec
    split = {axis for array in plan.sharding.parameters for dimension in array.dimensions for axis in dimension.axes}
    if spec.remat.policy != "full":
        yield Candidate(("remat=full",), "the forward pass is computed twice: up to a third more arithmetic")
    shards = plan.mesh.num_shards(plan.sharding.batch_axes)
    most = spec.global_batch_size // shards
    for count in (n for n in range(spec.num_microbatches + 1, most + 1) if most % n == 0):
        yield Candidate((f"num_microbatches={count}",), "smaller matmuls, and weights are gathered for each microbatch")
    if not split and plan.mesh.num_devices > 1:
        yield Candidate(("sharding=fsdp",), "weights are gathered for each layer")
    if getattr(spec.optimizer, "moment_dtype", None) == "float32":
        yield Candidate(("optimizer.moment_dtype=bfloat16",), "optimizer moments have 8 bits of precision")
    if spec.precision.parameters == "float32" and spec.precision.compute == "bfloat16":
        yield Candidate(("precision=bfloat16_pure",), "weights have 8 bits of precision")
    if spec.optimizer.name != "adafactor":
        yield Candidate(("optimizer=adafactor",), "another optimizer, which has to be tuned again")
    if spec.global_batch_size % (2 * shards * spec.num_microbatches) == 0:
        yield Candidate((f"global_batch_size={spec.global_batch_size // 2}",), "half as many tokens per step")
