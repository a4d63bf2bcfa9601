"""Finds what a compiled program does that costs time or memory, without a plan to compare it with.

replicated-array            large arguments that are whole in the memory of every device
synchronous-collective      a collective without a start and an end: nothing can run beside it
random-bits                 a transfer of random bits
wide-collective             a transfer in float32, where a narrower type may do
reduced-then-sliced         each device uses only part of an all-reduce; a reduce-scatter would move half the bytes
update-inside-tiles         a dynamic-update-slice, also in a fusion, changes a part of each tile; all are moved twice
slice-inside-tiles          a dynamic-slice, also in a fusion, takes a part of each tile; all are read
host-copies-cannot-hide     copies to the host and back take longer than all compute of the step
exchange-over-torus         compute waits for an all-to-all over links of a torus
assumed-order               the program does not say where its devices are, so the links of a group are assumed

There is one finding per rule and kind, which names the places that cost most. attention_blocks.py, upcasts.py
and waste.py have more; lint.py compares with a plan.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..core.format import be, counted, human_bytes, human_names, human_seconds, human_share
from ..core.known import Unknown
from ..core.scopes import OperationName
from ..core.traffic import HOST_COPIES, TransferKind
from ..schema import CollectiveReport, Finding, StepReport, or_infinity
from ..target.compiler_options import presets_for
from ..target.target import TargetPlan
from ..xla.hlo import Computation, Instruction, Module
from ..xla.hlo.flow import Flow, ModuleValue, ValueUse
from ..xla.hlo.opcodes import SAME_ELEMENTS
from ..xla.hlo.types import HOST
from ..xla.schedule.passes import PartOfTiles, parts_of_tiles
from ..xla.schedule.prices import price_instruction, seconds_inside_tiles
from .attention_blocks import find_unsuited_blocks
from .program_devices import ProgramDevices
from .program_text import LEAST_BYTES, LEAST_SHARE, NUM_PLACES, shown, source_finder
from .schedule_analysis import ScheduleAnalysis, chip_of
from .upcasts import find_upcasts
from .waste import find_repeated_work, find_wasted_transfers

LEAST_ARRAY_BYTES = 64 * 2**20  # the default of sharding.replicated_bytes_threshold

_RANDOM = re.compile(r"threefry|random_bits|random_seed|shuffle|bernoulli|_uniform|_normal")  # JAX's names


def lint_program(module: Module, devices: ProgramDevices, schedule: ScheduleAnalysis) -> tuple[Finding, ...]:
    """Returns all findings: warnings that cost time first, notes last."""
    step, target = schedule.step, devices.target
    collectives = [each for each in schedule.collectives if each.kind not in HOST_COPIES]
    found = (
        *_synchronous(collectives, step, target),
        *find_wasted_transfers(module, collectives, schedule.dones, is_cpu=target.platform == "cpu"),
        *_reduced_then_sliced(module, collectives, schedule.dones, target),
        *find_repeated_work(module, devices, schedule.compute_seconds, step),
        *_inside_tiles(module, schedule, target),
        *find_unsuited_blocks(module, schedule, target),
        *find_upcasts(module, schedule, target),
        *find_costly_traffic(schedule.collectives, step, is_differentiated=_is_differentiated(module)),
        *_replicated(module, target),
        *_random_bits(collectives),
        *_wide(collectives),
        *_assumed_order(devices, collectives),
    )
    return tuple(sorted(found, key=lambda finding: finding.severity != "warning"))


def _is_differentiated(module: Module) -> bool:
    """Returns True if the names of a program's operations tell of a backward pass."""
    every = (one for computation in module.computations.values() for one in computation.instructions)
    return any(OperationName(one.op_name).is_transposed for one in every)


def find_costly_traffic(
    collectives: Sequence[CollectiveReport], step: StepReport, *, is_differentiated: bool
) -> Iterator[Finding]:
    """Yields what costs time whatever the schedule: copies to the host that no compute is long enough to hide, and
    exchanges of tokens over a torus. is_differentiated: whether the program has a backward pass, which could compute
    again what is copied."""
    if step.least_seconds:
        yield from _copies_that_cannot_hide(collectives, step, step.least_seconds, is_differentiated=is_differentiated)
        yield from _exchanges_over_torus(collectives, step.least_seconds)


