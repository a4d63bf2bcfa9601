"""Another framework's train step, judged by Meshloom's own analyser of schedules.

    python bench/peer.py NAME.txt OVERRIDES...               what it exposes, how long a step is predicted to take
    python bench/peer.py --keep ROW NAME.txt OVERRIDES...    the same, kept as a line of bench/peer.jsonl
    python bench/peer.py --show                              the lines that are kept, as a table in Markdown

NAME.txt: the compiled step's `as_text()`, with NAME.json, which says where its devices lie, as
`bench/record_program.py` makes both; without it the devices are in the order of Meshloom's mesh, as in
artifact/train.hlo.txt of `meshloom compile`. OVERRIDES: of a declaration of the same model, target and tokens. Of the
plan come the chip's clock and memory, its links, and the FLOPs that MFU counts, no array and no sharding; a collective
goes over the links of the devices that its groups name, wherever the other framework's mesh has laid them.

not queued: the same where collectives of less than a MiB wait for no other on their links. The simulator serves links
in order, so a synchronous sum of a few kB waits for all gathers that are under way, and with it compute: what links
that are shared would do lies between both figures.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}  # plans alone: no device is asked for

from compiled_rows import Facts, gib, keep, markdown, read_lines

import meshloom
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.analysis.schedule_analysis import ScheduleAnalysis, analyse_schedule, chip_of
from meshloom.compiler.core.format import human_bytes, human_seconds, human_share
from meshloom.compiler.core.known import text_of
from meshloom.compiler.core.traffic import Placed
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.schema import CollectiveReport, by_exposed, total
from meshloom.compiler.xla.hlo import Module, parse_module
from meshloom.compiler.xla.schedule.program import read_steps
from meshloom.compiler.xla.schedule.simulate import Simulation, simulate
from meshloom.compiler.xla.schedule.steps import Collective

KEPT = Path(__file__).with_suffix(".jsonl")
NUM_SHOWN = 5
SHORT_BYTES = 2**20


@dataclass(frozen=True)
class Program:
    """order: of each of its devices the position in the plan's mesh; None where that is the program's order, too.
    recorded: what NAME.json says beside that."""

    module: Module
    plan: Plan
    order: Sequence[int] | None
    recorded: dict[str, Any]


def read_program(text: Path, overrides: Sequence[str]) -> Program:
    plan = meshloom.plan(*overrides)
    facts = text.with_suffix(".json")
    recorded = json.loads(facts.read_text()) if facts.exists() else {}
    order = mesh_order(recorded["devices"], plan) if recorded else None
    return Program(parse_module(text.read_text()), plan, order, recorded)


def mesh_order(devices: Sequence[dict[str, Any]], plan: Plan) -> list[int]:
    """Returns the position of each device of the program in the plan's mesh: that of the same place on the torus.
    Raises ConfigError where they are not shaped as the target."""
    placed = plan.mesh.placement.ordered([SimpleNamespace(number=i, **device) for i, device in enumerate(devices)])
    position = {device.number: i for i, device in enumerate(placed.flat)}
    return [position[number] for number in range(len(devices))]


def simulate_not_queued(program: Program) -> Simulation:
    """The step where short collectives find their links free."""

    devices = ProgramDevices(program.plan.mesh.placement, program.order)

    def price(collective: Collective) -> Placed:
        where = devices.place(collective)
        return Placed(where.alone_seconds, () if collective.num_bytes < SHORT_BYTES else where.links)

    return simulate(read_steps(program.module, chip_of(program.plan.target), program.plan.ops), price)


def facts_of(program: Program, analysis: ScheduleAnalysis) -> dict[str, Any]:
    step, recorded, not_queued = analysis.step, program.recorded, simulate_not_queued(program)
    return {
        "command": recorded.get("command"),
        "versions": recorded.get("versions"),
        "mesh": {axis: size for axis, size in recorded.get("mesh", program.plan.mesh.sizes).items() if size > 1},
        "predicted_seconds": step.step_seconds,
        "exposed_fraction": step.exposed_fraction,
        "predicted_mfu": step.mfu,
        "not_queued_seconds": not_queued.seconds,
        "not_queued_exposed_fraction": not_queued.exposed_seconds / not_queued.seconds,
        "compute_seconds_by_kind": step.compute_seconds_by_kind,
        "link_seconds": total(each.alone_seconds for each in analysis.collectives),
        "num_unpriced": step.num_unpriced,
        "peak_bytes_per_device": recorded.get("peak_bytes"),
        "most_exposed": [_line(each) for each in by_exposed(analysis.collectives)[:NUM_SHOWN]],
    }


def _line(each: CollectiveReport) -> str:
    exposed = text_of(each.exposed_seconds, human_seconds)
    how = "asynchronous" if each.is_async else "synchronous"
    return (
        f"{exposed} exposed: {each.kind} of {human_bytes(each.bytes)} {each.dtype} over {each.group_size} "
        f"({each.link}), {how}, {each.where}, {each.source}"
    )


def print_facts(facts: dict[str, Any]) -> None:
    print(f"{facts['versions'] or 'no versions recorded'}; mesh {facts['mesh']}")
    seconds, exposed = human_seconds(facts["predicted_seconds"]), human_share(facts["exposed_fraction"])
    print(f"predicted step {seconds}, {exposed} exposed, MFU {facts['predicted_mfu']:.1%}")
    print(f"short collectives not queued: {human_seconds(facts['not_queued_seconds'])}, "
          f"{human_share(facts['not_queued_exposed_fraction'])} exposed")  # fmt: skip
    kinds = ", ".join(f"{kind} {human_seconds(spent)}" for kind, spent in facts["compute_seconds_by_kind"].items())
    print(f"compute: {kinds}; links by themselves {human_seconds(facts['link_seconds'] or 0.0)}")
    print(f"operations without a price: {facts['num_unpriced']}")
    for line in facts["most_exposed"]:
        print(f"  {line}")


def table(rows: Sequence[Facts]) -> str:
    columns = "program | exposed, step | short ones not queued | compute | of it attention | links | peak | unpriced"
    return markdown(columns.split(" | "), map(_cells, rows))


def _cells(row: Facts) -> list[str]:
    kinds, peak = row["compute_seconds_by_kind"], row["peak_bytes_per_device"]
    spent = [sum(kinds.values()), kinds.get("attention", 0.0), row["link_seconds"]]
    return [
        row["name"],
        f"{row['exposed_fraction']:.1%}, {row['predicted_seconds']:.4g} s",
        f"{row['not_queued_exposed_fraction']:.1%}, {row['not_queued_seconds']:.4g} s",
        *(f"{seconds:.3g} s" for seconds in spent),
        f"{gib(peak)} GiB" if peak else "",
        str(row["num_unpriced"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="another framework's step by the same simulator")
    parser.add_argument("program", nargs="?", type=Path, help="NAME.txt")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--keep", metavar="ROW", help="name of the line that is kept")
    parser.add_argument("--show", action="store_true", help="print what is kept, analyse nothing")
    arguments = parser.parse_args()
    if arguments.show:
        print(table(read_lines(KEPT)))
        return
    program = read_program(arguments.program, arguments.overrides)
    planned = estimate_step(program.plan).communication
    facts = facts_of(program, analyse_schedule(program.module, program.plan, planned, program.order))
    print_facts(facts)
    if arguments.keep:
        keep(KEPT, arguments.keep, tuple(arguments.overrides), facts)


if __name__ == "__main__":
    main()
