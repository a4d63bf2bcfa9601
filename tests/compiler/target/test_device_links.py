"""Groups that are no whole mesh axes, against links that are walked one by one."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshloom.compiler.analysis.program_devices import place_collective
from meshloom.compiler.core.traffic import AxisGroups
from meshloom.compiler.target.device_links import link_of_devices, send_between, uneven_seconds
from meshloom.compiler.target.links import collective_seconds
from meshloom.compiler.target.placement import Placement
from meshloom.compiler.xla.schedule.steps import Collective
from meshloom.models.config import divisors
from support.placements import placed

CALL = 6e-6  # until a collective of v5e moves data
MESHES = [
    ("v5e-16", 1, {"fsdp": 4, "tensor": 4}), ("v5e-64", 1, {"data": 2, "fsdp": 8, "tensor": 4}),
    ("v5e-256", 1, {"data": 2, "fsdp": 16, "expert": 2, "tensor": 4}), ("v5e-256", 1, {"fsdp": 32, "tensor": 8}),
    ("v5p-128", 1, {"fsdp": 16, "tensor": 4}), ("v5p-256", 1, {"data": 2, "fsdp": 8, "tensor": 8}),
    ("tpu7x-128", 1, {"fsdp": 16, "expert": 4, "tensor": 2}), ("v5e-16", 2, {"replica": 2, "fsdp": 4, "tensor": 4}),
    ("h100-64", 1, {"data": 2, "fsdp": 16, "tensor": 2}),
]  # fmt: skip


def groups_over(placement: Placement, axes: set[str]) -> list[list[int]]:
    """Returns the groups of the mesh's positions, by NumPy."""
    names, shape = list(placement.sizes), tuple(placement.sizes.values())
    kept = [i for i, name in enumerate(names) if name not in axes]
    over = [i for i, name in enumerate(names) if name in axes]
    size = math.prod(shape[i] for i in over)
    return np.arange(math.prod(shape)).reshape(shape).transpose(*kept, *over).reshape(-1, size).tolist()


@pytest.mark.ci
@settings(max_examples=60)
@given(st.sampled_from(MESHES), st.data())
def test_groups_of_whole_mesh_axes_have_the_link_of_the_axes(mesh, data):
    name, num_slices, sizes = mesh
    placement = placed(name, num_slices, **sizes)
    axes = data.draw(st.sets(st.sampled_from(sorted(sizes)), min_size=1))
    found, expected = link_of_devices(placement, groups_over(placement, axes)), placement.link_of(sorted(axes))
    assert found is not None
    assert (found.kind, found.group_size) == (expected.kind, expected.group_size)
    assert found.bytes_per_second == pytest.approx(expected.bytes_per_second)
    assert [level.size for level in found.levels] == [level.size for level in expected.levels]
    physical = [part.physical for axis in axes for part in placement.parts[axis]]
    if len(set(physical)) == len(physical):
        assert found.latency_seconds == pytest.approx(expected.latency_seconds)


