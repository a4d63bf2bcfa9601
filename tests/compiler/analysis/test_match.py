"""Collectives without names, and what of a plan has their size."""

from dataclasses import replace

import pytest

from meshloom.compiler.analysis.schedule_analysis import match_planned, source_by_size
from meshloom.compiler.core.scopes import Pass
from meshloom.compiler.core.traffic import TrafficSource
from meshloom.compiler.estimate.communication import PlannedCollective
from meshloom.compiler.xla.schedule.steps import Collective


def planned(
    source: str, num_elements: int, *, count: int = 3, in_pass: Pass = "backward", **changes
) -> PlannedCollective:
    scatter = PlannedCollective(
        kind="reduce-scatter", mesh_axes=("fsdp",), group_size=16, bytes=4 * num_elements, dtype="float32",
        origin=TrafficSource(activation=source, in_pass=in_pass), rule="sharding.parameters[0]",
    )  # fmt: skip
    return replace(scatter, **changes).times(count)


UP, GATE, NORM = planned("up", 4096), planned("gate", 4096), planned("norm", 256)
PLANNED = (
    UP, GATE, NORM, planned("head", 8192, count=1),
    planned("norm", 256, kind="all-gather", bytes=512, dtype="bfloat16", in_pass="forward"),
    planned("loss", 1, kind="all-reduce", mesh_axes=("replica", "fsdp"), count=1, in_pass="forward"),
    planned("tokens", 1, kind="all-reduce", mesh_axes=("replica", "fsdp"), count=1, dtype="int32", in_pass="forward"),
)  # fmt: skip


def source(*num_elements: int, axes: tuple[str, ...] = ("fsdp",), count: int = 3, **changes) -> str | None:
    found = Collective("c", "all-reduce", 0, "f32", (), False, "synchronous", "", "", num_elements)
    origin = source_by_size(match_planned(replace(found, **changes), axes, count, PLANNED))
    return origin and str(origin)


@pytest.mark.parametrize(
    ("elements", "changes", "expected"),
    [
        ((8192,), {"count": 1}, "head, backward (inferred from its size)"),
        ((4096,), {}, "one of up, gate, backward (inferred from its size)"),
        ((4096, 4096, 256), {}, "up and 2 more, backward (inferred from its size)"),
        ((4096, 256), {}, "one of up, gate and 1 more, backward (inferred from its size)"),
        ((2 * 4096,), {"kind": "reduce-scatter", "count": 3}, "head, backward (inferred from its size)"),
        ((256,), {"is_padded": True, "dtype": "bf16"}, "norm, forward (inferred from its size)"),
        ((256,), {"kind": "all-gather", "dtype": "bf16"}, "norm, forward (inferred from its size)"),
        ((5000,), {}, None),
        ((4096,), {"axes": ("tensor",)}, None),
        ((128,), {"axes": ("replica",), "dtype": "s32"}, "tokens, forward (inferred from its size)"),
        ((128,), {"axes": ("replica",)}, "loss, forward (inferred from its size)"),
    ],
)
def test_source_by_size(elements, changes, expected):
    assert source(*elements, **changes) == expected


def test_many_candidates_are_not_all_named():
    found = Collective("c", "reduce-scatter", 0, "f32", (), False, "synchronous", "", "", (64,))
    matches = match_planned(found, ("fsdp",), 1, [planned(f"w{i}", 64) for i in range(6)])
    assert str(source_by_size(matches)) == "one of w0, w1, w2, w3 or 2 others, backward (inferred from its size)"


def test_the_matmul_before_a_sum_narrows_its_candidates_down():
    sums = [planned(f"sum of {name}", 64) for name in ("mlp_output", "attention_output")]
    found = Collective("c", "reduce-scatter", 0, "f32", (), False, "synchronous", "", "", (64,))
    made = replace(found, made_by=("jit(f)/matmul=attention_output/dot_general",))
    origins = [match_planned(each, ("fsdp",), 3, sums)[0].origins for each in (found, made)]
    assert [[origin.activation for origin in each] for each in origins] == [
        ["sum of mlp_output", "sum of attention_output"],
        ["sum of attention_output"],
    ]


def test_arrays_joined_end_to_end_are_all_of_their_size():
    found = Collective("c", "reduce-scatter", 0, "f32", (), False, "synchronous", "", "", (192,))
    matches = match_planned(found, ("fsdp",), 1, [planned(f"w{i}", 64) for i in range(3)])
    assert str(source_by_size(matches)) == "w0 and 2 more, backward (inferred from its size)"
