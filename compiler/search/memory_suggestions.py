"""Suggests changes of a declaration that make a step fit; each is planned and estimated as a declaration."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..core.errors import ConfigError
from ..estimate.estimate import estimate_step
from ..plan import Plan
from ..schema import MemoryChange

Replan = Callable[[tuple[str, ...]], Plan]  # the plan with these additional overrides; raises ConfigError


@dataclass(frozen=True)
class Candidate:
    overrides: tuple[str, ...]
    cost: str


def suggest_changes(plan: Plan, needed_bytes: int, limit_bytes: int, replan: Replan) -> tuple[MemoryChange, ...]:
    """Returns changes that save memory, by the estimate: those that fit first, then by the time that they cost. If no
    single change fits, several are combined.

    needed_bytes: what the compiled program needs on a device. Changes that the declaration does not allow are omitted.
    Those that change the result of training, or the number of tokens in a step, are tried only if nothing that costs
    time alone fits.
    """
    now = estimate_step(plan)

    def change(overrides: tuple[str, ...], cost: str) -> MemoryChange | None:
        try:
            changed = replan(overrides)
            then = estimate_step(changed)
        except ConfigError:
            return None
        saved = now.memory.peak_bytes - then.memory.peak_bytes
        slower = None
        if now.time and then.time:
            tokens = changed.spec.tokens_per_step / plan.spec.tokens_per_step
            slower = then.time.seconds / tokens / now.time.seconds - 1
        fits = needed_bytes - saved <= limit_bytes
        made = MemoryChange(overrides=overrides, saved_bytes=saved, fits=fits, slower_fraction=slower, cost=cost)
        return made if saved > 0 else None

    singles: list[MemoryChange] = []
    for kind in (_costing_time, _costing_precision, _costing_tokens):
        for alike in kind(plan):
            singles += _until_one_fits(change(each.overrides, each.cost) for each in alike)
        if any(each.fits for each in singles):
            return tuple(sorted(singles, key=lambda each: (not each.fits, each.slower_fraction or 0.0)))
    together = _together(singles, change)
    return (together, *singles) if together else tuple(singles)


def _until_one_fits(changes: Iterable[MemoryChange | None]) -> Iterator[MemoryChange]:
    """Yields the changes of one key that are allowed and save memory, up to the first that fits: later ones cost
    more."""
    for change in changes:
        if change:
            yield change
            if change.fits:
                return


def _together(
    singles: Sequence[MemoryChange], change: Callable[[tuple[str, ...], str], MemoryChange | None]
) -> MemoryChange | None:
    """Returns the cheapest changes, one per key, that together fit; None if even all of them do not."""
    chosen: dict[str, MemoryChange] = {}
    for single in singles:
        key = single.overrides[0].split("=")[0]
        if key not in chosen or single.saved_bytes > chosen[key].saved_bytes:
            chosen[key] = single
            overrides = tuple(text for each in chosen.values() for text in each.overrides)
            found = change(overrides, "; ".join(each.cost for each in chosen.values())) if len(chosen) > 1 else None
            if found and found.fits:
                return found
    return None


def _costing_time(plan: Plan) -> Iterator[Sequence[Candidate]]:
    """Yields candidates that cost time, those of one key together, the cheapest first."""
    spec, num_shards = plan.spec, plan.mesh.num_shards(plan.roles.tokens)
    split = {axis for array in plan.sharding.parameters for dimension in array.dimensions for axis in dimension.axes}
    if spec.remat.policy != "full":
        yield [Candidate(("remat=full",), "the forward pass is computed twice")]
    most = spec.global_batch_size // num_shards
    counts = [n for n in range(spec.num_microbatches + 1, most + 1) if most % n == 0]
    cost = "smaller matmuls, and weights are gathered for each microbatch"
    yield [Candidate((f"num_microbatches={count}",), cost) for count in counts]
    if not split and plan.mesh.num_devices > 1:
        yield [Candidate(("sharding=fsdp",), "weights are gathered for each layer")]


def _costing_precision(plan: Plan) -> Iterator[Sequence[Candidate]]:
    """Yields candidates that change the result of training."""
    spec = plan.spec
    if getattr(spec.optimizer, "moment_dtype", None) == "float32":
        yield [Candidate(("optimizer.moment_dtype=bfloat16",), "optimizer moments have 8 bits of precision")]
    if spec.precision.parameters == "float32" and spec.precision.compute == "bfloat16":
        yield [Candidate(("precision=bfloat16_pure",), "weights have 8 bits of precision")]
    if spec.optimizer.name != "adafactor":
        yield [Candidate(("optimizer=adafactor",), "another optimizer, which has to be tuned again")]


def _costing_tokens(plan: Plan) -> Iterator[Sequence[Candidate]]:
    """Yields candidates that change the number of tokens in a step."""
    spec, num_shards = plan.spec, plan.mesh.num_shards(plan.roles.tokens)
    if spec.global_batch_size % (2 * num_shards * spec.num_microbatches) == 0:
        yield [Candidate((f"global_batch_size={spec.global_batch_size // 2}",), "half as many tokens per step")]
