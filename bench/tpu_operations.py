"""Prices operations of TPUs that others measured, each from its own line of a program's text.

    python bench/tpu_operations.py          # every operation, one a line

A profile has an operation's line, and not the computations that it calls: matmuls are priced by the FLOPs that the
profile counts, other fusions as passes over all of their operands, reduce-scatters by the bytes of their operand.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

from meshloom.compiler.analysis.schedule_analysis import chip_of
from meshloom.compiler.core.traffic import CollectiveKind
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.profile.op_table import SENDS, as_part, line_program
from meshloom.compiler.spec.cost_model import cost_model
from meshloom.compiler.target.device_links import link_of_devices
from meshloom.compiler.target.links import collective_seconds
from meshloom.compiler.target.placement import plan_own_order
from meshloom.compiler.target.target import TargetPlan, plan_target
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.schedule.prices import price_instruction

MEASURED = Path(__file__).with_name("measured")
COLLECTIVES: dict[str, CollectiveKind] = {
    "all-gather": "all-gather",
    "all-reduce-scatter fusion": "reduce-scatter",
    "all-to-all": "all-to-all",
}
PASSES = ("broadcast", "data formatting", "dynamic-update-slice", "loop fusion", "non-fusion elementwise")
ACROSS = "across two slices"  # the groups of a collective: pairs of devices at the same place in each


class Operation(NamedTuple):
    """A measured operation and its price, in seconds. size: of what it moves or computes, as text."""

    chip: str
    kind: str
    size: str
    measured: float
    price: float


def tpu_table() -> str:
    """Returns the errors by chip and kind, in Markdown: without signs averaged, and the worst."""
    rows: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in tpu_operations():
        rows[each.chip, each.kind].append(each.price / each.measured - 1)
    lines = ["| chip | kind | operations | mean | worst |", "|---|---|---|---|---|"]
    for (chip, kind), errors in sorted(rows.items()):
        average = sum(map(abs, errors)) / len(errors)
        lines.append(f"| {chip} | {kind} | {len(errors)} | {average:.0%} | {max(errors, key=abs):+.0%} |")
    return "\n".join(lines)


@cache
def _target(name: str) -> TargetPlan:
    return plan_target(read_spec(Request(tuple(f"target={name}".split())), then=lambda spec: spec.target), "bfloat16")


def tpu_operations() -> Iterator[Operation]:
    """Yields the operations of all chips."""
    with (MEASURED / "tpu_operations.csv").open() as file:
        for row in csv.DictReader(file):
            yield _alone(row)
    with (MEASURED / "v5p_train_step_ops.csv").open() as file:
        for row in csv.DictReader(file):
            yield from _of_step(row)


def _alone(row: dict[str, str]) -> Operation:
    """Returns the operation of a row that was measured by itself."""
    size, name, kind = float(row["bytes"]), row["target"], row["kind"]
    if row["text"]:
        price = _of_text(row["text"], name)
    else:
        half = _target(name).num_devices // 2
        groups = ([(each, each + half) for each in range(half)] if row["groups"] == ACROSS
                  else [tuple(map(int, group.split())) for group in row["groups"].split(";") if group])  # fmt: skip
        kind = f"{kind} {ACROSS}" if row["groups"] == ACROSS else kind
        price = collective(name, cast(CollectiveKind, row["kind"]), size, groups)
    return Operation(row["chip"], kind, f"{size / 1e6:.0f} MB", float(row["microseconds"]) * 1e-6, price)


def _of_text(text: str, name: str) -> float:
    module = parse_module(line_program(text))
    entry = module.entry_computation
    price = price_instruction(entry.root, entry, module, chip_of(_target(name)))
    assert price is not None
    assert price.seconds is not None
    return price.seconds


def _of_step(row: dict[str, str]) -> Iterator[Operation]:
    """Yields the operation of a row of a step on v5p-8, unless it runs on one core beside another one."""
    text, category, measured = row["text"], row["category"], float(row["microseconds"]) * 1e-6
    chip = chip_of(_target("v5p-8"))
    if "in_megacore" in text or measured < 2e-6:
        return
    if category == "convolution fusion":
        flops = float(row["gflops_of_core"]) * 2e9 * measured
        sends = SENDS.search(text.partition(" fusion(")[0]) is not None
        price = flops / (chip.peak_flops_per_second["bfloat16"] * chip.matmul_share) + cost_model().matmul_seconds
        kind, price = ("matmul that sends", price * cost_model().sending_matmul) if sends else ("matmul", price)
        yield Operation("v5p", kind, f"{flops / 1e9:.0f} GFLOP", measured, price)
    elif category in PASSES and (part := as_part(text)) is not None:
        kind = "update inside tiles" if category == "dynamic-update-slice" else "pass over memory"
        yield Operation(
            "v5p", kind, text.partition(" = ")[2].partition("}")[0] + "}", measured, _of_text(part, "v5p-8")
        )
    elif (kind := COLLECTIVES.get(category)) is not None:
        entry = parse_module(line_program(text)).entry_computation
        size = max(entry.root.num_bytes, *(each.num_bytes for each in entry.parameters))
        size = size * 4 if kind == "all-to-all" else size
        yield Operation("v5p", kind, f"{size / 1e6:.0f} MB", measured, collective("v5p-8", kind, size))


def collective(name: str, kind: CollectiveKind, num_bytes: float, groups: Sequence[tuple[int, ...]] = ()) -> float:
    """Returns the seconds of a collective over groups of a target's devices at once; without groups over all of
    them."""
    placement, everyone = plan_own_order(_target(name)), tuple(range(_target(name).num_devices))
    link = link_of_devices(placement, groups or [everyone])
    assert link is not None
    seconds = collective_seconds(kind, num_bytes, link.group_size, link)
    assert seconds is not None
    return seconds


if __name__ == "__main__":
    for each in tpu_operations():
        figures = (
            f"{each.measured * 1e6:11.1f} us, priced {each.price * 1e6:11.1f}: {each.price / each.measured - 1:+.0%}"
        )
        print(f"{each.chip:<6} {each.kind:<20} {each.size:<52} {figures}")
