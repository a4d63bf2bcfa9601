"""Schedules of a user's own: a class that writes the order of each stage, or a whole table.

class Mine(OwnSchedule):                                    pipeline.table=my_package.schedules:Mine
    def orders(self, num_stages, num_chunks, num_microbatches):
        return [[Slot(PipelineOp.FORWARD, 0, 0), ..] for stage in range(num_stages)]
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

from ..core.errors import ConfigError, Problem
from ..core.format import counted
from .table import Order, PipelineTable, Slot, StagePlacement, TickForm, find_violations, pack_ticks
from .table_file import FIX_TABLE, raise_first

FIX_ORDERS = "return a PipelineTable, or for each stage a list of Slot(op, chunk, microbatch)"


class OwnSchedule(ABC):
    """The base of a schedule of one's own. is_v: chunks go up and down the stages in turn; else each goes up."""

    is_v: ClassVar[bool] = False

    @abstractmethod
    def orders(self, num_stages: int, num_chunks: int, num_microbatches: int) -> Sequence[Order] | PipelineTable:
        """Returns for each stage the order of its operations, which are put into ticks; or a table with ticks. The
        microbatches and chunks are those that are declared."""
        raise NotImplementedError


def own_tables(
    made: Any, placement: StagePlacement, name: str, where: str, form: TickForm | None
) -> dict[str, PipelineTable]:
    """Returns the tables of what a class made, by their ticks: of each form, or of the one that is chosen; a table has
    its own unless a form is chosen. Raises ConfigError with what is wrong, by tick and stage. name: of the class."""
    if isinstance(made, PipelineTable) and form is None:
        return {f"{name}, ticks as written": _checked(made, name, where)}
    orders: Any = made
    if isinstance(made, PipelineTable):
        placement = made.placement
        stages = range(placement.num_stages)
        orders = [list(chain.from_iterable(row[stage] for row in made.rows)) for stage in stages]
    if what := _not_orders(orders, placement.num_stages):
        raise ConfigError([Problem(where, f"{name} {what}", FIX_ORDERS)])
    try:
        forms = TickForm if form is None else (form,)
        found = {f"{name}, {each} ticks": pack_ticks(name, placement, orders, each) for each in forms}
    except ValueError as error:
        raise ConfigError([Problem(where, str(error), FIX_TABLE)]) from error
    return {label: _checked(table, name, where) for label, table in found.items()}


def _not_orders(made: Any, num_stages: int) -> str | None:
    """Returns what a class made instead of the orders of so many stages; None if it made these."""
    if not isinstance(made, Sequence) or not all(isinstance(order, Sequence) for order in made):
        return f"returned {type(made).__name__}, not a list of orders"
    if len(made) != num_stages:
        return f"returned {counted(len(made), 'order')} for {counted(num_stages, 'stage')}"
    for stage, order in enumerate(made):
        if other := next((each for each in order if not isinstance(each, Slot)), None):
            return f"returned an order with {type(other).__name__} in it, on stage {stage}"
    return None if any(made) else "returned orders without operations"


def _checked(table: PipelineTable, name: str, where: str) -> PipelineTable:
    """Returns a table that keeps all invariants. Raises ConfigError with those that it breaks."""
    raise_first([Problem(where, f"{name}: {each}", FIX_TABLE) for each in find_violations(table)])
    return table