@settings(max_examples=60)
@given(st.sampled_from(MESHES), st.data())
def test_groups_along_mesh_axes_have_the_link_of_their_devices(mesh, data):
    name, num_slices, sizes = mesh
    placement = placed(name, num_slices, **sizes)
    axes = data.draw(st.sets(st.sampled_from(sorted(sizes)), min_size=1))
    along = groups_over(placement, axes)
    size = data.draw(st.sampled_from(divisors(len(along[0]))[1:]))
    groups = AxisGroups(size, data.draw(st.sampled_from(divisors(len(along[0]) // size))))
    devices = [[group[place] for place in members] for group in along for members in groups.members(len(group))]
    assert sorted(place for group in devices for place in group) == list(range(len(placement.places)))
    found = placement.link_of([axis for axis in placement.sizes if axis in axes], groups)
    expected = link_of_devices(placement, devices)
    assert expected is not None
    assert (found.kind, found.group_size) == (expected.kind, expected.group_size)
    assert found.bytes_per_second == pytest.approx(expected.bytes_per_second)
    assert [level.size for level in found.levels] == [level.size for level in expected.levels]


def gathered_over_the_busiest_link(groups: list[list[int]], num_places: int, *, wraps: bool) -> float:
    """Each member's part is handed on from chip to chip, both ways: on a ring as far as half of the others, else to the
    last. Shares of an array that each group gathers; members are places on one axis."""
    links = np.zeros((2, num_places))
    for group, (way, step) in product(groups, enumerate((1, -1))):
        is_ring = wraps and len(group) > 1 and len({(b - a) % num_places for a, b in zip(group, [*group[1:], group[0]], strict=True)}) == 1  # fmt: skip  # noqa: E501
        for index, member in enumerate(group):
            following = group[index + 1 :] if step > 0 else group[:index][::-1]
            if is_ring:  # the farthest of an even number gets half from each side
                following = [group[(index + step * k) % len(group)] for k in range(1, len(group) // 2 + 1)]
            at, share = member, 1 / len(group)
            for number, to in enumerate(following, start=1):
                is_last_half = is_ring and 2 * number == len(group)
                while at != to:
                    links[way, at] += share / 2 if is_last_half else share
                    at = (at + step) % num_places
    return float(links.max())


@settings(max_examples=60)
@given(st.sampled_from([("v5e-64", 8, False), ("v5e-256", 16, True)]), st.integers(1, 4), st.integers(0, 3))
def test_a_part_of_an_axis_gathers_as_its_busiest_link_carries(axis, log_size, log_stride):
    """size members, each stride behind the one before, tiled over a whole axis, on each of its rows."""
    name, num_places, wraps = axis
    size, stride = 2**log_size, 2**log_stride
    assume(size * stride <= num_places)
    blocks = range(0, num_places, size * stride)
    groups = [[block + offset + stride * i for i in range(size)] for block in blocks for offset in range(stride)]
    placement = placed(name, fsdp=num_places, tensor=num_places)
    rows = groups_over(placement, {"fsdp"})
    positions = [[row[member] for member in group] for row in rows for group in groups]
    link = link_of_devices(placement, positions)
    assert link is not None
    busiest = gathered_over_the_busiest_link(groups, num_places, wraps=wraps)
    found = (collective_seconds("all-gather", 1e12, size, link) or 0) - link.latency_seconds
    assert found == pytest.approx(1e12 * busiest / 45e9)


@settings(max_examples=60)
@given(st.permutations(range(8)))
def test_what_pairs_send_is_bound_by_the_busiest_link(order):
    """Along one axis of 8 chips that does not wrap, counted cut by cut: who sends to whom across it."""
    placement = placed("v5e-64", fsdp=8, tensor=8)
    row = groups_over(placement, {"fsdp"})[0]
    sent = send_between(placement, [(row[i], row[to]) for i, to in enumerate(order)], 45e6)
    cuts = range(7)
    right = max(sum(i <= cut < to for i, to in enumerate(order)) for cut in cuts)
    left = max(sum(to <= cut < i for i, to in enumerate(order)) for cut in cuts)
    farthest = max(abs(i - to) for i, to in enumerate(order))
    assert sent.seconds == pytest.approx(max(left, right) * 1e-3 + farthest * 1e-6)
    physical = placement.parts["fsdp"][0].physical
    assert set(sent.tracks) == ({f"{physical}+"} if right else set()) | ({f"{physical}-"} if left else set())


def test_a_ring_passes_on_in_one_direction_and_leaves_the_other():
    placement = placed("v5p-128", fsdp=16, tensor=4)
    rings = groups_over(placement, {"tensor"})
    forth = [(ring[i], ring[(i + 1) % 4]) for ring in rings for i in range(4)]
    back = [(to, at) for at, to in forth]
    one, other = send_between(placement, forth, 100e6), send_between(placement, back, 100e6)
    assert one.seconds == other.seconds == pytest.approx(1e-3 + 1e-6)
    assert len(set(one.tracks)) == len(set(other.tracks)) == 1
    assert one.tracks != other.tracks


def test_pairs_in_nodes_between_nodes_and_across_slices():
    gpus = placed("h100-16", fsdp=2, tensor=8)
    # Measured: 573 us for 64 MiB behind a switch. Over the network 78 % of an adapter's 50 GB/s, and 37 us.
    assert send_between(gpus, [(0, 1)], 64 * 2**20).seconds == pytest.approx(573e-6, rel=0.01)
    assert send_between(gpus, [(0, 8)], 0.78 * 50e8).seconds == pytest.approx(100e-3 + 37e-6, rel=0.05)
    assert send_between(gpus, [(0, 8)], 50e6).kind == "NIC"
    slices = placed("v5e-16", 2, replica=2, fsdp=16)
    assert send_between(slices, [(0, 16), (1, 17)], 1.025e6).seconds == pytest.approx(1e-3 + 10e-6)
    assert send_between(slices, [(0, 16)], 1.0).kind == "DCN"
    assert send_between(slices, [(3, 3)], 1.0).seconds == 0


def collective(kind: str, groups: tuple[tuple[int, ...], ...], num_slices: int | None = None) -> Collective:
    return Collective("c", kind, 10**9, "bf16", groups, False, "", "", "", (10**9 // 2,), num_slices)  # type: ignore[arg-type]


def test_a_few_packets_wait_for_no_others_on_a_torus():
    """Nor do they let others wait; an adapter's do."""
    for target, sizes, waits in (("v5e-16", {"fsdp": 16}, False), ("h100-16", {"fsdp": 2, "tensor": 8}, True)):
        placement = placed(target, **sizes)
        groups = (tuple(range(16)),)
        large, small = (replace(collective("all-reduce", groups), num_bytes=size) for size in (2**20, 2**10))
        assert place_collective(large, placement).links
        assert bool(place_collective(small, placement).links) == waits
        assert place_collective(small, placement).alone_seconds


def test_halves_of_an_axis_are_faster_than_the_axis():
    """v5e-256, fsdp=16 along one ring: its halves are lines of 8, as fast per byte as half of the ring."""
    placement = placed("v5e-256", fsdp=16, tensor=16)
    whole = tuple(map(tuple, groups_over(placement, {"fsdp"})))
    halves = tuple(half for group in whole for half in (group[:8], group[8:]))
    pairs = tuple(group[i : i + 2] for group in whole for i in range(0, 16, 2))
    found = place_collective(collective("all-gather", halves), placement)
    assert (found.mesh_axes, found.group_size, found.level) == (("fsdp",), 8, "ICI")
    assert found.alone_seconds == pytest.approx(1e9 * 7 / 8 / 45e9 + 7e-6 + CALL)
    of_pairs = place_collective(collective("all-gather", pairs), placement).alone_seconds
    assert of_pairs == pytest.approx(0.5e9 / 45e9 + 1e-6 + CALL)
    of_whole = place_collective(collective("all-gather", whole), placement).alone_seconds
    assert of_whole == pytest.approx(1e9 * 15 / 16 / 90e9 + 8e-6 + CALL)


def test_groups_that_are_no_boxes_go_around_a_ring_of_their_members():
    """v5e-16 of 4 x 4, by hand: a square is a ring both ways, as its box; a corner sends twice over its two links."""
    placement = placed("v5e-16", fsdp=4, tensor=4)
    squares = tuple(tuple(base + i for i in (0, 1, 4, 5)) for base in (0, 2, 8, 10))
    boxes = place_collective(collective("all-gather", squares), placement).alone_seconds
    walked = uneven_seconds("all-gather", 1e9, placement, squares)
    assert boxes == pytest.approx(0.75e9 / 90e9 + 2e-6 + CALL)
    assert walked.seconds == pytest.approx(boxes, rel=1e-3)
    corners = ((0, 1, 4), (15, 14, 11))
    for kind, times in (("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)):
        found = place_collective(collective(kind, corners), placement)
        assert found.alone_seconds == pytest.approx(times * (2 / 3 * 1e9 / 45e9 + 2e-6) + CALL)
        assert (found.why, found.is_certain) == (None, False)
    exchanged = place_collective(collective("all-to-all", corners), placement)  # 1 of 9 parts each way, and one passes
    assert exchanged.alone_seconds == pytest.approx(2 * 1e9 / 9 / 45e9 + 2e-6 + CALL)


def test_groups_across_slices_that_are_no_boxes_are_bound_by_the_fewest_members():
    """Twelve chips of one slice and four of the other: each of the four receives 3/16 of the array from outside, then
    both sets pass all of it around."""
    slices = placed("v5e-16", 2, replica=2, fsdp=16)
    groups = ((*range(12), *range(16, 20)), (*range(12, 16), *range(20, 32)))
    found = place_collective(collective("all-gather", groups), slices)
    assert found.level == "DCN"
    assert "DCN" in found.links
    inside = found.alone_seconds - (1e9 * 12 / 16 / 4 / 1.025e9 + 10e-6)  # pyright: ignore[reportOptionalOperand]
    assert 11 / 12 * 1e9 / 90e9 < inside < 4 * 11 / 12 * 1e9 / 90e9
    gpus = placed("h100-16", fsdp=2, tensor=8)
    uneven = place_collective(collective("all-gather", ((*range(6), 8, 9), (6, 7, *range(10, 16)))), gpus)
    assert uneven.alone_seconds == pytest.approx(1e9 * 6 / 8 / 2 / (0.78 * 50e9), rel=0.05)  # NVLink at once
    assert uneven.level == "NIC"


def test_groups_of_different_sizes_have_a_price():
    placement = placed("v5e-16", fsdp=4, tensor=4)
    found = place_collective(collective("all-gather", ((0, 1, 2), (4, 5))), placement)
    assert found.alone_seconds == pytest.approx(2 / 3 * 1e9 / 45e9 + 2e-6 + CALL)


def test_collectives_of_some_slices_have_the_price_of_as_many():
    slices = placed("v5e-16", 4, replica=2, fsdp=32)
    assert next(str(part) for part in slices.parts["fsdp"]) == "DCN (2 of 4)"
    some = place_collective(collective("all-reduce", (), num_slices=2), slices)
    assert (some.mesh_axes, some.group_size, some.level, some.why) == ((), 2, "DCN", None)  # of two axes, either
    assert some.alone_seconds == pytest.approx(2 * (1e9 / 2 / 1.025e9 + 10e-6))
    every = place_collective(collective("all-reduce", (), num_slices=4), slices)
    assert every.mesh_axes == ("replica", "fsdp")


def test_across_slices_each_device_meets_those_at_its_place():
    slices = placed("v5e-16", 2, replica=2, fsdp=16)
    found = place_collective(collective("all-reduce", (), num_slices=2), slices)
    assert (found.mesh_axes, found.group_size, found.level, found.links) == (("replica",), 2, "DCN", ("DCN",))
    assert found.alone_seconds == pytest.approx(2 * (1e9 / 2 / 1.025e9 + 10e-6))
