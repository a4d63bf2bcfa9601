"""Declarations of pipelines' tables, for tests by properties."""

from hypothesis import strategies as st

from meshloom.compiler.pipeline.schedules import SCHEDULES
from meshloom.compiler.pipeline.table import TickForm


@st.composite
def declared(draw: st.DrawFn, can_run: bool = True) -> tuple[str, int, int, int, TickForm, bool]:
    """Returns arguments of `build_table`. can_run: all schedules can run what they are given."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    kind = SCHEDULES[name]
    chunks = kind.num_chunks or draw(st.integers(2, 4))
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 16))
    if can_run and kind.requirement(stages, chunks, microbatches) is not None:
        microbatches = max(kind.min_per_stage, -(-microbatches // stages)) * stages
    return name, stages, chunks, microbatches, draw(st.sampled_from(TickForm)), draw(st.booleans())
