"""Prints every table of docs/results that is made of rows that are kept, or writes them into its pages.

    python bench/results.py [--write]

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`. Nothing is compiled, estimated or run here:
a script of its own makes the rows (bench/README.md); only tables of pipelines are timed. A test compares the pages with
what is printed.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median

import chaos
import check_faults
import faults
import guard_regressions
import imports
import memory_accuracy
import operations
import pipelines
import playbook
import precision
import preset_checks
import presets
import published
import rows
import tpu_operations
import tune
import unseen_operations
from compiled_rows import read_kept, read_lines

PAGES = Path(__file__).parents[1] / "docs/results"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)


def _published(table: Callable[..., str], *files: Path) -> Callable[[], str]:
    return lambda: table(*map(read_kept, files))


OF_ROWS = {  # the mark in a page, and the name of rows.py
    "expert-cuts": "expert_cuts", "adapters-estimates": "adapters", "adapters-compiled": "adapters_compiled",
    "qlora": "qlora",
    "pipelines-compiled": "pipelines_compiled", "pipelines-memory": "pipelines_memory",
    "published-pipelines": "published_pipelines",
}  # fmt: skip
TABLES: dict[str, Callable[[], str]] = {
    "published-errors": _published(published.errors_table, published.KEPT),
    "published-ranges": _published(published.ranges_table, published.KEPT, published.ESTIMATES),
    "published-kinds": _published(published.kinds_table, published.KEPT, published.ESTIMATES),
    "published-rows": _published(published.rows_table, published.KEPT, published.ESTIMATES),
    "published-declarations": published.declarations_table,
    "estimates": _published(published.estimates_table, published.KEPT, published.ESTIMATES),
    "imports": imports.imported_table,
    "imports-refused": imports.refused_table,
    "imports-keys": imports.read_keys_table,
    "imports-left": imports.left_table,
    "playbook": lambda: playbook.table(read_kept(playbook.KEPT), is_staged=True),
    "check-faults": lambda: check_faults.table(read_lines(check_faults.KEPT)),
    "preset-checks": lambda: preset_checks.table(read_lines(preset_checks.KEPT)),
    "precision": lambda: precision.table(read_lines(precision.KEPT)),
    "presets": lambda: presets.table(read_lines(presets.KEPT)),
    "tune": lambda: tune.table(read_kept(tune.KEPT)),
    "guard": lambda: guard_regressions.table(read_lines(guard_regressions.KEPT)),
    "memory": lambda: memory_accuracy.table(read_lines(memory_accuracy.KEPT)),
    "chaos": lambda: chaos.table(read_lines(chaos.KEPT)),
    "operations-collectives": lambda: operations.table(list(operations.collectives()), mean),
    "operations-matmuls": lambda: operations.table(list(operations.matmuls()), median),
    "operations-tpus": tpu_operations.tpu_table,
    "operations-unseen-collectives": unseen_operations.collectives_table,
    "operations-unseen-matmuls": unseen_operations.matmuls_table,
    "pipeline-bubbles": pipelines.bubbles,
    "pipeline-recomputed": pipelines.recomputed,
    "pipeline-permutes": pipelines.permutes,
    "pipeline-buffers": pipelines.buffers,
    **{mark: partial(rows.printed, name) for mark, name in OF_ROWS.items()},
    "faults": lambda: faults.tables(list(faults.read_kept(faults.KEPT).values())),
}


def filled(page: str) -> str:
    """Returns a page with its tables as they are printed now."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)


def pages() -> Iterator[Path]:
    """Yields the pages that have tables of these."""
    return (path for path in sorted(PAGES.glob("*.md")) if MARKED.search(path.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/results")
    if parser.parse_args().write:
        for path in pages():
            path.write_text(filled(path.read_text()))
        return
    for name, table in TABLES.items():
        print(f"{name}\n\n{table()}\n")


if __name__ == "__main__":
    main()
