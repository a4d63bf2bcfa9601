"""The model FLOPs utilisation that `meshloom compile` predicts, beside what others measured and published.

    pip install -e '.[tpu]' && pip install 'jax[cuda13]' && python bench/published.py [FILE] [--rows TEXT]

A row is a public recipe declared as overrides, with the XLA options that it sets, and compiled by the command for its
hardware, which need not be there. Each takes minutes (compiled_rows.py); again.py takes them again with other prices.
Every recipe is planned and estimated anew, in a second or two (bench/published_estimates.jsonl).
Prints tables in Markdown, and writes compiler/target/accuracy.json, from which predictions get their range: what it
takes for 9 of 10 rows (prediction_range.py); of low precision, for 9 of 10 pairs of precision.py.

Constants of the cost model are global and have their sources in docs/targets.md and conf/target; half of the rows may
be looked at to choose them, the others only check.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, get_args

import precision
from compiled_rows import (
    NOT_COMPILED,
    Overrides,
    gib,
    make_rows,
    markdown,
    parser_of,
    read_kept,
    read_lines,
    versions_of,
)
from prediction_range import (
    BASES,
    GROUPINGS,
    Run,
    checked_dense,
    coverage,
    coverage_of_kind,
    find_least,
    kind_factor,
    kind_of,
    source_of,
    table_of,
)
from published_recipes import RECIPES, Recipe

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.roofline import least_step_seconds
from meshloom.compiler.target.accuracy import LONG, TABLE, ProgramKind
from meshloom.runtime.processes.devices import plan_without_devices

KEPT = Path(__file__).with_suffix(".jsonl")
ESTIMATES = Path(__file__).with_name("published_estimates.jsonl")
NUM_EXPOSED = 4
Rows = Mapping[Overrides, Mapping[str, Any]]


def mfu_of(tokens_per_second: float, flops_per_token: float, peak_flops_per_second: float) -> float:
    """Returns the utilisation of one chip. FLOPs of a token: as `model_flops_per_step` counts, all of attention's
    square."""
    return tokens_per_second * flops_per_token / peak_flops_per_second


def facts_of(report: dict[str, Any]) -> dict[str, Any]:
    """exposed: what is waited for longest, each a kind and form of collective with its seconds in a step."""
    step, program, target = report["compiled"], report["program"], report["target"]
    exposed: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in report["collectives"]:
        of = {name: each[name] for name in ("kind", "form", "dtype")} | {"mesh_axes": "+".join(each["mesh_axes"])}
        sums = exposed.setdefault(tuple(of.values()), of | {"exposed_seconds": 0.0, "alone_seconds": 0.0})
        for name in ("exposed_seconds", "alone_seconds"):
            sums[name] += each[name] or 0.0
    longest = sorted(exposed.values(), key=lambda sums: -sums["exposed_seconds"])
    return {
        "predicted_mfu": step["mfu"],
        "exposed_fraction": step["exposed_fraction"],
        "predicted_seconds": step["step_seconds"],
        "compute_seconds_by_kind": step["compute_seconds_by_kind"],
        "num_unpriced": step["num_unpriced"],
        "exposed": longest[:NUM_EXPOSED],
        "flops_per_token": program["model_flops_per_step"] / program["tokens_per_step"],
        "peak_flops_per_second": target["peak_flops_per_second"],
        "fits": step["fits"],
        "peak_bytes": step["peak_bytes"],
        "host_bytes": step["host_bytes"],
        "versions": versions_of(report),
    }


def estimate(recipe: Recipe) -> dict[str, Any]:
    """Returns what a plan says without a compiler: the estimated step, the one that was published, and the bound."""
    plan = read_spec(Request(recipe.declaration), then=plan_run)
    plan_without_devices(plan.spec.target)
    target, flops, step = plan.target, plan.model_flops_per_step, estimate_step(plan).figures
    assert step.step_seconds
    assert flops is not None
    assert target.peak_flops_per_second is not None
    if recipe.tokens_per_second is None:
        assert recipe.published_mfu is not None
        published = flops / (recipe.published_mfu * target.peak_flops_per_second * target.num_devices)
    else:
        published = plan.spec.tokens_per_step / (recipe.tokens_per_second * target.num_chips)
    return {
        "name": recipe.name,
        "overrides": recipe.declaration,
        "kind": kind_of(plan),
        "published_seconds": published,
        "estimated_seconds": step.step_seconds,
        "bound_seconds": least_step_seconds(plan),
    }


def estimate_all(path: Path) -> Rows:
    """Writes the file anew, a line for each recipe that can be planned; why another cannot is said."""
    rows = []
    for recipe in RECIPES:
        try:
            rows.append(estimate(recipe))
        except ConfigError as error:
            print(f"not planned: {recipe.name}: {error}", file=sys.stderr)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_kept(path)


def _cells(recipe: Recipe, kept: Rows, estimates: Rows) -> list[str]:
    facts, planned = kept.get(recipe.declaration), estimates.get(recipe.declaration)
    if facts is None:
        cells = ["", NOT_COMPILED, "", ""]
    else:
        off = ratio(recipe, facts)
        cells = [
            _percent(published_mfu(recipe, facts)),
            _percent(facts["predicted_mfu"]),
            f"{1 / off - 1:+.0%}" if off else "",
            _percent(facts["exposed_fraction"]),
        ]
    if planned and (published := planned["published_seconds"]):
        off = planned["estimated_seconds"] / published - 1
        cells += [f"{off:+.0%}", f"{planned['bound_seconds'] / published:.0%}"]
    else:
        cells += ["", ""]
    if facts is None:
        cells += ["", ""]
    else:
        on_host = gib(facts["host_bytes"]) if facts.get("host_bytes") else ""
        cells += [f"{gib(facts['peak_bytes'])}{'' if facts['fits'] else ', too much'}", on_host]
    return [f"[{recipe.name}]({recipe.source})", recipe.half, _percent(recipe.published_mfu), *cells]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def published_mfu(recipe: Recipe, facts: Mapping[str, Any]) -> float | None:
    """The published MFU by our FLOPs."""
    if recipe.tokens_per_second is None:
        return recipe.published_mfu
    return mfu_of(recipe.tokens_per_second, facts["flops_per_token"], facts["peak_flops_per_second"])


def ratio(recipe: Recipe, facts: Mapping[str, Any] | None) -> float | None:
    """The published over the predicted seconds of a step; None where one of them is not known."""
    published = published_mfu(recipe, facts) if facts else None
    return facts["predicted_mfu"] / published if facts and facts["predicted_mfu"] and published else None


def chip_of(recipe: Recipe) -> str:
    return _value_of(recipe, "target").split("-")[0]


def sequence_length_of(recipe: Recipe) -> int:
    return int(_value_of(recipe, "sequence_length"))


def _value_of(recipe: Recipe, key: str) -> str:
    (word,) = (word for word in recipe.overrides if word.startswith(f"{key}="))
    return word.removeprefix(f"{key}=")


def best_mfus(kept: Rows) -> dict[str, float]:
    """Returns the highest published MFU of each chip, by our FLOPs where the recipe is compiled; but of long sequences,
    of which we count the square that is hidden, too."""
    found: dict[str, float] = {}
    for recipe in RECIPES:
        facts = kept.get(recipe.declaration)
        mfu = published_mfu(recipe, facts) if facts else recipe.published_mfu
        if mfu and sequence_length_of(recipe) < LONG:
            found[chip_of(recipe)] = max(found.get(chip_of(recipe), 0.0), round(mfu, 4))
    return dict(sorted(found.items()))


def published_runs(kept: Rows, estimates: Rows) -> list[Run]:
    """Returns the recipes with the published over the predicted seconds, and the pairs of precision.py."""
    runs = precision.gains(read_lines(precision.KEPT))
    for recipe in RECIPES:
        if planned := estimates.get(recipe.declaration):
            estimated = planned["published_seconds"] / planned["estimated_seconds"]
            compiled = ratio(recipe, kept.get(recipe.declaration)) or estimated
            runs.append(Run(recipe.name, chip_of(recipe), source_of(recipe), planned["kind"], round(compiled, 4),
                            round(estimated, 4), recipe.half == "checked"))  # fmt: skip
    return runs


def _errors(kept: Rows) -> Iterator[list[str]]:
    """Yields the mean and the largest error of each chip and half: of the predicted step, over the published one."""
    for chip in (*sorted({chip_of(recipe) for recipe in RECIPES}), "all"):
        cells = [chip]
        for half in ("fitted", "checked"):
            own = (each for each in RECIPES if each.half == half and chip in (chip_of(each), "all"))
            found = [1 / off - 1 for each in own if (off := ratio(each, kept.get(each.declaration)))]
            mean = sum(map(abs, found)) / len(found) if found else None
            cells += [str(len(found)), _percent(mean), f"{min(found):+.0%} to {max(found):+.0%}" if found else ""]
        yield cells


def _coverage(runs: list[Run]) -> Iterator[list[str]]:
    """Yields a row of each group of checked dense runs: how many lie in the range that the other groups give."""
    checked = checked_dense(runs)
    for grouping in GROUPINGS:
        found = [coverage(checked, basis, grouping, find_least(checked, basis)) for basis in BASES]
        for group in found[0]:
            yield [grouping, group, str(found[0][group].total), *(str(each[group].inside) for each in found)]


def rows_table(kept: Rows, estimates: Rows) -> str:
    columns = ("recipe", "half", "MFU published", "by our FLOPs", "predicted", "step", "exposed", "estimated", "bound",
               "GiB", "on the host")  # fmt: skip
    return markdown(columns, (_cells(recipe, kept, estimates) for recipe in RECIPES))


def errors_table(kept: Rows) -> str:
    half = ("mean error", "from, to")
    return markdown(("chip", "fitted", *half, "checked", *half), _errors(kept))


def ranges_table(kept: Rows, estimates: Rows) -> str:
    columns = ("left out", "", "runs", "in the range, compiled", "estimated")
    return markdown(columns, _coverage(published_runs(kept, estimates)))


def kinds_table(kept: Rows, estimates: Rows) -> str:
    """Returns the ranges of all kinds on a chip without runs, and how many runs of a kind the others' range holds."""
    runs, rows = published_runs(kept, estimates), []
    for kind in get_args(ProgramKind):
        cells = [str(coverage_of_kind(runs, kind, "estimated").total)]
        for basis in BASES:
            inside = coverage_of_kind(runs, kind, basis).inside
            cells += [f"{kind_factor(runs, kind, basis, '*'):.2f}", str(inside)]
        rows.append([kind, *cells])
    columns = (
        "kind",
        "runs",
        "range, compiled",
        "left out, inside",
        "range, estimated",
        "left out, inside",
    )
    return markdown(columns, rows)


