"""Events of a timeline, by what they do for the model."""

import pytest

from meshloom.compiler.analysis.timeline_events import name_of_collective, schedule_events
from meshloom.compiler.core.traffic import CollectiveKind, Placed
from meshloom.compiler.report.views.timeline import View, layer_views
from meshloom.compiler.schema import CollectiveReport
from meshloom.compiler.xla.schedule import simulate
from meshloom.compiler.xla.schedule.steps import Collective, Compute, Done, Loop, Start
from support.traffic import origin

LAYERS = "jit(train_step)/jvp(layers)/while/body/closed_call"
BACKWARD = "jit(train_step)/transpose(jvp(layers))/while/body/closed_call/checkpoint"


def collective(source: str, kind: CollectiveKind = "all-gather", name: str = "all-gather.1") -> CollectiveReport:
    return CollectiveReport(
        kind=kind, mesh_axes=("fsdp",), group_size=4, link="ICI", bytes=800, dtype="bf16", count=8, alone_seconds=8.0,
        hidden_seconds=0.0, exposed_seconds=8.0, hidden_behind=(), is_async=True, form="all-gather-start", line="",
        where="once", confidence="high", name=name, origin=origin(source),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("source", "kind", "name"),
    [
        ("layers/mlp/up_EM, forward", "all-gather", "gather mlp/up"),
        ("layers/mlp/down_ME, backward", "reduce-scatter", "reduce mlp/down"),
        ("head/kernel_EV and 2 more, backward", "all-reduce", "reduce head/kernel and 2 more"),
        ("one of head/kernel_EV, embed/table_VE, backward (inferred from its size)", "all-reduce",
         "reduce one of head/kernel_EV, embed/table_VE"),
        ("made by the compiler", "collective-permute", "permute made by the compiler"),
        ("checkpoint/dot_general, backward", "all-to-all", "exchange checkpoint/dot_general"),
    ],
)  # fmt: skip
def test_a_collective_is_named_by_its_role_and_parameter(source, kind, name):
    assert name_of_collective(collective(source, kind)) == name


def compute(name: str, kind: str, seconds: float, op_name: str) -> Compute:
    return Compute(name, kind, seconds, "cycles", op_name)  # pyright: ignore[reportArgumentType]


def test_a_step_of_two_loops_is_shown_by_one_iteration_of_each():
    """Forward 4 iterations of 1 + 3 s, of which a collective takes 1 s beside nothing; then backward 4 of 6 s."""
    gather = Collective("all-gather.1", "all-gather", 100, "bf16", (), True, "all-gather-start", "", "body", (50,))
    forward = (Start(gather), Done("all-gather.1"), compute("fusion.1", "matmul", 3.0, f"{LAYERS}/matmul=mlp_up/dot"))
    backward = (compute("fusion.2", "matmul", 4.0, f"{BACKWARD}/matmul=mlp_up/dot"),
                compute("fusion.3", "other", 2.0, f"{BACKWARD}/rematted_computation/mul"))  # fmt: skip
    update = compute("fusion.4", "other", 1.0, "jit(train_step)/optimizer/add")
    steps = (Loop("while.1", 4, forward), Loop("while.2", 4, backward), update)
    result = simulate(steps, lambda _: Placed(1.0, ("ICI x",)))
    events = schedule_events(result.segments, steps, [collective("layers/mlp/up_EM, forward")])

    told = [(each.name, each.start_seconds, each.seconds, each.loop, each.iteration) for each in events]
    assert told[:3] == [
        ("gather mlp/up", 0.0, 1.0, "layers, forward", 1),
        ("waits for gather mlp/up", 0.0, 1.0, "layers, forward", 1),
        ("matmul mlp_up", 1.0, 3.0, "layers, forward", 1),
    ]
    assert told[6:9] == [
        ("layers, forward: 2 more iterations", 8.0, 8.0, "layers, forward", 3),
        ("matmul mlp_up", 16.0, 4.0, "layers, backward", 1),
        ("mul", 20.0, 2.0, "layers, backward", 1),
    ]
    assert told[-1] == ("optimizer", 40.0, 1.0, "", 0)
    assert events[0].arguments == {
        "source": "layers/mlp/up_EM, forward", "bytes": 100, "over": "fsdp", "link": "ICI", "iteration": "1 of 4",
    }  # fmt: skip
    assert events[2].arguments["pass"] == "forward"
    assert layer_views(events) == (
        View("layers, forward, iteration 2", 4_000_000_000, 8_000_000_000),
        View("layers, backward, iteration 2", 22_000_000_000, 28_000_000_000),
    )


def test_a_step_without_loops_has_no_views():
    steps = (compute("fusion.1", "matmul", 3.0, ""),)
    assert layer_views(schedule_events(simulate(steps, lambda _: Placed(None, ())).segments, steps, ())) == ()
