"""Prices of GPUs' collectives and matmuls: near what was measured, between and beyond it, and what a table refuses."""

import importlib
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

import numpy as np
import pytest
from pydantic import ValidationError

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.spec.calibration_spec import Calibration, LinkCalibration
from meshloom.compiler.spec.measured_tables import (
    NEEDED,
    CollectiveTable,
    MatmulTable,
    shipped_collectives,
)
from meshloom.compiler.spec.target_names import chip_file
from meshloom.compiler.spec.target_spec import GpuTarget
from meshloom.compiler.target.axis_segments import GroupSpan, switch_times
from meshloom.compiler.target.matmul_times import MatmulTimes
from meshloom.compiler.target.switch import SwitchTimes
from meshloom.compiler.target.target import calibrate_target
from support.programs import target_of

BENCH = Path(__file__).parents[3] / "bench"
MIB = 2**20
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@pytest.fixture
def operations(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("operations")


@pytest.fixture
def unseen_operations(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("unseen_operations")


@pytest.fixture
def measured_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("measured_tables")


def times_of(name: str, near: int, far: int = 1) -> SwitchTimes:
    spans = {"NVLink": near, "NIC": far}
    rows = {axis: GroupSpan(size, 1, 1, 1, is_ring=False) for axis, size in spans.items() if size > 1}
    return switch_times(target_of(name), rows)


def alone(table: CollectiveTable, near: int, at_once: int = 8) -> SwitchTimes:
    """Returns the times of a group behind the switch that a table was measured on."""
    rate = table.chip_bytes_per_second
    return SwitchTimes(near, 1, rate, rate, table, shipped_collectives()["across_nodes"], at_once)


def test_collectives_take_what_was_measured_in_each_band_of_sizes(operations):
    """H100's exchanges of 1 to 8 MiB alone are off by more, by 10 %: their measured times fall while arrays grow, which
    no price does."""
    errors = defaultdict(list)
    for each in operations.collectives():
        errors[each.chip, each.kind, each.band].append(abs(each.error))
    assert {kind for _, kind, _ in errors} >= set(KINDS)
    assert len(errors) >= 3 * len(KINDS) * 4
    assert [key for key, own in errors.items() if mean(own) >= 0.08] == [("h100", "all-to-all", "1 to 8 MiB")]
    assert all(mean(own) < 0.1 for own in errors.values())


def test_the_tables_are_those_of_the_measured_operations(measured_tables):
    """The kept tables are what bench/measured_tables.py makes of the operations."""
    for path, text in measured_tables.files().items():
        assert path.read_text() == text, f"python bench/measured_tables.py writes another {path.name}"


def test_matmuls_take_what_was_measured_in_each_decade(operations):
    errors = defaultdict(list)
    for each in operations.matmuls():
        errors[each.chip, each.kind, each.band].append(abs(each.error))
    assert len(errors) == 5 * 5
    assert all(median(own) < 0.08 for own in errors.values())


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("chip", ["h100", "b200", "gb200"])
@pytest.mark.parametrize(("left_out", "most", "least_count"), [("size", 0.1, 100), ("group", 0.11, 30)])
def test_collectives_that_are_left_out_are_found_between_the_others(
    chip, left_out, most, least_count, unseen_operations
):
    errors = [abs(each.error) for each in unseen_operations.collectives(chip, left_out)]
    assert len(errors) > least_count
    assert mean(errors) < most


@pytest.mark.parametrize("chip", ["h100", "b200", "gb200", "across_nodes"])
def test_a_larger_array_never_takes_less(chip):
    """Of every kind and group that was measured, of groups between them, and of sizes between theirs: times of a table
    fall here and there by chance."""
    table = shipped_collectives()[chip]
    groups = {(group.nodes, group.near, group.at_once) for _, group in table.groups()} | {(1, 6, 72), (3, 8, None)}
    sizes = np.geomspace(1, 1e13, 2000)
    for nodes, near, at_once in groups:
        times = SwitchTimes(near, nodes, 4.5e11, 5e10, table, shipped_collectives()["across_nodes"], at_once or 8)
        for kind in (*KINDS, "send", "collective-broadcast"):
            if chip != "across_nodes" or nodes > 1:
                seconds = times.seconds(kind, sizes)
                assert (seconds[1:] >= seconds[:-1] * (1 - 1e-9)).all(), (kind, nodes, near)


def test_a_permute_takes_the_times_of_as_many_gpus_at_once():
    """Between 16 and 256 MiB permutes of GB200 take 750 us where 64 GPUs send at once, and 440 where 72 do."""
    size = 64 * MIB
    assert alone(shipped_collectives()["gb200"], 2, 64).seconds("collective-permute", size) == pytest.approx(
        764e-6, rel=0.02
    )
    for target in ("gb200-72", "gb200-144"):
        for near in (2, 72):
            assert times_of(target, near).seconds("collective-permute", size) == pytest.approx(441e-6, rel=0.02)


@pytest.mark.parametrize(
    ("target", "near", "far", "kind", "size", "said"),
    [
        ("h100-8", 8, 1, "all-gather", 2**30, ""),
        ("h100-8", 8, 1, "all-gather", 2**32, "arrays of 4.0 GiB at the rate of the largest measured, 2.0 GiB"),
        ("h100-8", 8, 1, "send", 2**20, ""),
        ("gb200-16", 16, 1, "send", 2**20, "the times of collective-permute, 16 GPUs at once as 64"),
        ("gb200-16", 16, 1, "collective-broadcast", 2**30, "the times of all-gather, 16 GPUs at once as 64"),
        ("h100-64", 1, 8, "all-to-all", 2**20, "1 GPU of a node as 8"),
        ("h100-8", 6, 1, "all-gather", 2**30, "6 GPUs between 4 and 8"),
        ("gb200-72", 2, 1, "all-reduce", 2**30, "2 GPUs as 4"),
        ("gb200-16", 16, 1, "all-reduce", 2**30, "16 GPUs at once as 64"),
        ("gb200-72", 24, 1, "all-reduce", 2**30, "24 GPUs between 18 and 36"),
        ("h100-64", 8, 8, "all-reduce", 2**30, ""),
        ("h100-64", 8, 8, "reduce-scatter", 2**30, "the times of all-gather"),
        ("h100-512", 8, 64, "all-gather", 2**30, "64 nodes as 32"),
        ("gb200-144", 72, 2, "all-gather", 2**30, "72 GPUs of a node as 8"),
        ("h100-64", 8, 3, "collective-permute", 2**30, ""),
    ],
)
def test_a_price_says_what_was_measured_instead(target, near, far, kind, size, said):
    assert times_of(target, near, far).beyond_measured(kind, size) == said


# Over nodes of 8 H100, of an array of 16, 64, 256 MiB and 1 GiB: NCCL 2.27's tuning, corrected by nccl-tests.
@pytest.mark.parametrize(
    ("kind", "num_nodes", "microseconds"),
    [
        ("all-gather", 2, {16: 123, 64: 311, 256: 900, 1024: 3083}),
        ("all-gather", 8, {16: 231, 64: 479, 256: 1309, 1024: 3781}),
        ("reduce-scatter", 32, {16: 647, 64: 898, 256: 1903, 1024: 5300}),
        ("all-reduce", 2, {256: 1060}),
        ("all-reduce", 8, {256: 1787}),
        ("all-reduce", 32, {256: 2495}),
    ],
)
def test_groups_across_nodes_take_what_nccl_takes(kind, num_nodes, microseconds):
    times = times_of("h100-256", 8, num_nodes)
    for size, expected in microseconds.items():
        assert times.seconds(kind, size * MIB) == pytest.approx(expected * 1e-6, rel=0.15)


def test_across_two_domains_of_72_gathers_stay_as_fast_and_exchanges_become_ten_times_slower():
    """nccl-tests over two NVL72, 16 GiB: 691 to 798 GB/s of the bus, of an exchange 65 to 88."""
    times, size = times_of("gb200-144", 72, 2), 16 * 2**30
    assert 0.85 * 691e9 < size * 143 / 144 / times.seconds("all-gather", size) < 1.15 * 798e9
    assert 0.85 * 65e9 < size * 143 / 144 / times.seconds("all-to-all", size * 144) < 1.15 * 88e9


@pytest.mark.cases(plain=6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("near", "far"), [(3, 1), (8, 1), (1, 2), (2, 3), (8, 5), (8, 100), (4, 1000)])
def test_a_price_of_several_sizes_is_that_of_each_and_grows(kind, near, far):
    times = times_of("h100-8000", near, far)
    sizes = np.geomspace(1, 1e13, 60) * (near * far if kind == "all-to-all" else 1)  # of a device, 1 B to 10 TB
    seconds = times.seconds(kind, sizes)
    assert seconds.tolist() == pytest.approx([times.seconds(kind, float(size)) for size in sizes])
    assert np.isfinite(seconds).all()
    assert (seconds[1:] > 0.4 * np.maximum.accumulate(seconds)[:-1]).all()
    assert seconds[-1] / seconds[-6] == pytest.approx(sizes[-1] / sizes[-6], rel=0.05)  # beyond: the last rate


def test_more_nodes_take_longer_to_start_each_as_much():
    starts = [times_of("h100-8000", 8, num).start_seconds() for num in (16, 32, 48, 64)]
    steps = np.diff(starts)
    assert steps[0] > 0
    assert steps[1:] == pytest.approx([steps[0]] * 2)


def test_a_slower_link_stretches_the_measured_times():
    """A100 has two thirds of H100's links: an array takes as long as one of half as many bytes more."""
    fast, slow = times_of("h100-8", 8), times_of("a100-8", 8)
    assert slow.seconds("all-gather", 64 * MIB) == pytest.approx(fast.seconds("all-gather", 96 * MIB))
    assert slow.start_seconds() == fast.start_seconds()


def test_a_calibration_scales_rate_and_start():
    target, links = target_of("h100-64"), {"NVLink": LinkCalibration(transfer=2.0, latency=3.0)}
    measured = Calibration(chip="h100", matmul=1.0, attention=1.0, other=1.0, links=links, source="a test")  # type: ignore[arg-type]
    slower = calibrate_target(target, measured)
    span = {"NVLink": GroupSpan(8, 1, 1, 1, is_ring=False)}
    before, after = switch_times(target, span), switch_times(slower, span)
    start = before.start_seconds()
    assert after.start_seconds() == pytest.approx(3 * start)
    assert after.seconds("all-gather", 64 * MIB) == pytest.approx(before.seconds("all-gather", 128 * MIB) + 2 * start)


def test_a_matmul_takes_as_long_as_the_cube_of_as_many_flops():
    """Of a core of tpu7x cubes alone were measured: 350 TFLOP/s at 1024, 950 and 956 at 16384 and 32768."""
    times = target_of("tpu7x-8").matmul_times()
    assert times is not None
    flops, results = np.array([2.0 * 1024**3, 2.0 * 1024**3, 2.0 * 2**45]), np.array([2.0**20, 2.0**14, 2.0**30])
    seconds = times.seconds("bfloat16", flops, results)
    assert flops / seconds == pytest.approx([350e12, 350e12, 956e12], rel=0.002)
    (beyond,) = times.seconds("bfloat16", [2.0 * 2**48], [2.0**32])
    last = (2.0**46 - 2.0**43) / (2.0**46 / 956e12 - 2.0**43 / 950e12)
    assert beyond == pytest.approx(2.0**46 / 956e12 + (2.0**49 - 2.0**46) / last, rel=0.001)
    assert times.seconds("bfloat16", 2.0, 1.0) == pytest.approx(2.56e-6)
    assert not times.knows("float8_e4m3fn")


def test_a_matmul_beyond_the_table_runs_at_its_last_rate_and_a_small_one_takes_the_least():
    table = chip_file("h100")[0].matmuls
    assert table is not None
    times, results = MatmulTimes(table), np.array([1.0, 2.0**20, 2.0**28, 2.0**33])
    seconds = times.seconds("bfloat16", 2 * results * 16384, results)
    rates = 2 * results * 16384 / seconds
    assert 750e12 < rates[2] < 850e12
    assert rates[3] == pytest.approx(rates[2], rel=0.05)
    assert seconds[0] > 4e-6
    of_type = {dtype: times.seconds(dtype, 2 * results, results).tolist() for dtype in ("bfloat16", "float16")}
    assert of_type["float16"] == of_type["bfloat16"]
    slower = MatmulTimes(table, slower=2.0).seconds("bfloat16", 2 * results, results)
    assert slower.tolist() == pytest.approx([2 * each for each in of_type["bfloat16"]])


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("chip", ["h100", "b200"])
@pytest.mark.parametrize("left_out", ["shape", "contracted size", "elements of the result"])
def test_matmuls_that_are_left_out_are_found_between_the_others(chip, left_out, unseen_operations):
    errors = [abs(each.error) for each in unseen_operations.matmuls(chip, "bfloat16", left_out)]
    assert len(errors) > 200
    assert mean(errors) < 0.07


def test_under_load_only_the_arithmetic_of_a_matmul_takes_longer():
    """H100's smallest matmul, 33 MFLOP, takes 5 us, almost all to start; its largest, of 0.5 TFLOP, 697."""
    table = chip_file("h100")[0].matmuls
    assert table is not None
    sizes = 2 * 256.0**3, 2 * 2.0**26 * 4096
    alone, loaded = (
        [times.seconds("bfloat16", flops, results) for flops, results in zip(sizes, (256**2, 2**26), strict=True)]
        for times in (MatmulTimes(table), MatmulTimes(table, load=1.5))
    )
    assert loaded[0] == pytest.approx(alone[0], rel=0.01)
    assert loaded[1] == pytest.approx(1.5 * 692e-6 + 5e-6, rel=0.002)


GOOD = {"source": "a test", "chip_bytes_per_second": 1e11, "bytes": "1Mi 2Mi 4Mi",
        "microseconds": {kind: {"8": "20 30 50"} for kind in NEEDED}}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bytes": "1Mi 4Mi 2Mi"}, "the sizes do not ascend"),
        ({"bytes": "1Mi 2MB 4Mi"}, "2MB is not a size"),
        ({"microseconds": {"all-gather": {"8": "20 30"}}}, "2 times for 3 sizes"),
        ({"microseconds": {"all-gather": {"8": "20 - 50"}}}, "is not a line of numbers"),
        ({"microseconds": {"all-gather": {"8 GPUs": "20 30 50"}}}, "8 GPUs is not a group"),
        ({"microseconds": {"all-gather": {"8": "20 30 5"}}}, "take 5 us where"),
        ({"microseconds": {"all-gather": {"8": "0.02 0.03 0.05"}}}, "GB/s for each GPU, of which a link has 100"),
        ({"microseconds": {"all-gather": {"8": "20 50 45"}}}, "the largest size takes no longer"),
        ({"microseconds": {"all-gather": {"8": "20 60 55"}}}, "the largest size takes no longer"),
        ({"microseconds": {"all-gather": {"8/12": "20 30 50"}}}, "8/12 is not a group"),
        ({"microseconds": {"all-gather": {"8": "20 30 50", "8/72": "20 30 50"}}}, "some groups name the GPUs"),
        ({"bytes": "1Gi 2Gi 4Gi", "microseconds": {"all-gather": {"8": "2e7 3e7 5e7"}}}, "of which a link has 100"),
        ({"microseconds": {"gather": {"8": "20 30 50"}}}, "all-gather"),
        (
            {"microseconds": {kind: {"8": "20 30 50"} for kind in NEEDED[:3]}},
            "there are no times of collective-permute",
        ),
    ],
)
def test_a_wrong_table_of_collectives_is_refused(changed, message):
    CollectiveTable.model_validate(GOOD)
    with pytest.raises(ValidationError, match=re.escape(message)):
        CollectiveTable.model_validate(GOOD | changed)


