"""Shows the changes between two runs: the step first, then its causes."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...core.console import Column, Console, Part, Table
from ...core.format import counted, human_bytes, human_count, human_seconds, human_share, signed_share
from ...figures import FIGURES
from ..diff import BetterOrWorse, Diff, Difference, Leaf, is_same

ABSENT = "nothing"
LONGEST = 60  # characters of a value from the config
NUM_ROWS = 20  # rows of a section; --json has all
# The reader's first questions: the section and the name of each value.
HEADLINE = {
    ("step", "step_seconds"): "step, predicted", ("step", "mfu"): "MFU, predicted",
    ("step", "fits"): "fits", ("step", "peak_bytes"): "memory per chip",
    ("step", "host_fits"): "fits the host", ("step", "host_bytes"): "host memory per chip",
    ("step", "exposed_seconds"): "exposed communication", ("step", "exposed_fraction"): "of the step",
    ("step", "bubble_seconds"): "bubble", ("step", "bubble_fraction"): "of the step",
    ("step", "compute_seconds"): "compute",
}  # fmt: skip
SECTIONS = (
    ("collectives", "collectives"), ("config", "config"), ("program", "target and program"),
    ("memory", "memory per chip"), ("step", "predicted step"), ("compute", "compute"), ("findings", "findings"),
    ("plan", "plan"), ("build", "build"), ("shardings", "layouts"),
)  # fmt: skip
STYLES: dict[BetterOrWorse | None, str] = {"better": "green", "worse": "red", None: ""}
NAMES = {"estimate_bytes_per_chip": "estimated", "host_estimate_bytes_per_chip": "estimated, of the host",
         "roofline_seconds": "roofline", "least_seconds": "at least"}  # fmt: skip
TABLES = ("parameters", "optimizer", "activations")


def show_diff(diff: Diff, console: Console) -> None:
    """Prints the headline, then a section for each kind of change; says what is better and what is worse, where that
    is clear."""
    for name, run in zip("ab", diff.runs, strict=True):
        console.line(f"{name}  {run}")
    for note in diff.notes:
        console.wrapped((f"note: {note}", "yellow"))
    _section(console, "in short", list(_headline(diff)))
    for name, title in SECTIONS:
        found = diff.sections[name]
        if name == "collectives":
            _section(console, title, [_collective(change) for change in found])
        else:
            rest = sorted((each for each in found if (name, each.where) not in HEADLINE), key=lambda each: each.where)
            if name == "shardings":
                rest.sort(key=lambda each: TABLES.index(each.where.split(".")[0]))
            _section(console, title, [_row(change, name) for change in rest])
    if diff.is_empty:
        console.line("nothing changed")


def _headline(diff: Diff) -> Iterable[tuple[Part, ...]]:
    by_name = {("step", change.where): change for change in diff.sections["step"]}
    for key, words in HEADLINE.items():
        if key in by_name:
            yield (words, "bold"), _row(by_name[key], key[0])[1]


def _section(console: Console, title: str, rows: Sequence[tuple[Part, ...]]) -> None:
    if not rows:
        return
    console.line()
    console.table(Table((Column(overflow="fold"), Column(overflow="fold")), rows[:NUM_ROWS], title))
    if len(rows) > NUM_ROWS:
        console.line(f"and {len(rows) - NUM_ROWS} more: --json has all", style="dim")


def _row(change: Difference, section: str) -> tuple[str, Part]:
    """Returns a row: 'roofline', '2.95 s → 2.71 s  -8.1 %  better'."""
    human, is_measure = _unit(change.where, section)
    if section == "shardings" and change.way == "changed":
        return change.where, _layouts(change.before, change.after)
    before = ABSENT if change.way == "appeared" else human(change.before)
    after = ABSENT if change.way == "gone" else human(change.after)
    if before == after:  # equal to three digits
        before, after = _exact(change.before), _exact(change.after)
    relative = _relative(change.before, change.after) if is_measure else ""
    return _name(change.where, section), (f"{before} → {after}{relative}{_said(change)}", STYLES[change.verdict])


def _said(change: Difference) -> str:
    return f"  {change.verdict}" if change.verdict else ""


def _name(where: str, section: str) -> str:
    """Returns the name of a value in words; keys of a declaration stay as they are typed."""
    if section in ("config", "shardings", "findings"):
        return where
    if where in NAMES:
        return NAMES[where]
    if section == "step" and where in FIGURES:
        return FIGURES[where].heading
    text = where.replace("exposed_by_axes.", "exposed over ").replace("breakdown.", "")
    if text.startswith("operations."):
        name, _, value = text.removeprefix("operations.").rpartition(".")
        return f"{name}: {_plain_words(value)}"
    return ": ".join(map(_plain_words, text.split(".")))


def _plain_words(key: str) -> str:
    return key.removesuffix("_seconds").replace("_per_second_per_device", " per second and device").replace("_", " ")


def _collective(change: Difference) -> tuple[Part, Part]:
    a, b = change.before, change.after
    if a is None or b is None:
        one = a or b or {}
        exposed = "" if one["exposed_seconds"] is None else f", {human_seconds(one['exposed_seconds'])} exposed"
        text = f"{counted(one['count'], 'time')}, {human_bytes(one['bytes'])}{exposed}"
    else:
        text = ", ".join(_differences(a, b))
    return (change.verdict or change.way, STYLES[change.verdict]), f"{_way(change)}{change.where}: {text}"


def _way(change: Difference) -> str:
    return f"{change.way}: " if change.way in ("appeared", "gone") else ""


def _differences(a: Leaf, b: Leaf) -> Iterable[str]:
    """Yields the exposed time, or else the time alone, then the figures behind it."""
    time = "alone" if is_same(a["exposed_seconds"], b["exposed_seconds"]) else "exposed"
    shown: Sequence[tuple[str, str, Callable[[Any], str]]] = (
        (f"{time}_seconds", time, human_seconds), ("bytes", "", human_bytes), ("count", "times", "{:,}".format),
        ("group_sizes", "group of", _joined), ("links", "on", _joined), ("dtypes", "in", _joined),
    )  # fmt: skip
    for name, label, human in shown:
        before, after = a[name], b[name]
        if not is_same(before, after):
            told = [human(value) if value is not None else "unknown" for value in (before, after)]
            yield f"{label} {told[0]} → {told[1]}".strip()
    if (before := _form(a)) != (after := _form(b)):
        yield f"{before} → {after}"


def _form(t: Leaf) -> str:
    if t["num_async"] in (0, t["count"]):
        return "asynchronous" if t["num_async"] else "synchronous"
    return f"{t['num_async']:,} of {t['count']:,} asynchronous"


def _joined(values: Sequence[Any]) -> str:
    return "+".join(map(str, values))


def _unit(where: str, section: str) -> tuple[Callable[[Any], str], bool]:
    """Returns the format of a value, by its name, and whether it is a quantity whose change in percent is
    meaningful."""
    name = where.rpartition(".")[2]
    if section == "compute" or name.endswith("_seconds") or where.startswith("exposed_by_axes."):
        return _or_plain(human_seconds), True
    if where.startswith("breakdown.") or name.endswith(("bytes", "bytes_per_chip", "bytes_per_device")):
        return _or_plain(human_bytes), True
    if name.endswith(("_fraction", "mfu")):
        return _or_plain(_share), False
    if name.endswith(("flops_per_second", "flops_per_step")) or "bytes_per_second" in name:
        unit = "FLOPs" if name.endswith("step") else "FLOP/s" if "flops" in name else "B/s"
        return _or_plain(lambda value: human_count(value, unit)), True
    if section == "step" and name in FIGURES:
        return _or_plain(FIGURES[name].human), True
    if section == "shardings":  # '(fsdp, whole) 100.4 MiB'
        return lambda row: f"{_spec(row)} {human_bytes(row['bytes_per_device'])}", False
    return _plain, False


def _share(value: float) -> str:
    return human_share(value) if value >= 0.01 or not value else f"{100 * value:.3g} %"


def _or_plain(human: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: human(value) if isinstance(value, int | float) else _plain(value)


def _layouts(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Returns the differences of one array in two runs."""
    kept = [_spec(row) if before["spec"] != after["spec"] else "" for row in (before, after)]
    told = [f"{kept[0]} → {kept[1]}"] if kept[0] else []
    if before["shape"] != after["shape"]:
        told.append(" → ".join(" x ".join(f"{size:,}" for size in row["shape"]) for row in (before, after)))
    if before["dtype"] != after["dtype"]:
        told.append(f"{before['dtype']} → {after['dtype']}")
    sizes = [human_bytes(row["bytes_per_device"]) for row in (before, after)]
    return ", ".join([*told, *([f"{sizes[0]} → {sizes[1]}"] if sizes[0] != sizes[1] else [])])


def _spec(row: dict[str, Any]) -> str:
    parts = ("whole" if axes is None else axes if isinstance(axes, str) else "+".join(axes) for axes in row["spec"])
    return f"({', '.join(parts)})"


def _plain(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        text = f"[{', '.join(value)}]"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _exact(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _plain(value)


def _relative(before: Any, after: Any) -> str:
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (before, after))
    if not numbers or not before or not after:
        return ""
    share = (after - before) / before
    return f"  {signed_share(share)}" if abs(share) < 10 else f"  x {after / before:,.0f}"
