"""The step's time as it is estimated without a compiler, beside the schedules that were compiled.

    pip install -e . && python bench/step_time.py

Reads the rows of bench/overlap.jsonl and bench/published.jsonl, whose programs were compiled for hardware that was not
there, and estimates each declaration anew: seconds for each. Prints a table in Markdown, then the spread by chip.
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.step_time import StepTime
from meshloom.compiler.plan import Plan
from meshloom.runtime.processes.devices import plan_without_devices

FILES = ("overlap.jsonl", "published.jsonl")


def compiled_rows() -> list[dict[str, Any]]:
    lines = (line for name in FILES for line in (Path(__file__).parent / name).read_text().splitlines())
    return [row for row in map(json.loads, lines) if row.get("predicted_seconds")]


def estimate(overrides: list[str]) -> tuple[Plan, StepTime[float]]:
    spec = read_spec(Request(tuple(overrides)), then=lambda spec: spec)
    plan_without_devices(spec.target)
    plan = plan_run(spec)
    time = estimate_step(plan).time
    assert time is not None
    return plan, time


def main() -> int:
    """1 where a row is no longer a declaration that can be planned."""
    off: dict[str, list[float]] = defaultdict(list)
    num_refused = 0
    print("| model, target, sequences x length | overlap | compute: estimated, compiled | exposed | step | off |")
    print("|---|---|---|---|---|---|")
    for row in compiled_rows():
        try:
            plan, time = estimate(row["overrides"])
        except ConfigError as error:
            print(f"{row['name']}: {error}", file=sys.stderr)
            num_refused += 1
            continue
        compiled, exposed = row["predicted_seconds"], row["predicted_seconds"] * row["exposed_fraction"]
        overlap = next(
            (text.removeprefix("overlap=") for text in row["overrides"] if text.startswith("overlap=")), "xla"
        )
        share = time.seconds / compiled - 1
        chip = plan.target.chip
        off[chip.name if chip else ""].append(share)
        cells = (
            row["name"], overlap, f"{time.compute_seconds:.3f}, {compiled - exposed:.3f} s",
            f"{time.exposed_seconds:.3f}, {exposed:.3f} s", f"{time.seconds:.3f}, {compiled:.3f} s", f"{share:+.1%}",
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)
    print("\n| chip | rows | median off | from | to |\n|---|---|---|---|---|")
    for chip, shares in off.items():
        print(
            f"| {chip} | {len(shares)} | {statistics.median(shares):+.1%} | {min(shares):+.1%} | {max(shares):+.1%} |"
        )
    return int(num_refused > 0)


if __name__ == "__main__":
    sys.exit(main())