def _copies_that_cannot_hide(
    collectives: Sequence[CollectiveReport], step: StepReport, least: float, *, is_differentiated: bool
) -> Iterator[Finding]:
    is_partial = step.num_unpriced or step.counted_once
    if is_partial or isinstance(step.compute_seconds, Unknown):  # compute that is not counted may hide them
        return
    waited = step.exposed_host_seconds
    ways = {kind: [each for each in collectives if each.kind == kind] for kind in HOST_COPIES}
    taken = {kind: sum(each.alone_seconds or 0.0 for each in copies) for kind, copies in ways.items()}
    kind = max(taken, key=lambda way: taken[way])
    compute = step.compute_seconds
    if waited >= LEAST_SHARE * least and taken[kind] > compute:
        size, longest = sum(each.bytes for each in ways[kind]), human_seconds(taken[kind])
        yield Finding(
            rule="host-copies-cannot-hide",
            severity="warning",
            what=f"{human_bytes(size)} of {kind} take {longest} of the host's link, and all compute of the step "
            f"{human_seconds(compute)}: no schedule hides them, and compute waits {human_seconds(waited)}, "
            f"{human_share(waited / least)} of the step",
            where=_places(ways[kind], lambda each: or_infinity(each.exposed_seconds)),
            fix="keep more on the device, or compute it again in the backward pass. More tokens per step hide copies "
            "of weights and of the optimizer's state, but not of activations"
            if is_differentiated
            else "keep more on the device, or have more to compute for each copy",
        )


def _exchanges_over_torus(collectives: Sequence[CollectiveReport], least: float) -> Iterator[Finding]:
    exchanges = [each for each in collectives if each.kind == "all-to-all" and each.link == "ICI" and _is_large(each)]
    seconds = sum(each.exposed_seconds or 0.0 for each in exchanges)
    if seconds >= LEAST_SHARE * least:
        sizes = sorted({each.group_size for each in exchanges})
        yield Finding(
            rule="exchange-over-torus",
            severity="warning",
            what=f"{human_bytes(sum(each.bytes for each in exchanges))} of all-to-alls over groups of "
            f"{human_names([*map(str, sizes)])} chips of a torus, which has no direct link between each two of them: "
            f"compute waits {human_seconds(seconds)}, {human_share(seconds / least)} of the step",
            where=_places(exchanges, lambda each: or_infinity(each.exposed_seconds)),
            fix="exchange among fewer chips next to each other (a smaller axis of experts), send a part of the tokens "
            "while another is computed, or gather the experts' weights instead",
        )


def _synchronous(collectives: Sequence[CollectiveReport], step: StepReport, target: TargetPlan) -> Iterator[Finding]:
    if not step.least_seconds:
        return
    waits: list[tuple[TransferKind, float, list[CollectiveReport]]] = [
        (kind, sum(each.exposed_seconds or 0.0 for each in alike), alike)
        for kind, alike in _by_kind(each for each in collectives if not each.is_async)
    ]
    for kind, seconds, alike in sorted(waits, key=lambda wait: -wait[1]):
        share = seconds / step.least_seconds
        if share < LEAST_SHARE:
            continue
        what = f"{counted(sum(each.count for each in alike), f'synchronous {kind}')}: compute waits for them for "
        yield Finding(
            rule="synchronous-collective",
            severity="warning",
            what=f"{what}{human_seconds(seconds)}, {human_share(share)} of the step",
            where=_places(alike, lambda each: or_infinity(each.exposed_seconds)),
            fix=_asynchronous(kind, target),
        )


def _asynchronous(kind: TransferKind, target: TargetPlan) -> str:
    """Returns the options of XLA that run collectives of a kind beside compute, as text."""
    presets = [(name, one.flags) for name, one in presets_for(target).items() if kind in one.hides and one.flags]
    if not presets:
        return f"no option of XLA is known that runs {kind}s beside compute on {target.name}; move fewer bytes"
    name, flags = presets[0]
    options = human_names([f"{key}={str(value).lower()}" for key, value in flags.items()], most=1)
    return f"compile with the options of the preset {name} (conf/overlap/_flag_presets.yaml): {options}"


