"""Schedules as files: what is written is read back, and each mistake is named by line and tick."""

import pytest
from hypothesis import given, settings

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.pipeline.schedules import build_table
from meshloom.compiler.pipeline.table import PipelineOp, Slot, TickForm
from meshloom.compiler.pipeline.table_file import MOST_NAMED, parse_table, read_table, write_table
from support.pipeline_tables import declared

BY_HAND = """\
0F0,0F1,0F2+0B0,0F3+0B1,0B2,0B3
,1F0+1B0,1F1+1B1,1F2+1B2,1F3+1B3,
"""


@settings(max_examples=60)
@given(declared())
def test_what_is_written_is_read_back(declaration):
    table = build_table(*declaration)
    again = parse_table(write_table(table), "file", table.name)
    assert again.rows == table.rows
    assert again.num_microbatches == table.num_microbatches
    virtual = range(table.placement.num_virtual)
    assert [again.placement.stage(k) for k in virtual] == [table.placement.stage(k) for k in virtual]


def test_a_file_written_by_hand(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(BY_HAND)
    table = read_table(path)
    assert table.name == "mine"
    assert table.rows == build_table("1f1b", 2, 1, 4, TickForm.MULTI).rows
    assert write_table(table) == BY_HAND


def test_a_file_of_pytorch_with_whole_and_split_backward_operations():
    """Two stages of two chunks each in a V: B is the whole backward pass, and becomes I and W of one tick."""
    text = "0F0,,,3F0,3B0,,,0I0,0W0\n,1F0,2F0,,,2B0,1I0,1W0,\n"
    table = parse_table(text, "file", "torch")
    assert table.placement.is_v
    assert table.rows[4][0] == (Slot(PipelineOp.INPUT_GRADIENT, 1, 0), Slot(PipelineOp.WEIGHT_GRADIENT, 1, 0))
    assert PipelineOp.BACKWARD not in table.ops


def test_lines_may_end_early_and_blank_ones_are_no_stages():
    table = parse_table("\n0F0,, 0B0 \n\n,1F0 + 1B0\n\n", "file", "own")
    assert table.num_ticks == 3
    assert table.placement.num_stages == 2


def test_an_order_is_put_into_ticks(tmp_path):
    """A file that says the order of each stage alone: its cells have no gaps for waits."""
    path = tmp_path / "own.csv"
    path.write_text("0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    assert read_table(path, TickForm.MULTI).rows == build_table("1f1b", 2, 1, 4, TickForm.MULTI).rows
    assert all(len(slots) <= 1 for row in read_table(path, TickForm.UNIT).rows for slots in row)
    with pytest.raises(ConfigError, match="needs F of chunk 0 on stage 0 in an earlier tick"):
        read_table(path)
    path.write_text("0B0,0F0\n1F0,1B0\n")
    with pytest.raises(ConfigError, match="on stage 0, BW of microbatch 0 in chunk 0 waits for what never runs before"):
        read_table(path, TickForm.MULTI)


def problems(text):
    with pytest.raises(ConfigError) as raised:
        parse_table(text, "own.csv", "own")
    return [(each.where, each.what) for each in raised.value.problems]


def test_all_cells_that_are_no_operations_are_named():
    assert problems("0F0,0X0\n1F0,1B0+,B\n") == [
        ("own.csv, line 1, tick 1", "'0X0' is not an operation"),
        ("own.csv, line 2, tick 1", "'' is not an operation"),
        ("own.csv, line 2, tick 2", "'B' is not an operation"),
    ]


def test_what_breaks_an_invariant_is_named_by_line_and_tick():
    early = BY_HAND.replace("0F2+0B0,0F3+0B1,0B2,0B3", "0F2,0F3+0B0,0B1+0B2,0B3")
    assert problems(early) == [
        (
            "own.csv, line 1, tick 4",
            "stage 0: BW of microbatch 1 in chunk 0 and BW of microbatch 2 in chunk 0 are of one kind: "
            "a tick runs one of each",
        )
    ]
    assert problems(BY_HAND.replace(",0B3", ",")) == [
        ("own.csv, line 1", "stage 0: BW of microbatch 3 in chunk 0 never runs")
    ]
    assert problems(BY_HAND.replace("0F1,0F2+0B0", "0F1+0B0,0F2")) == [
        (
            "own.csv, line 1, tick 1",
            "stage 0: BW of microbatch 0 in chunk 0 needs BW of chunk 0 on stage 1 in an earlier tick, "
            "which runs in tick 1",
        )
    ]


def test_a_virtual_stage_on_two_lines():
    assert problems(BY_HAND.replace("1F2+1B2", "0F2+1B2")) == [
        (
            "own.csv, line 2, tick 3",
            "0F2: virtual stage 0 is on another line than the others, one after the other",
        )
    ]


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", "own.csv", "the schedule has no line"),
        ("\n , \n", "own.csv", "the schedule has no line"),
        ("0F0,0B0\n2F0,2B0\n", "own.csv", "the virtual stages are 0 to 2, on 2 lines"),
        ("999999F0\n", "own.csv", "the virtual stages are 0 to 999999, on 1 line"),
        (
            "0F0,0B0,0B999999\n",
            "own.csv, line 1, tick 2",
            "microbatch 999999 is the last of 1,000,000 microbatches, and the schedule has 1 forward operation",
        ),
    ],
)
def test_numbers_that_make_no_table(text, where, what):
    assert problems(text) == [(where, what)]


def test_a_long_list_of_problems_is_cut():
    found = problems("0F0," * 30 + "\n")
    assert len(found) == MOST_NAMED + 1
    assert found[-1][1].endswith("other problems of the same schedule")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="the schedule cannot be read: No such file"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        read_table(tmp_path / "binary.csv")
