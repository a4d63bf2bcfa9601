"""Copies to and from the host: read from the text, priced by its link, and waited for where nothing hides them."""

from pathlib import Path

import pytest

from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.analysis.program_lint import lint_program
from meshloom.compiler.analysis.schedule_analysis import ScheduleAnalysis, analyse_program
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.target.placement import plan_own_order
from meshloom.compiler.xla.hlo import Module, parse_module
from support.programs import target_of
from support.schedules import compute, module

MEASURED = Path(__file__).parents[3] / "bench" / "measured" / "v6e_host_offload.txt"
HOST, DEVICE, ROW, FAST = "f32[4,256]{1,0:S(5)}", "f32[4,256]{1,0}", "f32[1,256]{1,0}", "f32[4,256]{1,0:S(1)}"
GIVEN = (f"  %there = {HOST} parameter(1)", f"  %here = {DEVICE} parameter(2)", f"  %row = {ROW} parameter(3)",
         "  %i = s32[] constant(0)")  # fmt: skip
WHOLE, ONE = 4096, 1024
CALLED = f"""%copies (a: {DEVICE}) -> {HOST} {{
  %a = {DEVICE} parameter(0)
  ROOT %c = {HOST} copy(%a)
}}
"""


def analysed(text: str, target: str = "v6e-8") -> tuple[Module, ProgramDevices, ScheduleAnalysis]:
    parsed, devices = parse_module(text), ProgramDevices(plan_own_order(target_of(target)))
    return parsed, devices, analyse_program(parsed, devices)


def test_a_program_that_was_measured_takes_as_long():
    """Three arrays of 5 GiB to eight v6e chips and back, medians of 100 runs (openxla/xprof): the step, the copies that
    have the link to themselves, and what is waited for at each end."""
    _, _, found = analysed(MEASURED.read_text())
    assert found.step.step_seconds == pytest.approx(0.784, rel=0.1)
    copies = {each.name: each for each in found.collectives}
    assert copies["copy-start"].alone_seconds == pytest.approx(0.18917, rel=0.01)
    assert copies["copy-start.5"].alone_seconds == pytest.approx(0.18236, rel=0.01)
    waits = {"copy-start": 0.189, "copy-start.2": 0.194, "copy-start.4": 0.194, "copy-start.5": 0.182}
    exposed = {name: each.exposed_seconds for name, each in copies.items() if each.exposed_seconds}
    assert exposed == {name: pytest.approx(seconds, rel=0.1) for name, seconds in waits.items()}
    assert found.step.exposed_by_axes == {"host": pytest.approx(sum(exposed.values()))}


@pytest.mark.parametrize(
    ("lines", "kind", "num_bytes", "is_async"),
    [
        ((f"  ROOT %c = {DEVICE} copy(%there)",), "copy-to-device", WHOLE, False),
        ((f"  ROOT %c = {HOST} copy(%here)",), "copy-to-host", WHOLE, False),
        (
            (f"  %c = ({DEVICE}, {HOST}, u32[]) copy-start(%there)", f"  ROOT %d = {DEVICE} copy-done(%c)"),
            "copy-to-device", WHOLE, True,
        ),
        (
            (f"  %c = ({HOST}, {DEVICE}, u32[]) copy-start(%here)", f"  ROOT %d = {HOST} copy-done(%c)"),
            "copy-to-host", WHOLE, True,
        ),
        (
            (f"  %c = (({HOST}, {ROW}, s32[], s32[]), {HOST}, u32[]) dynamic-update-slice-start(%there, %row, %i, %i)",
             f"  ROOT %d = {HOST} dynamic-update-slice-done(%c)"),
            "copy-to-host", ONE, True,
        ),
        (
            (f"  %c = (({HOST}, s32[], s32[]), {ROW}, u32[]) dynamic-slice-start(%there, %i, %i), "
             "dynamic_slice_sizes={1,256}", f"  ROOT %d = {ROW} dynamic-slice-done(%c)"),
            "copy-to-device", ONE, True,
        ),
        (
            (f"  %c = (({DEVICE}), {HOST}, u32[]) async-start(%here), calls=%copies",
             f"  ROOT %d = {HOST} async-done(%c)"),
            "copy-to-host", WHOLE, True,
        ),
    ],
    ids=["copy in", "copy out", "copy-start in", "copy-start out", "update", "slice", "call"],
)  # fmt: skip
def test_every_form_of_a_copy_moves_its_bytes_one_way(lines, kind, num_bytes, is_async):
    _, _, found = analysed(module(*GIVEN, *lines, before=CALLED))
    (copied,) = found.collectives
    assert (copied.kind, copied.bytes, copied.is_async, copied.link) == (kind, num_bytes, is_async, "host link")
    speed = {"copy-to-device": 28.4e9, "copy-to-host": 29.4e9}[kind]
    assert copied.exposed_seconds == copied.alone_seconds == pytest.approx(num_bytes / speed)
    assert found.dones == ({"d": "c"} if is_async else {"c": "c"})


def test_a_copy_into_the_chips_own_memory_is_none():
    lines = (f"  %c = ({FAST}, {DEVICE}, u32[]) copy-start(%here)", f"  ROOT %d = {FAST} copy-done(%c)")
    _, _, found = analysed(module(*GIVEN, *lines))
    assert (found.collectives, found.dones) == ((), {})


def test_both_ways_of_the_link_and_the_compute_run_at_once():
    both = (
        f"  %in = ({DEVICE}, {HOST}, u32[]) copy-start(%there)",
        f"  %out = ({HOST}, {DEVICE}, u32[]) copy-start(%here)",
        compute("a", 100_000), f"  %got = {DEVICE} copy-done(%in)", f"  ROOT %left = {HOST} copy-done(%out)",
    )  # fmt: skip
    _, _, found = analysed(module(*GIVEN, *both))
    assert found.step.exposed_seconds == 0
    assert [each.start_seconds for each in found.events if each.track.startswith("host link")] == [0, 0]


def test_advice_about_communication_is_not_given_about_copies():
    """They are large, synchronous and in float32."""
    large = [each.replace("4,256", "4096,4096") for each in (*GIVEN[:1], f"  ROOT %c = {DEVICE} copy(%there)")]
    rules = {each.rule for each in lint_program(*analysed(module(*large)))}
    assert not rules & {"wide-collective", "synchronous-collective"}


def test_on_an_unknown_chip_the_time_of_a_copy_is_unknown():
    _, _, found = analysed(module(*GIVEN, f"  ROOT %c = {DEVICE} copy(%there)"), "cpu-8")
    (copied,) = found.collectives
    assert isinstance(copied.alone_seconds, Unknown)
