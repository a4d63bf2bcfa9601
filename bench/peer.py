"""Another framework's train step, judged by Meshloom's own analyser of schedules.

    python bench/peer.py NAME OVERRIDES...            say what it exposes, and how long a step is predicted to take
    python bench/peer.py --keep ROW NAME OVERRIDES... the same, and keep it as a line of bench/peer.jsonl
    python bench/peer.py --show                       the lines that are kept, as a table in Markdown

NAME: of what `bench/record_program.py` kept of the program: NAME.txt, the compiled step's `as_text()`, and NAME.json,
where its devices lie. OVERRIDES: of a declaration of the same model, target and tokens. Of the plan come the chip's
clock and memory, its links, and the FLOPs that MFU counts, no array and no sharding; a collective goes over the links
of the devices that its groups name, wherever the other framework's mesh has laid them.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}  # plans alone: no device is asked for

from compiled_rows import keep

from meshloom.compiler.analysis import ScheduleAnalysis, analyse_schedule
from meshloom.compiler.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate import estimate_step
from meshloom.compiler.hlo import parse_module
from meshloom.compiler.plan import Plan
from meshloom.compiler.report import CollectiveReport, total
from meshloom.compiler.units import human_bytes, human_seconds, human_share
from meshloom.compiler.views.facts import by_exposed

KEPT = Path(__file__).with_suffix(".jsonl")
NUM_SHOWN = 5


def mesh_order(devices: Sequence[dict[str, Any]], plan: Plan) -> list[int]:
    """Of each device of the program its position in the plan's mesh: that of the same place on the torus. Raises
    ConfigError where they are not shaped as the target."""
    placed = plan.mesh.placement.ordered([SimpleNamespace(number=i, **device) for i, device in enumerate(devices)])
    position = {device.number: i for i, device in enumerate(placed.flat)}
    return [position[number] for number in range(len(devices))]


def analyse(name: Path, overrides: Sequence[str]) -> tuple[ScheduleAnalysis, dict[str, Any]]:
    """What its schedule says, and what is kept of it."""
    recorded = json.loads(name.with_suffix(".json").read_text())
    plan = read_spec(Request(tuple(overrides)), then=plan_run)
    planned = estimate_step(plan).communication
    module = parse_module(name.with_suffix(".txt").read_text())
    analysis = analyse_schedule(module, plan, planned, mesh_order(recorded["devices"], plan))
    step = analysis.step
    facts = {
        "command": recorded["command"],
        "versions": recorded["versions"],
        "mesh": {axis: size for axis, size in recorded["mesh"].items() if size > 1},
        "predicted_seconds": step.predicted_seconds,
        "exposed_fraction": step.exposed_fraction,
        "predicted_mfu": step.predicted_mfu,
        "compute_seconds_by_kind": step.compute_seconds_by_kind,
        "link_seconds": total(each.alone_seconds for each in analysis.collectives),
        "num_unpriced": step.num_unpriced,
        "unknown": analysis.unknown,
        "peak_bytes_per_chip": recorded["peak_bytes"] * plan.target.devices_per_chip,
        "most_exposed": [_line(each) for each in by_exposed(analysis.collectives)[:NUM_SHOWN]],
    }
    return analysis, facts


def _line(each: CollectiveReport) -> str:
    exposed = "unknown" if each.exposed_seconds is None else human_seconds(each.exposed_seconds)
    how = "asynchronous" if each.is_async else "synchronous"
    return (
        f"{exposed} exposed: {each.kind} of {human_bytes(each.bytes)} {each.dtype} over {each.group_size} "
        f"({each.link}), {how}, {each.where}, {each.source}"
    )


def print_facts(facts: dict[str, Any]) -> None:
    seconds, exposed = facts["predicted_seconds"], facts["exposed_fraction"]
    print(f"{facts['versions']}; mesh {facts['mesh']}")
    print(f"predicted step {human_seconds(seconds)}, {human_share(exposed)} exposed, MFU {facts['predicted_mfu']:.1%}, "
          f"peak {human_bytes(facts['peak_bytes_per_chip'])} of a chip")  # fmt: skip
    kinds = ", ".join(f"{kind} {human_seconds(spent)}" for kind, spent in facts["compute_seconds_by_kind"].items())
    print(f"compute: {kinds}; links by themselves {human_seconds(facts['link_seconds'] or 0.0)}")
    print(f"unpriced operations: {facts['num_unpriced']}")
    for name, why in facts["unknown"].items():
        print(f"unknown: {name}: {why}")
    for line in facts["most_exposed"]:
        print(f"  {line}")


def table_row(row: dict[str, Any]) -> str:
    kinds = row["compute_seconds_by_kind"]
    spent = [sum(kinds.values()), kinds.get("attention", 0.0), row["link_seconds"]]
    cells = (row["name"], f"{row['exposed_fraction']:.1%}", f"{row['predicted_seconds']:.3g} s",
             f"{row['predicted_mfu']:.1%}", *(f"{seconds:.3g} s" for seconds in spent),
             f"{row['peak_bytes_per_chip'] / 2**30:.1f} GiB", str(row["num_unpriced"]))  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="another framework's step by the same simulator")
    parser.add_argument("program", nargs="?", type=Path, help="NAME of bench/record_program.py")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--keep", metavar="ROW", help="name of the line that is kept")
    parser.add_argument("--show", action="store_true", help="print what is kept, analyse nothing")
    arguments = parser.parse_args()
    if arguments.show:
        print("| program | exposed | step | MFU | compute | of it attention | links | memory | unpriced |")
        print("|---|---|---|---|---|---|---|---|---|")
        print("\n".join(table_row(json.loads(line)) for line in KEPT.read_text().splitlines()))
        return
    _, facts = analyse(arguments.program, arguments.overrides)
    print_facts(facts)
    if arguments.keep:
        keep(KEPT, arguments.keep, tuple(arguments.overrides), facts)


if __name__ == "__main__":
    main()
