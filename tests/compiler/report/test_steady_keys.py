"""Keys that tools read are where they were: the contract of report.json, and plan.json's estimate."""

import json

import pytest

from conftest import LINEAR_STACK, plan_of
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.report.explain import plan_as_json
from meshloom.compiler.schema import Report
from support import reports

STEP = {"compute_seconds", "exposed_seconds", "exposed_fraction", "predicted_seconds", "predicted_mfu",
        "predicted_range_seconds", "roofline_seconds"}  # fmt: skip
MEMORY = {"peak_bytes_per_chip", "limit_bytes_per_chip", "fits", "breakdown", "estimate_bytes_per_chip"}


def test_a_report_has_them_and_is_read_without_them():
    report = reports.does_not_fit()[0]
    written = json.loads(report.model_dump_json())
    assert written["step"].keys() >= STEP
    assert written["memory"].keys() >= MEMORY
    assert (written["memory"]["peak_bytes_per_chip"], written["memory"]["fits"]) == (41 * 2**30, False)
    assert written["step"]["predicted_seconds"] == pytest.approx(
        sum(written["step"][part] for part in ("compute_seconds", "exposed_seconds", "bubble_seconds"))
    )
    shortest, longest = written["step"]["predicted_range_seconds"]
    assert shortest * longest == pytest.approx(written["step"]["predicted_seconds"] ** 2)
    assert written["alternatives"][0]["seconds"] > 0
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_those_that_are_unknown_have_their_reasons():
    written = json.loads(reports.unknowns()[0].model_dump_json())
    nulls = [name for name in STEP if written["step"][name] is None]
    assert {"predicted_seconds", "predicted_mfu", "predicted_range_seconds"} <= set(nulls)
    assert all(written["unknown"].get(f"step.{name}") for name in nulls)


@pytest.mark.parametrize("target", ["v5e-8", "cpu-8"])
def test_a_plan_has_them(target):
    plan = plan_of(*LINEAR_STACK, f"target={target}", "sharding=fsdp", "precision=bfloat16")
    written = plan_as_json(plan)
    time, memory = (written["estimate"][name] for name in ("time", "peak_memory_bytes_per_device"))
    if target == "cpu-8":
        assert (time, memory["fits"]) == (None, None)
        assert written["unknown"].keys() >= {"estimate.time", "estimate.peak_memory_bytes_per_device.fits"}
    else:
        waits = sum(time["exposed_seconds"].values()) + time["bubble_seconds"]
        assert time["seconds"] == pytest.approx(time["compute_seconds"] + waits)
        assert memory["fits"]
        assert memory["peak_bytes"] < memory["limit_bytes"]


def test_programs_that_were_tried_say_whether_they_fit_in_both_memories_and_why_they_have_no_step():
    search = reports.searched()
    first, second, *others = search.tried
    second = second.model_copy(update={"figures": second.figures.model_copy(update={"host_fits": False})})
    report = reports.fits()[0].model_copy(
        update={"search": search.model_copy(update={"tried": (first, second, *others)})}
    )
    text = report.model_dump_json()
    tried = json.loads(text)["search"]["tried"]
    assert [one["fits"] for one in tried[:2]] == [first.figures.fits, False]
    whys = [one.figures.step_seconds for one in search.tried]
    assert [one["why_not"] for one in tried] == [each.why if isinstance(each, Unknown) else None for each in whys]
    assert Report.model_validate_json(text) == report
