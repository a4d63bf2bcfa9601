"""Conditionals within the branches of conditionals."""

import time

import pytest

from meshloom.compiler.analysis.timeline_events import schedule_events
from meshloom.compiler.core.traffic import Placed
from meshloom.compiler.xla.hlo import Module, parse_module
from meshloom.compiler.xla.schedule.alike import find_repeated
from meshloom.compiler.xla.schedule.buffers import read_buffers
from meshloom.compiler.xla.schedule.prices import Chip
from meshloom.compiler.xla.schedule.program import read_steps
from meshloom.compiler.xla.schedule.simulate import simulate
from meshloom.compiler.xla.schedule.steps import (
    ALL,
    Branches,
    Choices,
    Compute,
    Loop,
    Step,
    apply_choices,
    conditionals,
)
from support.schedules import module


def test_nested_branches_cost_time_in_proportion_to_their_number():
    """Of 60 levels, each tried anew at all levels around it, there would be 3 ** 60 runs. The longer branch counts."""
    steps: tuple[Step, ...] = ()
    for level in range(60):
        longer = (*steps, Compute(f"c{level}", "other", 2.0, "bytes", ""))
        steps = (Branches(f"b{level}", (longer, (*steps, Compute(f"d{level}", "other", 1.0, "bytes", "")))),)
    result = simulate(steps, lambda _: Placed(0.0, ()))
    assert result.seconds == pytest.approx(2 * 60)
    assert {each.branch and each.branch[0] for each in result.segments} == {f"b{level}" for level in range(60)}


@pytest.mark.parametrize(
    ("share", "shown", "words"),
    [
        (None, ["a", "long", "z"], "counts as always taken; --taken says how often"),
        (1.0, ["a", "long", "z"], "always taken, as chosen"),
        (0.0, ["a", "short", "z"], "always taken, as chosen"),
        (0.1, ["a", "long", "z"], "taken in 10 %, as chosen"),
    ],
)
def test_a_timeline_shows_the_branch_of_a_step_that_takes_it(share, shown, words):
    """10 s in one branch, 2 s in the other: what follows begins where the branch that is shown ends."""
    seconds = {"a": 1.0, "long": 10.0, "short": 2.0, "z": 3.0}
    a, long, short, z = (Compute(name, "other", seconds[name], "bytes", "") for name in seconds)
    steps: tuple[Step, ...] = (a, Branches("c", ((long,), (short,)), share), z)
    events = schedule_events(simulate(steps, lambda _: Placed(0.0, ())).segments, steps, ())
    begins = [sum(seconds[name] for name in shown[:n]) for n in range(3)]
    found = [(each.instruction, each.start_seconds, each.seconds) for each in events]
    assert found == [(name, pytest.approx(begin), seconds[name]) for name, begin in zip(shown, begins, strict=True)]
    assert [each.arguments.get("branch") for each in events] == [None, f"of c, {words}", None]


def test_iterations_that_are_left_out_begin_after_those_that_are_shown_as_taken():
    """Of 5 iterations of 10 s in half of the executions, the first two are shown; the rest take 5 s each."""
    body: tuple[Step, ...] = (Branches("c", ((Compute("x", "other", 10.0, "bytes", ""),), ()), 0.5),)
    result = simulate((Loop("l", 5, body), Compute("z", "other", 1.0, "bytes", "")), lambda _: Placed(0.0, ()))
    assert result.seconds == pytest.approx(5 * 5 + 1)
    found = [(each.name, each.start_seconds, each.seconds) for each in result.segments]
    assert [name for name, _, _ in found] == ["x", "x", "l", "z"]
    assert [begin for _, begin, _ in found] == pytest.approx([0, 10, 20, 35])
    assert found[2][2] == pytest.approx(3 * 5)


def nested(depth: int, *, is_shared: bool = True) -> Module:
    """Returns a program that runs conditionals twice, the second time beside 400,000 bytes. Branches are one
    computation or two alike; each is given other arrays. The innermost multiplies, and needs 64,000 bytes meanwhile."""
    state, text = "(f32[40,20], f32[40,20])", list[str]()

    def write(level: int, name: str) -> str:
        head = [f"  %s{name} = {state} parameter(0)", f"  %a{name} = f32[40,20] get-tuple-element(%s{name}), index=0",
                f"  %b{name} = f32[40,20] get-tuple-element(%s{name}), index=1"]  # fmt: skip
        if level == 0:
            head += [f"  %w{name} = f32[800,20] concatenate(%a{name}, %b{name})",
                     f"  %d{name} = f32[40,20] dot(%a{name}, %w{name}), lhs_contracting_dims={{1}}",
                     f"  ROOT %r{name} = {state} tuple(%d{name}, %b{name})"]  # fmt: skip
        else:
            first = write(level - 1, f"{name}t")
            second = first if is_shared else write(level - 1, f"{name}f")
            head += [f"  %n{name} = f32[40,20] negate(%b{name})",
                     f"  %x{name} = {state} tuple(%n{name}, %a{name})", f"  %q{name} = pred[] constant(true)",
                     f"  ROOT %c{name} = {state} conditional(%q{name}, %s{name}, %x{name}), "
                     f"true_computation=%{first}, false_computation=%{second}"]  # fmt: skip
        text.append(f"%level{name} {{\n" + "\n".join(head) + "\n}\n")
        return f"level{name}"

    first = write(depth, "_")
    second = first if is_shared else write(depth, "_again")
    lines = ["  %y = f32[40,20] parameter(1)", f"  %state = {state} tuple(%y, %y)",
             f"  %once = {state} call(%state), to_apply=%{first}", "  %big = f32[100000] broadcast(%y)",
             f"  %again = {state} call(%state), to_apply=%{second}",
             "  %some = f32[40] slice(%big), slice={[0:40]}",
             f"  ROOT %end = (f32[40], {state}, {state}) tuple(%some, %once, %again)"]  # fmt: skip
    return parse_module(module(*lines, before="\n".join(text)))


def test_branches_that_are_one_computation_need_the_memory_of_two_that_are_alike():
    found, copied = (read_buffers(nested(5, is_shared=is_shared)) for is_shared in (True, False))
    assert found.peak_bytes == copied.peak_bytes > 464_000
    assert sorted(each.num_bytes for each in found.at_peak) == sorted(each.num_bytes for each in copied.at_peak)
    assert found.bytes_during["d_ttttt"] == copied.bytes_during["d_againttttt"]


def test_what_nested_branches_do_is_read_in_time_in_proportion_to_their_number():
    program, begin = nested(60), time.process_time()
    chip = Chip("gpu", None, {"float32": 1e9}, 1e12)
    steps = apply_choices(read_steps(program, chip), Choices(shares={ALL: 1.0}))
    (once,) = find_repeated(program)
    assert once.flops == 2 * (2 * 40 * 20 * 20)
    assert len(conditionals(steps)) == 60
    assert read_buffers(program).peak_bytes > 464_000
    assert time.process_time() - begin < 2