def _random_bits(collectives: Sequence[CollectiveReport]) -> Iterator[Finding]:
    for kind, alike in _by_kind(
        each for each in collectives if _RANDOM.search(each.origin.activation) and _is_large(each)
    ):
        num_bytes = sum(each.bytes for each in alike)
        yield Finding(
            rule="random-bits",
            severity="warning",
            what=f"{human_bytes(num_bytes)} of {kind}s a step move random bits, which each device could make itself",
            where=_places(alike, lambda each: each.bytes),
            fix="set jax_threefry_partitionable=True, or give the random array the sharding of its use",
        )


def _wide(collectives: Sequence[CollectiveReport]) -> Iterator[Finding]:
    for kind, alike in _by_kind(each for each in collectives if each.dtype == "f32" and _is_large(each)):
        num_bytes = sum(each.bytes for each in alike)
        yield Finding(
            rule="wide-collective",
            severity="note",
            what=f"{human_bytes(num_bytes)} of {kind}s a step are in float32",
            where=_places(alike, lambda each: each.bytes),
            fix="cast to bfloat16 before it if that is accurate enough: half of the bytes",
        )


def _replicated(module: Module, target: TargetPlan) -> Iterator[Finding]:
    if target.num_devices == 1:
        return
    whole = [each for each in module.entry_computation.parameters
             if each.attribute("sharding") == "{replicated}" and each.num_bytes >= LEAST_ARRAY_BYTES
             and HOST not in {array.memory_space for array in each.arrays}]  # fmt: skip
    if not whole:
        return
    whole.sort(key=lambda each: -each.num_bytes)
    names = (each.op_name.replace("\\'", "'") or each.name for each in whole)
    named = [f"{name} ({human_bytes(each.num_bytes)})" for name, each in zip(names, whole, strict=True)]
    size = human_bytes(sum(each.num_bytes for each in whole))
    some = f"{counted(len(whole), 'argument')} of {size} {be(len(whole))}"
    yield Finding(
        rule="replicated-array",
        severity="warning",
        what=f"{some} whole on each of {target.num_devices} devices",
        where=human_names(named, NUM_PLACES),
        fix="split it over a mesh axis: jax.device_put or in_shardings with a PartitionSpec",
    )


def _reduced_then_sliced(
    module: Module, collectives: Sequence[CollectiveReport], dones: Mapping[str, str], target: TargetPlan
) -> Iterator[Finding]:
    candidates = {each.name: each for each in collectives if each.kind == "all-reduce" and _is_large(each)}
    ends = {done: candidates[name] for done, name in dones.items() if name in candidates}
    flow, through = Flow(module), SAME_ELEMENTS | {"slice"}
    sliced = [
        ends[each.name]
        for computation in module.computations.values()
        for each in computation.instructions
        if each.opcode != "parameter"
        and (found := ends.get(each.name))
        and _is_used_by_shard(flow.uses(ModuleValue(computation, each), through=through), found.group_size)
    ]
    if not sliced:
        return
    saved, number = sum(each.bytes for each in sliced) // 2, sum(each.count for each in sliced)
    yield Finding(
        rule="reduced-then-sliced",
        severity="warning",
        what=f"{counted(number, 'all-reduce')} of which each device uses a part: "
        f"{human_bytes(saved)} a step are moved for nothing",
        where=_places(sliced, lambda each: each.bytes),
        fix="give the sum the sharding of its use, by with_sharding_constraint or psum_scatter; if it has that, "
        f"{_asynchronous('reduce-scatter', target)}",
    )


