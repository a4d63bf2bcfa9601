"""A small scheduled program with traces of it, by hand, whose times are known."""

from functools import cache
from pathlib import Path

from meshloom.compiler.plan import Plan
from meshloom.compiler.profile.prediction import Prediction, predict
from support.programs import plan_as_declared

MODULE, STEPS = "jit_train_step", (10, 11)
CYCLES = 1_500_000  # of v5e in a millisecond
TEXT = f"""\
HloModule {MODULE}, is_scheduled=true, num_partitions=4

%work (p: bf16[8000000]) -> bf16[8000000] {{
  ROOT %p = bf16[8000000]{{0}} parameter(0)
}}

%multiply (a: bf16[6144,6144], b: bf16[6144,6144]) -> bf16[6144,6144] {{
  %a = bf16[6144,6144]{{1,0}} parameter(0)
  %b = bf16[6144,6144]{{1,0}} parameter(1)
  ROOT %d = bf16[6144,6144]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%sum (s: bf16[], t: bf16[]) -> bf16[] {{
  %s = bf16[] parameter(0)
  %t = bf16[] parameter(1)
  ROOT %u = bf16[] add(%s, %t)
}}

%condition (c: (s32[], bf16[6144,6144])) -> pred[] {{
  %c = (s32[], bf16[6144,6144]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

%body (l: (s32[], bf16[6144,6144])) -> (s32[], bf16[6144,6144]) {{
  %l = (s32[], bf16[6144,6144]{{1,0}}) parameter(0)
  %j = s32[] get-tuple-element(%l), index=0
  %y = bf16[6144,6144]{{1,0}} get-tuple-element(%l), index=1
  %mm.3 = bf16[6144,6144]{{1,0}} fusion(%y, %y), kind=kOutput, calls=%multiply, backend_config={{"estimated_cycles":"{CYCLES // 2}"}}
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  ROOT %t.2 = (s32[], bf16[6144,6144]{{1,0}}) tuple(%next, %mm.3)
}}

ENTRY %main (x: bf16[8000000], w: bf16[6144,6144]) -> bf16[8000000] {{
  %x = bf16[8000000]{{0}} parameter(0)
  %w = bf16[6144,6144]{{1,0}} parameter(1)
  %mm.1 = bf16[6144,6144]{{1,0}} fusion(%w, %w), kind=kOutput, calls=%multiply, metadata={{op_name="jit(train_step)/jvp(layers)/while/body/dot_general"}}, backend_config={{"estimated_cycles":"{CYCLES}"}}
  %all-gather-start.1 = (bf16[8000000]{{0}}, bf16[32000000]{{0}}) all-gather-start(%x), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, metadata={{op_name="jit(train_step)/jvp(layers)/weight=layers/mlp/up_EM/all_gather"}}
  %mm.2 = bf16[6144,6144]{{1,0}} fusion(%mm.1, %w), kind=kOutput, calls=%multiply, backend_config={{"estimated_cycles":"{CYCLES // 2}"}}
  %all-gather-done.1 = bf16[32000000]{{0}} all-gather-done(%all-gather-start.1)
  %work.1 = bf16[8000000]{{0}} fusion(%x), kind=kLoop, calls=%work, backend_config={{"estimated_cycles":"{CYCLES // 2}"}}
  %zero = s32[] constant(0)
  %init = (s32[], bf16[6144,6144]{{1,0}}) tuple(%zero, %mm.2)
  %while.1 = (s32[], bf16[6144,6144]{{1,0}}) while(%init), condition=%condition, body=%body
  ROOT %reduce-scatter.1 = bf16[8000000]{{0}} reduce-scatter(%all-gather-done.1), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, to_apply=%sum, metadata={{op_name="jit(train_step)/transpose(jvp(layers))/weight=layers/mlp/up_EM/reduce_scatter"}}
}}
"""  # noqa: E501

# On a TPU: the gather is in flight from 2.0 to 6.1, of which compute runs 3.0; the loop's event holds its trips'.
TPU_STEP = (
    ("mm.1", 0.0, 2.0), ("all-gather-start.1", 2.0, 2.1), ("mm.2", 2.1, 5.1), ("all-gather-done.1", 5.1, 6.1),
    ("work.1", 6.1, 7.0), ("while.1", 7.0, 8.5), ("mm.3", 7.0, 7.5), ("mm.3", 7.6, 8.1), ("mm.3", 8.1, 8.4),
    ("reduce-scatter.1", 8.5, 9.5),
)  # fmt: skip
# On a GPU: the gather is a kernel of 4.0 beside 3.0 of compute; no kernel belongs to its done.
GPU_STEP = {
    "Stream #13(Compute)": (("mm.1", 0.0, 2.0), ("mm.2", 2.0, 5.0), ("work.1", 6.0, 7.0), ("mm.3", 7.0, 7.5),
                            ("mm.3", 7.6, 8.1), ("mm.3", 8.1, 8.4), ("reduce-scatter.1", 8.5, 9.5)),
    "Stream #20(Memcpy)": (("all-gather-start.1", 2.0, 6.0),),
}  # fmt: skip


def prediction(target: str = "v5e-4") -> Prediction:
    """Returns what is predicted of the program on these chips."""
    return predict(TEXT, plan_on(target), ())


@cache
def plan_on(target: str, *overrides: str) -> Plan:
    """A plan for these chips; the program is not its own."""
    return plan_as_declared(f"target={target}", "data=synthetic", "sharding=fsdp", "global_batch_size=4", *overrides)


def write_run(run_dir: Path, trace: bytes, *, process: int = 0, predicted: Prediction | None = None) -> Path:
    """A run directory with a trace of a process, as `meshloom train` leaves it."""
    place = run_dir / f"profile/process-{process}/plugins/profile/2026_01_01_00_00_00"
    place.mkdir(parents=True)
    (place / "host.xplane.pb").write_bytes(trace)
    (run_dir / "profile/predicted.json").write_text((predicted or prediction()).model_dump_json())
    return run_dir
