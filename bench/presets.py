"""Predicts a step of each preset of conf/experiment that names its chips.

    python bench/presets.py [--rows TEXT] [--show] [FILE]

Every row is estimated again, or those with TEXT in their name and those whose preset has changed, which takes minutes
for all; bench/presets.jsonl keeps them. Nothing is compiled. A test compares what is kept with the presets.
"""

import json
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax
import yaml
from compiled_rows import Facts, gib, markdown, parser_of, percent, read_lines

from meshloom.compiler.core.known import known
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step

KEPT = Path(__file__).with_suffix(".jsonl")
CONF = Path(__file__).parents[1] / "conf/experiment"
PACKAGES = ("jax", "jaxlib")
COLUMNS = ("preset", "model", "chips", "mesh", "batch", "remat", "step", "9 of 10 inside", "MFU", "exposed", "bubble",
           "memory", "estimated")  # fmt: skip


def presets() -> dict[str, Facts]:
    """Returns what each preset declares, by its name; those without chips are for any."""
    found = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CONF.glob("*.yaml"))}
    return {name: declared for name, declared in found.items() if "target" in groups(declared)}


def groups(declared: Facts) -> dict[str, str]:
    """Returns the options that a preset chooses, by their groups."""
    chosen = [pair for one in declared["defaults"] for pair in one.items()]
    return {word.removeprefix("override /"): option for word, option in chosen}


def predicted(name: str) -> Facts:
    """Returns what `meshloom explain experiment=NAME` predicts."""
    return read_spec(Request((f"experiment={name}",)), then=_predict)


def _predict(spec: RunSpec) -> Facts:
    plan = plan_run(spec)
    step = estimate_step(plan).figures
    seconds = known(step.step_seconds)
    return {
        "mesh": {axis: size for axis, size in plan.mesh.sizes.items() if size > 1},
        "num_microbatches": spec.num_microbatches,
        "step_seconds": seconds, "range_seconds": known(step.range_of(step.step_seconds)), "mfu": known(step.mfu),
        "exposed_fraction": known(step.exposed_fraction), "bubble_fraction": known(step.bubble_fraction),
        "peak_bytes": known(step.peak_bytes), "limit_bytes": known(step.limit_bytes), "fits": step.runs,
    }  # fmt: skip


def table(rows: list[Facts]) -> str:
    return markdown(COLUMNS, map(_cells, rows))


def _cells(row: Facts) -> list[str]:
    chosen, declared = groups(row["declared"]), row["declared"]
    least, most = row["range_seconds"]
    number = row["num_microbatches"]
    return [
        f"`{row['name']}`", chosen["model"], chosen["target"],
        " ".join(f"{axis}={size}" for axis, size in row["mesh"].items()),
        f"{declared['global_batch_size']:,} x {declared['sequence_length']:,}"
        + (f" in {number:,}" if number > 1 else ""),
        chosen["remat"], f"{row['step_seconds']:.3g} s", f"{least:.3g} to {most:.3g} s",
        *(percent(key)(row) for key in ("mfu", "exposed_fraction", "bubble_fraction")),
        f"{gib(row['peak_bytes'])} of {gib(row['limit_bytes'])} GiB", f"{row['date']}, jax {row['versions']['jax']}",
    ]  # fmt: skip


def main() -> int:
    """Returns 1 if a preset does not fit."""
    given = parser_of(__doc__, KEPT).parse_args()
    rows = read_lines(given.file)
    if not given.show:
        jax.config.update("jax_platforms", "cpu")
        made = {"date": datetime.now(UTC).date().isoformat(), "versions": {one: version(one) for one in PACKAGES}}
        old = {row["name"]: row for row in rows}
        rows = []
        for name, declared in presets().items():
            is_asked = given.rows.lower() in name.lower() or old.get(name, {}).get("declared") != declared
            if is_asked:
                print(f"estimating {name}", file=sys.stderr, flush=True)
            rows.append({"name": name, "declared": declared} | predicted(name) | made if is_asked else old[name])
        given.file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))
    return int(not all(row["fits"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
