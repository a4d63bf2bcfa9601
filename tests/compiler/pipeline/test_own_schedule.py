"""Schedules that a user's class writes: the same tables as those with a name, and the same invariants."""

import pytest

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.pipeline.own_schedule import own_tables
from meshloom.compiler.pipeline.schedules import SCHEDULES, build_table
from meshloom.compiler.pipeline.table import PipelineOp, PipelineTable, Slot, StagePlacement, TickForm
from meshloom.compiler.pipeline.table_file import MOST_NAMED

F, BW = PipelineOp.FORWARD, PipelineOp.BACKWARD
TWO_STAGES = StagePlacement(2)


def made(orders, placement=TWO_STAGES, form=None):
    return own_tables(orders, placement, "mine:Mine", "pipeline.table", form)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zb_v", 2)])
@pytest.mark.parametrize("form", TickForm)
def test_the_orders_of_a_named_schedule_give_its_table(name, chunks, form):
    table = build_table(name, 2, chunks, 4, form)
    orders = [[slot for row in table.rows for slot in row[stage]] for stage in range(2)]
    placement = StagePlacement(2, chunks, SCHEDULES[name].is_v)
    found = made(orders, placement)
    assert [label.rpartition(", ")[2] for label in found] == ["multi ticks", "unit ticks"]
    assert found[f"mine:Mine, {form} ticks"].rows == table.rows
    assert [each.rows for each in made(table, placement).values()] == [table.rows]
    assert [each.rows for each in made(table, placement, form).values()] == [table.rows]


def broken(*rows):
    return PipelineTable("", StagePlacement(2), 1, tuple(rows))


@pytest.mark.parametrize(
    ("orders", "what"),
    [
        ([[Slot(F, 0, 0), Slot(BW, 0, 0)], [Slot(BW, 0, 0), Slot(F, 0, 0)]],
         "mine:Mine: on stage 0, BW of microbatch 0 in chunk 0 waits for what never runs before it"),
        ([[Slot(F, 0, 0), Slot(F, 0, 0), Slot(BW, 0, 0)], [Slot(F, 0, 0), Slot(BW, 0, 0)]],
         "mine:Mine: tick 1, stage 0: F of microbatch 0 in chunk 0 has already run in tick 0"),
        (broken(((Slot(F, 0, 0),), ()), ((), (Slot(F, 0, 0), Slot(BW, 0, 0))), ((), ()), ((Slot(BW, 0, 0),), ()),
                ((Slot(BW, 0, 0),), ())),
         "mine:Mine: tick 4, stage 0: BW of microbatch 0 in chunk 0 has already run in tick 3"),
        (broken(((Slot(F, 0, 0),), (Slot(F, 0, 0), Slot(BW, 0, 0))), ((Slot(BW, 0, 0),), ())),
         "mine:Mine: tick 0, stage 1: F of microbatch 0 in chunk 0 needs F of chunk 0 on stage 0 in an earlier tick, "
         "which runs in tick 0"),
        ([[Slot(F, 0, 0)]], "mine:Mine returned 1 order for 2 stages"),
        ([[], []], "mine:Mine returned orders without operations"),
        (None, "mine:Mine returned NoneType, not a list of orders"),
        ([[Slot(F, 0, 0)], ["F0"]], "mine:Mine returned an order with str in it, on stage 1"),
    ],
)  # fmt: skip
def test_what_a_class_gets_wrong_is_named_with_the_class_and_the_tick(orders, what):
    with pytest.raises(ConfigError) as raised:
        made(orders)
    first = raised.value.problems[0]
    assert (first.where, first.what) == ("pipeline.table", what)


def test_of_many_violations_the_first_ones_are_named():
    orders = [[Slot(F, 0, 0), *(Slot(F, 0, 0) for _ in range(30))], [Slot(F, 0, 0)]]
    with pytest.raises(ConfigError) as raised:
        made(orders)
    assert len(raised.value.problems) == MOST_NAMED + 1


CODE = """
from meshloom.compiler.pipeline.own_schedule import OwnSchedule


class Raises(OwnSchedule):
    def orders(self, num_stages, num_chunks, num_microbatches):
        return [[None] * num_stages][num_chunks]


class NoSchedule:
    pass
"""


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Raises", "own_code:Raises().orders(2, 1, 4) failed: IndexError"),
        ("NoSchedule", "'own_code:NoSchedule' is not a class that derives from OwnSchedule"),
        ("Nothing", "module 'own_code' has no 'Nothing'"),
    ],
)
def test_code_that_fails_is_an_error_at_its_key(name, what, tmp_path, monkeypatch):
    (tmp_path / "own_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with code_allowed_from(["own_code"]), pytest.raises(ConfigError) as raised:
        plan_of("mesh.stage=2", "num_microbatches=4", "model.num_layers=2", f"pipeline.table=own_code:{name}")
    (problem,) = raised.value.problems
    assert problem.where == "pipeline.table"
    assert problem.what.startswith(what)


def test_code_that_nobody_allowed_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "not_allowed.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--allow-code-from=not_allowed"):
        plan_of("mesh.stage=2", "num_microbatches=4", "model.num_layers=2", "pipeline.table=not_allowed:Mine")
