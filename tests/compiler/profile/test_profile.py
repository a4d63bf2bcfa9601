"""Traces with a known answer, read and compared with what was predicted."""

import pytest

from meshloom.compiler.analysis.schedule_analysis import NO_CHIP
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.profile.compare import compare, typical_execution
from meshloom.compiler.profile.trace import Trace, account, execution_events, read_trace, roles_of
from support.profiles import GPU_STEP, MODULE, STEPS, TPU_STEP, prediction
from support.traces import gpu_trace, tpu_trace


def _read(trace: bytes) -> Trace:
    return read_trace(trace, MODULE)


def _tpu(*devices, steps=STEPS) -> Trace:
    return _read(tpu_trace(devices, module=MODULE, steps=steps, every=10.0))


def _slower(by: float):
    return tuple((name, begin * by, end * by) for name, begin, end in TPU_STEP)


def _milliseconds(seconds: float | Unknown) -> float:
    assert not isinstance(seconds, Unknown)
    return round(seconds * 1e3, 6)


def _accounted(trace: Trace) -> dict[str, float]:
    (found,) = {id(each): account(each, roles_of(prediction())) for each in trace.executions[:1]}.values()
    kinds = {str(kind): _milliseconds(seconds) for kind, seconds in found.compute.items()}
    exposed = {f"{name} exposed": _milliseconds(seconds) for name, seconds in found.exposed.items()}
    in_flight = {f"{name} alone": _milliseconds(seconds) for name, seconds in found.in_flight.items()}
    return kinds | exposed | in_flight | {"idle": _milliseconds(found.idle)}


def test_each_moment_of_a_tpu_counts_once():
    trace = _tpu([TPU_STEP, TPU_STEP])
    assert [(each.device, each.step, each.seconds) for each in trace.executions] == [
        (0, 10, pytest.approx(10e-3)), (0, 11, pytest.approx(10e-3)),
    ]  # fmt: skip
    assert _accounted(trace) == {
        "matmul": 2.0 + 3.0 + 0.5 + 0.5 + 0.3, "other": 0.9, "idle": 0.1 + 0.1 + 0.5,
        "all-gather-start.1 exposed": 0.1 + 1.0, "all-gather-start.1 alone": 4.1,
        "reduce-scatter.1 exposed": 1.0, "reduce-scatter.1 alone": 1.0,
    }  # fmt: skip


def test_each_moment_of_a_gpu_counts_once():
    trace = _read(gpu_trace([[GPU_STEP, GPU_STEP]], module=MODULE, steps=STEPS, every=10.0))
    assert trace.platform == "gpu"
    assert [(each.device, each.step) for each in trace.executions] == [(0, 10), (0, 11)]
    assert _accounted(trace) == {
        "matmul": 2.0 + 3.0 + 0.5 + 0.5 + 0.3, "other": 1.0, "idle": 0.1 + 0.1,
        "all-gather-start.1 exposed": 1.0, "all-gather-start.1 alone": 4.0,
        "reduce-scatter.1 exposed": 1.0, "reduce-scatter.1 alone": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("annotated", [(), (10, 11, 12)])
def test_steps_of_a_gpu_that_are_not_annotated_are_counted_by_its_operations(annotated):
    """The loop runs mm.3 three times in each step. A run that was not traced has an annotation, and no operation."""
    trace = _read(gpu_trace([[GPU_STEP, GPU_STEP]], module=MODULE, steps=annotated, every=10.0))
    assert [each.seconds for each in trace.executions] == [pytest.approx(9.5e-3)] * 2
    assert len(trace.notes) == 1
    assert trace.notes[0].endswith("2 executions of 3 traced steps" if annotated else "so 2 steps are taken")


def test_the_median_of_steps_and_devices_is_compared():
    trace = _tpu([TPU_STEP, _slower(1.05)], [TPU_STEP, _slower(1.01)])
    report = compare([trace], prediction())
    assert (report.steps, report.num_executions, report.num_devices) == (STEPS, 4, 2)
    rows = {row.name: row for row in report.operations}
    assert _milliseconds(rows["mm.1"].measured_seconds) == 2.0 * 1.005
    assert rows["mm.1"].predicted_seconds == pytest.approx(1e-3)
    assert rows["mm.1"].ratio == pytest.approx(2.01)
    assert rows["mm.1"].source == "layers/dot_general, forward"
    assert rows["mm.3"].count == 3
    assert rows["mm.3"].predicted_seconds == pytest.approx(1.5e-3), "all trips of the loop"
    assert rows["all-gather-start.1"].source == "layers/mlp/up_EM, forward"
    assert rows["all-gather-start.1"].is_transfer
    kinds = {row.kind: row for row in report.kinds}
    assert kinds["matmul"].predicted_seconds == pytest.approx(3.0e-3)
    gather = kinds["all-gather"]
    assert gather.exposed is not None
    # 64 MB over a ring of 4 chips, or what v5e-4 has: alone less 0.5 ms of compute.
    assert gather.exposed.predicted_seconds == pytest.approx((gather.predicted_seconds or 0) - 0.5e-3)
    assert report.operations[0].name == "mm.2", "the most wrong first"


def test_what_a_trace_lacks_is_said():
    other = (*TPU_STEP, ("mm.99", 9.5, 9.9))
    report = compare([_tpu([other, other, other], steps=(3, 4))], prediction())
    assert report.steps == ()
    assert report.notes == (
        "process 0, device 0: 3 executions of 2 traced steps", "1 operation not in the program: mm.99",
    )  # fmt: skip
    assert _milliseconds(report.unmatched_seconds) == 0.4
    without = tuple(op for op in TPU_STEP if "reduce" not in op[0])
    assert compare([_tpu([without], steps=(3,))], prediction()).num_not_run == 1


def test_a_gather_whose_end_was_not_waited_for_says_nothing_of_its_transfer():
    early = tuple(op if op[0] != "all-gather-done.1" else (op[0], 5.1, 5.11) for op in TPU_STEP)
    rows = {row.name: row for row in compare([_tpu([early], steps=(3,))], prediction()).operations}
    assert not rows["all-gather-start.1"].is_transfer
    assert rows["reduce-scatter.1"].is_transfer


def test_the_timeline_is_that_of_the_execution():
    trace = _tpu([TPU_STEP], steps=(3,))
    events = execution_events(typical_execution([trace]), roles_of(prediction()))
    told = {(e.track, e.name, round(e.start_seconds * 1e3, 6), round(e.seconds * 1e3, 6)) for e in events}
    assert ("compute", "mm.2", 2.1, 3.0) in told
    assert ("compute", "waits for all-gather-start.1", 5.1, 1.0) in told
    assert ("ICI", "all-gather-start.1", 2.0, 4.1) in told
    assert not [e for e in events if e.name == "while.1"]


def test_without_a_chip_only_measured_times_are_known():
    report = compare([_tpu([TPU_STEP], steps=(3,))], prediction("cpu-4"))
    rows = (report.step, *report.operations, *report.kinds)
    assert {value for row in rows for value in (row.predicted_seconds, row.ratio)} == {Unknown(NO_CHIP)}
