"""The schedules that have a name.

    gpipe        F0 F1 F2 F3 BW0 BW1 ..       all forward, then all backward
    1f1b         F0 F1 BW0 F2 BW1 ..          alternate, so few microbatches are in flight
    interleaved  F0.0 F0.1 F1.0 F1.1 ..       several chunks a stage: shorter ramps
    zero bubble  F0 B0 F1 B1 W0 ..            gradients of weights wait for a gap

In unit ticks all operations should take about as long. There BW, of twice the time, is B and W, except in gpipe, whose
stages seldom run F beside BW.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..core.format import counted
from .orders import alternating, dualpipe_v, split_backward, with_recompute, zb_v, zero_bubble
from .table import PipelineTable, StagePlacement, microbatches
from .ticks import Order, TickForm, pack_ticks

Requirement = tuple[str, str]  # what is wrong, and the fix


@dataclass(frozen=True)
class ScheduleKind:
    """A named schedule.

    orders: of all stages, from the numbers of stages, chunks and microbatches. is_v: chunks go up and down. num_chunks:
    of a stage; None if it is declared. splits_backward: it has B and W in any form. needs_groups: microbatches come in
    groups of one for each stage. min_per_stage: microbatches that each stage needs at least.
    """

    name: str
    orders: Callable[[int, int, int, TickForm], list[Order]]
    is_v: bool = False
    splits_backward: bool = False
    num_chunks: int | None = 1
    needs_groups: bool = False
    min_per_stage: int = 0

    def splits(self, form: TickForm, *, recomputes: bool = False) -> bool:
        """Returns True if a table of this form has B and W, and not BW."""
        return self.splits_backward or (form == TickForm.UNIT and (recomputes or self.name != "gpipe"))

    def placement(self, num_stages: int, num_chunks: int) -> StagePlacement:
        return StagePlacement(num_stages, num_chunks, self.is_v)

    def requirement(self, num_stages: int, num_chunks: int, num_microbatches: int) -> Requirement | None:
        """Returns what the schedule needs and does not get, with a fix; None if it can run."""
        there = microbatches(num_microbatches)
        if self.num_chunks is None and num_chunks < 2:
            return f"{self.name} needs at least 2 chunks for each stage, not {num_chunks}", "set pipeline.num_chunks=2"
        if self.num_chunks is not None and num_chunks != self.num_chunks:
            has = counted(self.num_chunks, "chunk")
            return (
                f"{self.name} has {has} for each stage, not {num_chunks}",
                f"set pipeline.num_chunks={self.num_chunks}",
            )
        if self.needs_groups and num_microbatches % num_stages:
            above = -(-num_microbatches // num_stages) * num_stages
            what = f"{self.name} needs as many microbatches for each of {counted(num_stages, 'stage')}, and has {there}"
            return what, f"use num_microbatches={above}, or pipeline=interleaved_1f1b_breadth_first"
        if num_microbatches < (least := self.min_per_stage * num_stages):
            what = f"{self.name} needs at least {microbatches(least)} for {counted(num_stages, 'stage')}"
            return f"{what}, and has {there}", f"use num_microbatches={least}, fewer stages, or pipeline=zb_v"
        return None


def build_table(
    name: str,
    num_stages: int,
    num_chunks: int,
    num_microbatches: int,
    form: TickForm,
    recomputes: bool = False,
) -> PipelineTable:
    """Returns the table of a named schedule. recomputes: what is recomputed is an operation of its own, R, and no part
    of B or BW. Raises ValueError if the schedule cannot run so."""
    kind = SCHEDULES[name]
    if (lacks := kind.requirement(num_stages, num_chunks, num_microbatches)) is not None:
        raise ValueError(lacks[0])
    orders = kind.orders(num_stages, num_chunks, num_microbatches, form)
    if kind.splits(form, recomputes=recomputes):
        orders = [split_backward(order) for order in orders]
    if recomputes:
        orders = [with_recompute(order) for order in orders]
    return pack_ticks(name, kind.placement(num_stages, num_chunks), orders, form)


def _gpipe(num_stages: int, num_microbatches: int) -> list[Order]:
    return alternating(num_stages, 1, num_microbatches, group=num_microbatches, warm_up=lambda _: num_microbatches)


def _interleaved(num_stages: int, num_chunks: int, num_microbatches: int, form: TickForm, group: int) -> list[Order]:
    """In multi ticks a microbatch takes two ticks for each stage above, there and back, and a stage runs one forward
    operation in each. In unit ticks of one chunk, one forward operation for each stage above keeps p in flight."""
    first, per_stage = (num_chunks - 1) * group, 1 if form == TickForm.UNIT and num_chunks == 1 else 2
    return alternating(
        num_stages,
        num_chunks,
        num_microbatches,
        group=group,
        warm_up=lambda stage: first + per_stage * (num_stages - 1 - stage),
    )


def _zb_h1(num_stages: int, num_microbatches: int) -> list[Order]:
    return zero_bubble(
        num_stages, num_microbatches, warm_up=lambda stage: num_stages - stage, without_w=lambda stage: stage
    )


def _zb_h2(num_stages: int, num_microbatches: int) -> list[Order]:
    return zero_bubble(
        num_stages,
        num_microbatches,
        warm_up=lambda stage: 2 * (num_stages - stage) - 1,
        without_w=lambda stage: 2 * stage,
    )


# Orders from the numbers of stages p, chunks v and microbatches m, and the form of ticks.
_KINDS = (
    ScheduleKind("gpipe", lambda p, v, m, form: _gpipe(p, m)),
    ScheduleKind("1f1b", lambda p, v, m, form: _interleaved(p, v, m, form, group=p)),
    ScheduleKind(
        "interleaved_1f1b",
        lambda p, v, m, form: _interleaved(p, v, m, form, group=p),
        num_chunks=None,
        needs_groups=True,
    ),
    ScheduleKind(
        "interleaved_1f1b_breadth_first",
        lambda p, v, m, form: _interleaved(p, v, m, form, group=m),
        num_chunks=None,
    ),
    ScheduleKind("zb_h1", lambda p, v, m, form: _zb_h1(p, m), splits_backward=True),
    ScheduleKind("zb_h2", lambda p, v, m, form: _zb_h2(p, m), splits_backward=True),
    ScheduleKind("zb_v", lambda p, v, m, form: zb_v(p, m), is_v=True, splits_backward=True, num_chunks=2),
    ScheduleKind(
        "dualpipe_v",
        lambda p, v, m, form: dualpipe_v(p, m),
        is_v=True,
        splits_backward=True,
        num_chunks=2,
        min_per_stage=2,
    ),
)
SCHEDULES: Mapping[str, ScheduleKind] = {kind.name: kind for kind in _KINDS}
