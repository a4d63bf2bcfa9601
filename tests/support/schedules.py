"""Pieces of small scheduled programs, written by hand."""

from collections.abc import Iterator

from meshloom.compiler.spec.figure_source import FigureSource
from meshloom.compiler.spec.kernel_rates import AttentionKernel
from meshloom.compiler.xla.schedule.steps import Collective, Start, Step, every

GROUPS = "replica_groups={{0,1,2,3}}"


def attention_of(by_head: dict[int, float]) -> AttentionKernel:
    """Returns an attention kernel with these shares of the peak by the size of a head, in both passes."""
    shares = {head: {2048: share} for head, share in by_head.items()}
    return AttentionKernel(title="a test's", source=FigureSource(measured="none"), forward=shares, backward=shares)


def compute(name: str, milliseconds: int, operands: str = "%x") -> str:
    return f'  %{name} = bf16[8]{{0}} fusion({operands}), kind=kLoop, calls=%work, backend_config={{"estimated_cycles":"{milliseconds}"}}'


def module(*lines: str, before: str = "") -> str:
    return "\n".join(
        ["HloModule step, is_scheduled=true, num_partitions=4", "",
         "%work (p: bf16[8]) -> bf16[8] {", "  ROOT %p = bf16[8]{0} parameter(0)", "}", "", before,
         "ENTRY %main (x: bf16[8]) -> bf16[8] {", "  %x = bf16[8]{0} parameter(0)", *lines, "}", ""]
    )  # fmt: skip


# 64 bytes gathered: 64 ms.
GATHER = f"bf16[32]{{0}} all-gather(%x), {GROUPS}, dimensions={{0}}"


START = f"(bf16[8]{{0}}, bf16[32]{{0}}) all-gather-start(%x), {GROUPS}, dimensions={{0}}"


def collectives_of(steps: tuple[Step, ...]) -> Iterator[Collective]:
    """Returns every collective of a program, once."""
    return (start.collective for start in every(steps, Start))


def loop(*body: str, trips: int, condition: str | None = None) -> tuple[str, str]:
    """Computations of a loop, and the lines that run it: its state is a counter and an array."""
    default = f"  %n = s32[] constant({trips})\n  ROOT %lt = pred[] compare(%i, %n), direction=LT"
    inner = "\n".join(body)
    computations = f"""\
%cond (c: (s32[], bf16[8], s32[])) -> pred[] {{
  %c = (s32[], bf16[8]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
{condition or default}
}}

%body (s: (s32[], bf16[8], s32[])) -> (s32[], bf16[8], s32[]) {{
  %s = (s32[], bf16[8]{{0}}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%s), index=0
  %x = bf16[8]{{0}} get-tuple-element(%s), index=1
  %m = s32[] get-tuple-element(%s), index=2
  %one = s32[] constant(1)
{inner}
  %next = s32[] add(%j, %one)
  ROOT %t = (s32[], bf16[8]{{0}}, s32[]) tuple(%next, %x, %m)
}}
"""
    run = f"""\
  %zero = s32[] constant(0)
  %bound = s32[] constant({trips})
  %copied = s32[] copy(%bound)
  %init = (s32[], bf16[8]{{0}}, s32[]) tuple(%zero, %x, %copied)
  ROOT %loop = (s32[], bf16[8]{{0}}, s32[]) while(%init), condition=%cond, body=%body"""
    return computations, run
