"""Programs that others wrote (tests/schedules/foreign), inspected: what can be known of them in another way holds."""

import re
from collections import Counter
from functools import cache

import pytest

from meshloom.compiler.analysis.compiled_step import InspectedProgram, inspect_text
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.report.build_report import report_inspected
from meshloom.compiler.target.placement import plan_own_order
from support.programs import target_of
from support.recorded import SCHEDULES, recorded_text

TARGETS = {"maxtext_dense": "v5p-128", "equinox": "h100-8"}
PEAK_BYTES = {"maxtext_dense": 5_979_694_848, "equinox": 7483438564}  # as XLA counted it where they were compiled


@cache
def inspected(name: str, *, is_stripped: bool = False) -> InspectedProgram:
    text = recorded_text(f"foreign/{name}")
    text = re.sub(r", metadata=\{[^}]*\}", "", text) if is_stripped else text
    return inspect_text(text, ProgramDevices(plan_own_order(target_of(TARGETS[name])), is_assumed=True))


def test_each_program_is_small():
    sizes = {path.name.removesuffix(".txt.xz"): path.stat().st_size for path in (SCHEDULES / "foreign").glob("*.xz")}
    assert sizes.keys() == TARGETS.keys()
    assert max(sizes.values()) < 60_000


@pytest.mark.parametrize("name", TARGETS)
def test_each_collective_of_the_text_is_reported(name):
    """Counted in the text by the opcodes; those inside of fusions and calls may be parts of one."""
    text = recorded_text(f"foreign/{name}")
    written = Counter(re.findall(r" (all-gather|all-reduce|all-to-all|reduce-scatter)(?:-start)?\(", text))
    found = Counter(each.kind for each in inspected(name).analysis.collectives)
    assert found.keys() == written.keys()
    assert all(0 < found[kind] <= written[kind] for kind in written)


@pytest.mark.parametrize("name", TARGETS)
def test_times_add_up(name):
    step, collectives = inspected(name).analysis.step, inspected(name).analysis.collectives
    assert step.num_unpriced == 0
    assert step.step_seconds == pytest.approx((step.compute_seconds or 0) + (step.exposed_seconds or 0))
    for each in collectives:
        assert (each.hidden_seconds or 0) + (each.exposed_seconds or 0) == pytest.approx(each.alone_seconds)


@pytest.mark.parametrize("name", TARGETS)
def test_the_peak_is_near_that_of_the_compiler(name):
    peak = inspected(name).peak
    assert not isinstance(peak, Unknown)
    assert peak.num_bytes == pytest.approx(PEAK_BYTES[name], rel=0.05)


@pytest.mark.parametrize(
    ("name", "lines", "rules"),
    [
        ("maxtext_dense", r"maxtext/\w+/\w+\.py:\d+", {"synchronous-collective", "reduced-then-sliced"}),
        ("equinox", r"bench/inspect_programs\.py:\d+", {"replicated-array", "wide-collective"}),
    ],
)
def test_lines_and_findings_are_of_its_own_code(name, lines, rules):
    program = inspected(name)
    large = [each for each in program.analysis.collectives if each.bytes // each.count > 2**20 and each.line]
    assert large
    assert [each.line for each in large if not re.fullmatch(lines, each.line)] == []
    assert {finding.rule for finding in program.findings} == rules


@pytest.mark.parametrize("name", TARGETS)
def test_without_metadata_less_is_said_and_nothing_else(name):
    whole, stripped = inspected(name).analysis, inspected(name, is_stripped=True).analysis
    assert {each.line for each in stripped.collectives} == {""}
    assert [each.alone_seconds for each in stripped.collectives] == [each.alone_seconds for each in whole.collectives]
    report = report_inspected(inspected(name, is_stripped=True))
    assert report.compiled.peak_bytes == report_inspected(inspected(name)).compiled.peak_bytes