def test_everything_wrong_in_a_table_is_said_at_once_with_its_key():
    rows = {"all-gather": {"2": "20 30", "8": "20 30 5"}, "all-reduce": {"8": "0.1 0.2 0.3"}}
    with pytest.raises(ValidationError) as raised:
        CollectiveTable.model_validate(GOOD | {"microseconds": rows})
    places = [each["loc"] for each in raised.value.errors()]
    named = [("microseconds", kind, name) for kind, of in rows.items() for name in of]
    assert places == [*named, ("microseconds",)]


OWN = "target.network.across={{source: mine, chip_bytes_per_second: 5e10, bytes: 1Mi 4Mi, microseconds: {{{}}}}}"
ROWS = ", ".join(f"{kind}: {{2x8: '90 250'}}" for kind in NEEDED)


def test_rows_across_nodes_of_ones_own_are_used():
    own = Request(("target=b200-16", OWN.format(ROWS)))
    target = read_spec(own, then=lambda spec: spec.target)
    assert isinstance(target, GpuTarget)
    across = target.network.across
    times = SwitchTimes(8, 2, 9e11, 5e10, shipped_collectives()["b200"], across, 8)
    assert times.seconds("all-gather", 4 * MIB) == pytest.approx(250e-6)


def test_a_group_in_the_wrong_table_is_refused():
    wrong = Request(("target=b200-16", OWN.format(ROWS.replace("2x8: '90 250'", "8: '90 250'", 1))))
    with pytest.raises(ConfigError, match="8 is a group of one node, and belongs into network"):
        read_spec(wrong, then=lambda spec: spec.target)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("network.across=h100", "network.across: the table is of groups of one node, and belongs into network.coll"),
        ("network.collectives=across_nodes", "network.collectives: the table is of groups across nodes, and belongs"),
        ("chip.matmuls=b200", "chip.matmuls: table b200 is of another chip: in "),
    ],
)
def test_a_table_of_another_place_or_chip_is_one_error(declared, message):
    with pytest.raises(ConfigError) as raised:
        read_spec(Request(("target=h100-16", f"target.{declared}")), then=lambda spec: spec.target)
    assert len(raised.value.problems) == 1
    assert f"target.{message}" in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"results": "64Ki 32Ki"}, "the sizes do not ascend"),
        ({"microseconds": {"bfloat16": {256: "1 2"}}}, "fewer than two contracted sizes"),
        ({"microseconds": {"bfloat16": {256: "1 2", 512: "2"}}}, "1 times for 2 sizes"),
        ({"microseconds": {"bfloat16": {256: "3 1", 512: "2 4"}}}, "1 us where the result before takes 3"),
        ({"microseconds": {"bfloat16": {256: "1 12", 512: "2 4"}}}, "4 us where a contracted size of 256 takes 12"),
        ({"microseconds": {"bfloat16": {256: "1 2", 512: "4 4"}}}, "no longer than the result before (4)"),
        ({"microseconds": {"bfloat16": {256: "1 4", 512: "2 4"}}}, "no longer than a contracted size of 256 (4)"),
        ({"results": None}, "2 times for 1 size"),
    ],
)
def test_a_wrong_table_of_matmuls_is_refused(changed, message):
    good = {"source": "a test", "results": "64Ki 128Ki", "microseconds": {"bfloat16": {256: "1 2", 512: "2 4"}}}
    MatmulTable.model_validate(good)
    with pytest.raises(ValidationError, match=re.escape(message)):
        MatmulTable.model_validate(good | changed)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ("{512: '2 4', 1024: '0.02 0.03'}", ["matmuls.microseconds.bfloat16.1024"]),
        (
            "{512: '0.02 0.04', 1024: '0.03 0.06'}",
            [f"bfloat16.{depth}: the best of these times is" for depth in (512, 1024)],
        ),
        (
            "{512: '2e4 4e4', 1024: '3e4 6e4'}",
            ["microseconds.bfloat16: the best of these times is of 0.00", "has 989.4"],
        ),
    ],
)
def test_matmuls_faster_than_the_chip_or_in_nanoseconds_are_refused(times, message):
    own = "target.chip.matmuls={source: mine, results: 128Ki 256Ki, microseconds: {bfloat16: " + times + "}}"
    with pytest.raises(ConfigError) as raised:
        read_spec(Request(("target=h100-8", own)), then=lambda spec: spec.target)
    assert all(part in str(raised.value) for part in message)


def test_a_table_with_times_of_float16_has_them_for_it():
    rows = {"bfloat16": {256: "1 2", 512: "2 4"}, "float16": {256: "2 4", 512: "4 8"}}
    table = MatmulTable.model_validate({"source": "a test", "results": "64Ki 128Ki", "microseconds": rows})
    found = [MatmulTimes(table).seconds(dtype, 2.0**25, 2.0**16) for dtype in ("bfloat16", "float16")]
    assert found[1] == pytest.approx(2 * found[0])


@pytest.mark.parametrize("target", ["h100-8", "gb200-72", "v5p-8"])
def test_a_target_is_read_back_from_what_a_run_writes(target):
    spec = read_spec(Request((f"target={target}",)), then=lambda spec: spec.target)
    assert type(spec).model_validate_json(spec.model_dump_json()) == spec
