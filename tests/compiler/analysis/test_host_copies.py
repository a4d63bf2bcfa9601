"""Copies to and from the host: read from the text, priced by its link, and waited for where nothing hides them."""

from pathlib import Path

import pytest

from meshloom.compiler.analysis.compiled_step import inspect_text
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.analysis.program_lint import lint_program
from meshloom.compiler.analysis.schedule_analysis import ScheduleAnalysis, analyse_program
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.target.placement import plan_own_order
from meshloom.compiler.xla.hlo import Module, parse_module
from meshloom.compiler.xla.schedule.buffers import read_host_bytes
from support.programs import target_of
from support.schedules import compute, module

MEASURED = Path(__file__).parents[3] / "bench" / "measured" / "v6e_host_offload.txt"
HOST, DEVICE, ROW, FAST = "f32[4,256]{1,0:S(5)}", "f32[4,256]{1,0}", "f32[1,256]{1,0}", "f32[4,256]{1,0:S(1)}"
GIVEN = (f"  %there = {HOST} parameter(1)", f"  %here = {DEVICE} parameter(2)", f"  %row = {ROW} parameter(3)",
         "  %i = s32[] constant(0)")  # fmt: skip
WHOLE, ONE = 4096, 1024
STATE = f"(s32[], {DEVICE}, {HOST})"
CALLED = f"""%copies (a: {DEVICE}) -> {HOST} {{
  %a = {DEVICE} parameter(0)
  ROOT %c = {HOST} copy(%a)
}}

%reads (a: {HOST}) -> {DEVICE} {{
  %a = {HOST} parameter(0)
  ROOT %n = {DEVICE} negate(%a)
}}

%reads_a_row (a: {HOST}, i: s32[]) -> {ROW} {{
  %a = {HOST} parameter(0)
  %i = s32[] parameter(1)
  %r = {ROW} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={{1,256}}
  ROOT %n = {ROW} negate(%r)
}}

%writes (a: {DEVICE}) -> {HOST} {{
  %a = {DEVICE} parameter(0)
  ROOT %n = {HOST} negate(%a)
}}

%writes_a_row (a: {HOST}, r: {ROW}, i: s32[]) -> {HOST} {{
  %a = {HOST} parameter(0)
  %r = {ROW} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = {HOST} dynamic-update-slice(%a, %r, %i, %i)
}}

%condition (s: {STATE}) -> pred[] {{
  %s = {STATE} parameter(0)
  %j = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%j, %n), direction=LT
}}

%body (s: {STATE}) -> {STATE} {{
  %s = {STATE} parameter(0)
  %j = s32[] get-tuple-element(%s), index=0
  %a = {DEVICE} get-tuple-element(%s), index=1
  %c = {HOST} copy(%a)
  ROOT %t = {STATE} tuple(%j, %a, %c)
}}

%many (a: {DEVICE}, b: {HOST}) -> {HOST} {{
  %a = {DEVICE} parameter(0)
  %b = {HOST} parameter(1)
  %first = {HOST} copy(%a)
  %zero = s32[] constant(0)
  %t = {STATE} tuple(%zero, %a, %b)
  %w = {STATE} while(%t), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  ROOT %last = {HOST} get-tuple-element(%w), index=2
}}

%both (a: {DEVICE}, b: {HOST}) -> ({HOST}, {DEVICE}) {{
  %a = {DEVICE} parameter(0)
  %b = {HOST} parameter(1)
  %out = {HOST} copy(%a)
  %in = {DEVICE} copy(%b)
  ROOT %t = ({HOST}, {DEVICE}) tuple(%out, %in)
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
        (
            (f"  %c = (({DEVICE}, {HOST}), {HOST}, u32[]) async-start(%here, %there), calls=%many",
             f"  ROOT %d = {HOST} async-done(%c)"),
            "copy-to-host", 4 * WHOLE, True,
        ),
        ((f"  ROOT %c = {DEVICE} fusion(%there), kind=kLoop, calls=%reads",), "copy-to-device", WHOLE, False),
        ((f"  ROOT %c = {ROW} fusion(%there, %i), kind=kLoop, calls=%reads_a_row",), "copy-to-device", ONE, False),
        ((f"  ROOT %c = {HOST} fusion(%here), kind=kLoop, calls=%writes",), "copy-to-host", WHOLE, False),
        (
            (f"  ROOT %c = {HOST} fusion(%there, %row, %i), kind=kLoop, calls=%writes_a_row",),
            "copy-to-host", ONE, False,
        ),
    ],
    ids=["copy in", "copy out", "copy-start in", "copy-start out", "update", "slice", "call", "call with a loop",
         "fusion in", "fusion in, a slice", "fusion out", "fusion out, an update"],
)  # fmt: skip
def test_every_form_of_a_copy_moves_its_bytes_one_way(lines, kind, num_bytes, is_async):
    _, _, found = analysed(module(*GIVEN, *lines, before=CALLED))
    assert len(found.collectives) == 1
    (copied,) = found.collectives
    assert (copied.kind, copied.bytes, copied.is_async, copied.link) == (kind, num_bytes, is_async, "host link")
    speed = {"copy-to-device": 28.4e9, "copy-to-host": 29.4e9}[kind]
    assert copied.exposed_seconds == copied.alone_seconds == pytest.approx(num_bytes / speed)
    assert found.dones == ({"d": "c"} if is_async else {"c": "c"})


def test_a_call_that_copies_both_ways_waits_for_both():
    both = (f"  %c = (({DEVICE}, {HOST}), ({HOST}, {DEVICE}), u32[]) async-start(%here, %there), calls=%both",
            f"  ROOT %d = ({HOST}, {DEVICE}) async-done(%c)")  # fmt: skip
    _, _, found = analysed(module(*GIVEN, *both, before=CALLED))
    moved = {each.name: (each.kind, each.bytes) for each in found.collectives}
    assert moved == {"c": ("copy-to-device", WHOLE), "c (copy-to-host)": ("copy-to-host", WHOLE)}
    assert found.step.exposed_seconds == pytest.approx(WHOLE / 28.4e9)  # the slower way


def test_a_fusion_waits_for_what_its_own_compute_does_not_hide():
    """It takes a millisecond, and its copy from the host about two."""
    large = [each.replace("4,256", "4096,3584") for each in (DEVICE, HOST, CALLED)]
    fused = f"  ROOT %c = {large[0]} fusion(%there), kind=kLoop, calls=%reads, "
    chip = target_of("v6e-8").chip
    assert chip is not None
    assert chip.clock_hz is not None
    cycles = f'backend_config={{"estimated_cycles":"{round(1e-3 * chip.clock_hz)}"}}'
    _, _, found = analysed(module(f"  %there = {large[1]} parameter(1)", fused + cycles, before=large[2]))
    (copied,) = found.collectives
    alone = 4096 * 3584 * 4 / 28.4e9
    assert copied.alone_seconds == pytest.approx(alone)
    assert copied.exposed_seconds == pytest.approx(alone - 1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"  ROOT %c = {DEVICE} copy()", "c in main: copy has 0 of 1 operands"),
        (f"  ROOT %c = {HOST} dynamic-update-slice(%there)", "c in main: dynamic-update-slice has 1 of 2 operands"),
        ("  ROOT %c = () copy-start(%there)", "c: copy-start has no result in its type ()"),
        (f"  ROOT %c = {DEVICE} fusion(%there), kind=kLoop", "c: a fusion names the computation that it runs"),
    ],
)
def test_a_text_with_a_piece_missing_is_one_error(line, said):
    with pytest.raises(ConfigError) as found:
        inspect_text(module(*GIVEN, compute("k", 1), line), ProgramDevices(plan_own_order(target_of("v6e-4"))))
    (problem,) = found.value.problems
    assert said in problem.what


def test_what_lies_on_the_host_is_counted_there_alone():
    """An argument of 4 KiB, and two arrays of which the second takes the place of the first."""
    out = f"{HOST} copy(%here)"
    lines = (f"  %one = {out}", f"  %a = {DEVICE} copy(%one)", f"  %two = {out}", f"  ROOT %b = {DEVICE} copy(%two)")
    text = module(*GIVEN, compute("k", 1), *lines)
    found = inspect_text(text, ProgramDevices(plan_own_order(target_of("v6e-4"))))
    assert found.figures.host_bytes == 2 * WHOLE
    assert read_host_bytes(parse_module(module("  ROOT %c = bf16[8]{0} copy(%x)"))) == 0


def test_only_what_lies_on_the_device_is_to_be_split_over_more_of_them():
    large = [f"  %{name} = {kind.replace('4,256', '4096,8192')} parameter({place}), sharding={{replicated}}"
             for place, (name, kind) in enumerate({"there": HOST, "here": DEVICE}.items(), start=1)]  # fmt: skip
    found = lint_program(*analysed(module(*large, "  ROOT %c = bf16[8]{0} copy(%x)")))
    (finding,) = (each for each in found if each.rule == "replicated-array")
    assert "here" in finding.where
    assert "there" not in finding.where


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