def estimates_table(kept: Rows, estimates: Rows) -> str:
    """Returns how far the estimated step is off the compiled one, by chip."""
    off: dict[str, list[float]] = defaultdict(list)
    for recipe in RECIPES:
        facts, planned = kept.get(recipe.declaration), estimates.get(recipe.declaration)
        if facts and planned and facts["predicted_seconds"]:
            off[chip_of(recipe)].append(planned["estimated_seconds"] / facts["predicted_seconds"] - 1)
    rows = ([chip, str(len(each)), *(f"{x:+.1%}" for x in (median(each), min(each), max(each)))]
            for chip, each in sorted(off.items()))  # fmt: skip
    return markdown(("chip", "programs", "median off", "from", "to"), rows)


def declarations_table() -> str:
    rows = ([each.name, each.remat, f"`{' '.join(each.overrides)}`"] for each in RECIPES)
    return markdown(("recipe", "its remat", "declared as"), rows)


def main() -> int:
    """Returns 1 if a row could not be compiled."""
    parser = parser_of(__doc__, KEPT)
    given = parser.parse_args()
    num_missing = make_rows(given, [(each.name, each.declaration) for each in RECIPES], facts_of)
    kept = read_kept(given.file)
    estimates = estimate_all(ESTIMATES if given.file == KEPT else given.file.with_suffix(".estimates"))
    tables = (rows_table(kept, estimates), errors_table(kept), ranges_table(kept, estimates), declarations_table())
    print(*tables, sep="\n\n")
    if given.file == KEPT:
        TABLE.write_text(json.dumps(table_of(published_runs(kept, estimates), best_mfus(kept)), indent=1) + "\n")
    return int(num_missing > 0)


if __name__ == "__main__":
    sys.exit(main())
