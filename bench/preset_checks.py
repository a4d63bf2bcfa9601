"""Checks each preset of conf/experiment on simulated devices, by `meshloom check` (docs/check.md).

    python bench/preset_checks.py [--rows TEXT] [--show] [FILE]

Each preset runs in a process of its own: those with TEXT in their name, and those whose preset has changed. One takes a
minute or two on two cores that nothing else uses; bench/preset_checks.jsonl keeps what was found. Exits with 1 if a
preset does not pass.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from compiled_rows import Facts, markdown, parser_of, read_lines
from presets import CONF, PACKAGES

KEPT = Path(__file__).with_suffix(".jsonl")
COLUMNS = ("preset", "small program", "lines", "otherwise than declared", "not run", "processor time", "checked")


def presets() -> dict[str, Facts]:
    """Returns what each preset declares, by its name."""
    return {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CONF.glob("*.yaml"))}


def checked(name: str) -> Facts:
    """Returns what `meshloom check experiment=NAME` finds, and the processor time that it took."""
    before = _processor_seconds()
    command = [sys.executable, "-m", "meshloom", "check", "--json", f"experiment={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{name}: {done.stderr}")
    return facts_of(json.loads(done.stdout), _processor_seconds() - before)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def facts_of(report: dict[str, Any], processor_seconds: float) -> Facts:
    """Returns what is kept of a check."""
    lines = report["lines"]
    return {
        "small": report["small"],
        "passed": [line["name"] for line in lines if line["status"] == "passed"],
        "failed": [line["name"] for line in lines if line["status"] == "failed"],
        "not_run": {line["name"]: line["why"] for line in lines if line["status"] == "not run"},
        "replaced": report["replaced"],
        "processor_seconds": round(processor_seconds),
    }


def table(rows: Iterable[Facts]) -> str:
    return markdown(COLUMNS, map(_cells, rows))


def _cells(row: Facts) -> list[str]:
    lines = f"{len(row['passed'])} pass" + (f", {', '.join(row['failed'])} fail" if row["failed"] else "")
    not_run = (f"{name} ({why.partition(':')[0]})" for name, why in row["not_run"].items() if name != "weights")
    replaced = dict.fromkeys(_replaced(text) for text in row["replaced"])
    return [
        f"`{row['name']}`", row["small"], lines, ", ".join(replaced) or "nothing", ", ".join(not_run),
        f"{row['processor_seconds']} s", f"{row['date']}, jax {row['versions']['jax']}",
    ]  # fmt: skip


def _replaced(text: str) -> str:
    """Returns "attention layers: xla instead of splash: it does not run on cpu" as "xla instead of splash"."""
    first, *others = text.split(": ")
    return others[0] if others and " instead of " in others[0] else first


def main() -> int:
    """Returns 1 if a preset does not pass."""
    given = parser_of(__doc__, KEPT).parse_args()
    rows = {row["name"]: row for row in (read_lines(given.file) if given.file.exists() else [])}
    if not given.show:
        made = {"date": datetime.now(UTC).date().isoformat(), "versions": {one: version(one) for one in PACKAGES}}
        for name, declared in presets().items():
            is_kept = rows.get(name, {}).get("declared") == declared
            if given.rows.lower() in name.lower() if given.rows else not is_kept:
                print(f"checking {name}", file=sys.stderr, flush=True)
                rows[name] = {"name": name, "declared": declared} | checked(name) | made
                kept = (rows[each] for each in presets() if each in rows)
                given.file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    print(table(rows.values()))
    return int(any(row["failed"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