def _is_used_by_shard(uses: Sequence[ValueUse], num_parts: int) -> bool:
    """Returns True if a value is used only in parts: one of as many parts as a group has devices. Slices at places that
    the program itself fixes are the same on every device."""
    return num_parts > 1 and bool(uses) and all(
        use.reader.opcode == "dynamic-slice" and use.place == 0 and use.array is not None and not use.is_result
        and use.reader.arrays[0].num_elements == -(-use.array.num_elements // num_parts)
        for use in uses
    )  # fmt: skip


def _inside_tiles(module: Module, schedule: ScheduleAnalysis, target: TargetPlan) -> Iterator[Finding]:
    """Yields the findings on stacks of which the dimension of the layers is one of the two that tiles cover. Small
    parts are left out: scales of norms, and tables of a few numbers."""
    found: dict[str, list[tuple[float, Instruction, list[PartOfTiles]]]] = defaultdict(list)
    for around in module.computations.values():
        for each in around.instructions:
            if each.name not in schedule.compute_seconds:
                continue
            large = [part for part in parts_of_tiles(each, around, module) if part.tile_bytes >= LEAST_BYTES]
            for kind in dict.fromkeys(part.kind for part in large):
                parts = [part for part in large if part.kind == kind]
                share = _share_inside(parts, each, around, module, target)
                found[kind].append((share * schedule.compute_seconds[each.name], each, parts))
    for kind in ("update", "slice"):
        yield from _parts_inside_tiles(kind, found[kind], module, schedule)


def _share_inside(
    parts: Sequence[PartOfTiles], instruction: Instruction, around: Computation, module: Module, target: TargetPlan
) -> float:
    """Returns the share of an instruction's time that it takes because these parts are not whole tiles."""
    chip = chip_of(target)
    price = price_instruction(instruction, around, module, chip)
    if price is None or not price.seconds:
        return 0.0
    return min(1.0, sum(seconds_inside_tiles(part, chip) for part in parts) / price.seconds)


def _parts_inside_tiles(
    kind: str,
    found: list[tuple[float, Instruction, list[PartOfTiles]]],
    module: Module,
    schedule: ScheduleAnalysis,
) -> Iterator[Finding]:
    """Yields the finding on updates or slices. found: the instructions that are or contain them, each with the seconds
    that these cost."""
    seconds = sum(cost for cost, _, _ in found)
    if not found or not schedule.step.least_seconds or seconds / schedule.step.least_seconds < LEAST_SHARE:
        return
    found.sort(key=lambda one: (-one[0], one[1].name))
    _, dearest, parts = found[0]
    part = max(parts, key=lambda part: part.tile_bytes - part.num_bytes)
    lines = source_finder(module)
    named = (shown(at, each.op_name) if (at := lines(each)) else each.name for _, each, _ in found)
    places = human_names(list(dict.fromkeys(named)), NUM_PLACES, between="; ")
    moved = "read and written" if kind == "update" else "read"
    yield Finding(
        rule=f"{kind}-inside-tiles",
        severity="warning",
        what=f"{counted(sum(len(parts) for _, _, parts in found), kind)} of a part of an array lie inside its tiles, "
        f"of which {part.tile_bytes / part.num_bytes:.0f} times the bytes are {moved}: {human_seconds(seconds)}, "
        f"{human_share(seconds / schedule.step.least_seconds)} of the step",
        where=f"{places} ({dearest.name}, {part.whole})",
        fix="stack layers along the first dimension (MaxText: param_scan_axis=0), or give the array a layout with the "
        "dimension of the layers outermost: jax.experimental.layout.Format in in_shardings and out_shardings",
    )


def _assumed_order(devices: ProgramDevices, collectives: Sequence[CollectiveReport]) -> Iterator[Finding]:
    """Yields the note on groups that would have other links if the devices were ordered otherwise: groups of some of
    the devices, on a torus or across nodes."""
    partial = [each for each in collectives if each.group_size < devices.target.num_devices]
    links = {each.link for each in partial}
    if devices.is_assumed and links & {"ICI", "DCN", "NIC"}:
        placed = f"{devices.target.name}: {'; '.join(devices.placement.describe().values())}"
        yield Finding(
            rule="assumed-order",
            severity="note",
            what=f"the program's devices are taken in the order of {placed}, the last one fastest",
            where=f"the links of {counted(len(partial), 'collective')} over groups of devices",
            fix="in Python, meshloom.inspect(compiled, target=...) reads where the devices lie",
        )


def _by_kind(collectives: Iterable[CollectiveReport]) -> Iterator[tuple[TransferKind, list[CollectiveReport]]]:
    found: dict[TransferKind, list[CollectiveReport]] = defaultdict(list)
    for each in collectives:
        found[each.kind].append(each)
    yield from found.items()


def _places(collectives: Sequence[CollectiveReport], cost: Callable[[CollectiveReport], float]) -> str:
    """Returns the places that cost most, each once."""
    dearest = sorted(collectives, key=lambda each: (-cost(each), each.name))
    named = list(dict.fromkeys(each.line or each.source for each in dearest))
    many = f"{len(named)} places: " if len(named) > 1 else ""
    return f"{many}{human_names(named, NUM_PLACES, between='; ')} ({dearest[0].name}, {dearest[0].where})"


def _is_large(each: CollectiveReport) -> bool:
    return each.bytes // each.count >= LEAST_BYTES
