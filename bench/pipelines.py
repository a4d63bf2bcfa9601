"""The schedules of pipelines side by side, by their tables alone: bubbles, what permutes expose, and buffers.

    python bench/pipelines.py

F, B and W take one unit each, and BW two, on every stage, and the work of a stage is shared by its chunks. Of a second
chunk, recomputation and permutes each table says what it assumes. Nothing is compiled.
"""

from collections.abc import Callable, Iterable
from itertools import product

from compiled_rows import markdown

from meshloom.compiler.pipeline.buffers import lower_table
from meshloom.compiler.pipeline.makespan import time_table
from meshloom.compiler.pipeline.schedules import SCHEDULES, build_table
from meshloom.compiler.pipeline.table import PipelineTable, TickForm, max_in_flight_of

SHAPES = ((2, 4), (4, 8), (4, 16), (8, 32))
PERMUTES = (0.0, 0.1, 0.5)
SECONDS = {"F": 1.0, "R": 0.0, "B": 1.0, "W": 1.0, "BW": 2.0}
Build = Callable[[int, int], PipelineTable]


def _builds(*, recomputes: bool = False) -> Iterable[tuple[str, str, Build]]:
    """Yields each schedule in each form of ticks, without gpipe in unit ticks, which are the same."""
    for name, form in product(SCHEDULES, TickForm):
        if name != "gpipe" or form == TickForm.MULTI:
            chunks = SCHEDULES[name].num_chunks or 2
            yield name, form, lambda p, m, n=name, f=form, v=chunks: build_table(n, p, v, m, f, recomputes)


def _over_work(table: PipelineTable, permute: float = 0.0, recompute: float = 0.0) -> float:
    """Returns by how much the time of a table is longer than the work of a stage. permute: in units of F."""
    seconds, chunks = {**SECONDS, "R": recompute}, table.placement.num_chunks
    found = time_table(table, lambda op, stage, chunk: seconds[op] / chunks, permute)
    return found.seconds / max(found.work) - 1


def bubbles() -> str:
    """Returns the bubbles over the work, where permutes take no time."""
    header = ["schedule", "ticks", *(f"{p} stages, {m}" for p, m in SHAPES)]
    rows = [(name, form, *(f"{_over_work(build(*shape)):.1%}" for shape in SHAPES)) for name, form, build in _builds()]
    return markdown(header, rows)


def recomputed() -> str:
    """Returns bubbles of 4 stages and 8 microbatches with all layers recomputed: in B or BW, and as R."""
    rows = [
        (name, form, *(f"{_over_work(build(4, 8), recompute=1.0):.1%}" for build in (within, apart)))
        for (name, form, within), (_, _, apart) in zip(_builds(), _builds(recomputes=True), strict=True)
    ]
    return markdown(["schedule", "ticks", "recomputed in B or BW", "R separate"], rows)


def permutes() -> str:
    """Returns the time over the work of 4 stages and 8 microbatches by the time of a permute, in units of F."""
    rows = [
        (name, form, *(f"{_over_work(build(4, 8), each):.1%}" for each in PERMUTES)) for name, form, build in _builds()
    ]
    return markdown(["schedule", "ticks", *(f"permute {each:g}" for each in PERMUTES)], rows)


def buffers() -> str:
    """Returns what 8 stages and 32 microbatches hold."""
    rows = []
    for name, form, build in _builds():
        table = build(8, 32)
        lowered = lower_table(table)
        flight = max_in_flight_of(table)
        share = max(flight) / table.placement.num_chunks
        slots = (lowered.num_x, lowered.num_gradients, lowered.num_cuts)
        rows.append((name, form, str(table.num_ticks), f"{share:g}", *map(str, slots)))
    return markdown(["schedule", "ticks", "number", "in flight", "inputs", "gradients", "for W"], rows)


def main() -> None:
    for table in (bubbles, recomputed, permutes, buffers):
        print(f"{(table.__doc__ or '').splitlines()[0]}\n\n{table()}\n")


if __name__ == "__main__":
    main()
