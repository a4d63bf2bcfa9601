"""The mesh on the links: hand-computed bandwidths, a simulated torus, real topologies of libtpu."""

import math
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import topologies

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.spec.plan_spec import MeshSpec
from meshloom.compiler.spec.target_spec import TpuTarget
from meshloom.compiler.target.accuracy import accuracy_of
from meshloom.compiler.target.device_links import send_between
from meshloom.compiler.target.links import collective_seconds
from meshloom.compiler.target.mesh import MeshPlan
from meshloom.compiler.target.placement import ACROSS_SLICES, plan_placement
from meshloom.compiler.target.target import TargetPlan, plan_target, topology_arguments
from support.placements import AXES, cached_target_of, placed
from support.programs import plan_as_declared

CALL = 6e-6  # until a collective of v5e, v5p or v6e moves data


# The one-way bandwidth of a link: 45 GB/s on v5e, 100 on v5p. A ring uses it both ways on each of its axes, a line
# once; every second chip of a ring leaves half of it to the group between. Several axes at once reach 0.66 of their
# bandwidth where one of them wraps, measured on v6e-256; where none does, a ring through all chips, on v5p in one
# direction.
@pytest.mark.cases(plain=6)
@pytest.mark.parametrize(
    ("name", "sizes", "axes", "gigabytes_per_second"),
    [
        ("v5e-256", {"fsdp": 16, "tensor": 16}, ["fsdp"], 2 * 45),
        ("v5e-256", {"fsdp": 256}, ["fsdp"], 0.66 * 2 * 2 * 45),
        ("v5e-256", {"fsdp": 32, "tensor": 8}, ["tensor"], 45),
        ("v5e-256", {"fsdp": 32, "tensor": 8}, ["fsdp"], 2 * 45),  # the fastest of its axes
        ("v5e-256", {"fsdp": 32, "tensor": 8}, ["fsdp", "tensor"], 0.66 * 2 * 2 * 45),
        ("v5e-64", {"fsdp": 64}, ["fsdp"], 2 * 45),  # 8 x 8 does not wrap around
        ("v5e-128", {"fsdp": 128}, ["fsdp"], 2 * 45),  # of 8 x 16 the second axis does
        ("v5p-128", {"fsdp": 16, "tensor": 4}, ["tensor"], 2 * 100),
        ("v5p-128", {"fsdp": 16, "tensor": 4}, ["fsdp"], 0.66 * 2 * 2 * 100),
        ("v5p-128", {"fsdp": 64}, ["fsdp"], 0.66 * 3 * 2 * 100),
        ("v5p-16", {"fsdp": 8}, ["fsdp"], 100),  # less than a cube does not wrap around
        # Measured for a gathered array of 1 GiB: 2,730 us over 8 GPUs; over 8 nodes 19.7 ms for one GPU of each.
        ("h100-8", {"fsdp": 8}, ["fsdp"], 2**30 * 7 / 8 / 2730e-6 / 1e9),
        ("h100-64", {"fsdp": 8, "tensor": 8}, ["tensor"], 2**30 * 7 / 8 / 2730e-6 / 1e9),
        ("h100-64", {"fsdp": 8, "tensor": 8}, ["fsdp"], 2**30 * 7 / 8 / 19.665e-3 / 1e9),
    ],
)
def test_bandwidth_of_a_group(name, sizes, axes, gigabytes_per_second):
    link = placed(name, **sizes).link_of(axes)
    assert link.bytes_per_second == pytest.approx(gigabytes_per_second * 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "fsdp", "num_axes", "gigabytes_per_second"),
    [
        ("v5e-256", 256, None, 0.66 * 4 * 45),
        ("v5e-256", 256, 2, 0.66 * 4 * 45),
        ("v5e-256", 256, 1, 2 * 45),
        ("v5e-64", 64, 1, 2 * 45),  # 8 x 8: one ring through all chips keeps both lines of each busy
        ("v5e-128", 128, 1, 2 * 45),  # of 8 x 16 the axis that wraps around, or the ring
        ("v5p-128", 64, 2, 0.66 * 4 * 100),
        ("v5p-128", 64, 5, 0.66 * 6 * 100),
    ],
)
def test_a_gather_over_some_axes_at_a_time_has_their_bandwidth(name, fsdp, num_axes, gigabytes_per_second):
    link = placed(name, fsdp=fsdp).link_of(["fsdp"]).over(num_axes)
    assert link.bytes_per_second == pytest.approx(gigabytes_per_second * 1e9)


def test_the_arithmetic_of_links_needs_no_jax():
    code = "import sys, meshloom.compiler.target.links; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_an_all_gather_over_both_axes_of_a_v5e_pod_takes_what_is_computed_by_hand():
    """A gigabyte: 255/256 of it into each chip at 0.66 of 180 GB/s, eight hops of a microsecond along each axis, and 6
    until a call begins."""
    link = placed("v5e-256", fsdp=256).link_of(["fsdp"])
    by_hand = 1e9 * 255 / 256 / (0.66 * 180e9) + 16e-6 + CALL
    assert collective_seconds("all-gather", 1e9, 256, link) == pytest.approx(by_hand)
    assert collective_seconds("reduce-scatter", 1e9, 256, link) == pytest.approx(by_hand)
    assert collective_seconds("all-reduce", 1e9, 256, link) == pytest.approx(2 * by_hand - CALL)
    assert collective_seconds("collective-permute", 45e6, 256, link) == pytest.approx(1e-3 + 1e-6 + CALL)
    with pytest.raises(ValueError, match="a group of 16"):
        collective_seconds("all-gather", 1e9, 16, link)


def test_across_two_slices_a_gather_takes_the_network_first_and_ici_then():
    """v5e: a chip has a quarter of its host's 12.5 GB/s. It gets the other slice's part of its sixteenth, then all."""
    both = placed("v5e-16", 2, replica=2, fsdp=16)
    assert both.link_of(["replica"]).kind == "DCN"
    link = both.link_of(["replica", "fsdp"])
    assert link.kind == "DCN"
    by_hand = (1e9 / 16 / 2 / 1.025e9 + 10e-6) + (1e9 * 15 / 16 / 90e9 + 6e-6) + CALL
    assert collective_seconds("all-gather", 1e9, 32, link) == pytest.approx(by_hand)


def test_weights_sharded_over_two_slices_are_gathered_at_the_price_of_the_network():
    """Each device gets its sixteenth of the other slice's half over its 1.025 GB/s, and the rest over ICI."""
    link = placed("v5e-16", 2, fsdp=32).link_of(["fsdp"])
    by_hand = (1e9 / 16 / 2 / 1.025e9 + 10e-6) + (1e9 * 15 / 16 / 90e9 + 6e-6) + CALL
    assert collective_seconds("all-gather", 1e9, 32, link) == pytest.approx(by_hand)


def test_a_sum_between_two_slices_takes_what_was_measured():
    """303 MB a chip of two v6e-256: 73.7 ms."""
    link = placed("v6e-256", 2, replica=2, fsdp=256).link_of(["replica"])
    assert collective_seconds("all-reduce", 303e6, 2, link) == pytest.approx(73.7e-3, rel=0.01)


@pytest.mark.parametrize(("num_slices", "doublings"), [(1, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize(("name", "of_each"), [("v6e-256", 0.06), ("v5e-256", 0.014)])
def test_slices_wait_for_one_another_for_each_doubling(name, of_each, num_slices, doublings):
    assert cached_target_of(name, num_slices=num_slices).slice_wait == pytest.approx(of_each * doublings)


def test_targets_without_slices_wait_for_none():
    assert cached_target_of("h100-16").slice_wait == cached_target_of("cpu-8").slice_wait == 0


def test_devices_of_one_chip_share_its_links():
    """tpu7x has two: each gathers over ICI the half of the array with its number, at half of the rate, then the other's
    half between them."""
    placement = placed("tpu7x-128", fsdp=64, tensor=2)
    assert placement.describe()["tensor"] == "ICI core (2)"
    assert placement.link_of(["fsdp"]).bytes_per_second == pytest.approx(0.66 * 3 * 2 * 90e9 / 2)
    assert placement.link_of(["tensor"]).bytes_per_second == pytest.approx(6 * 90e9)
    seconds = collective_seconds("all-gather", 1e9, 128, placement.link_of(["fsdp", "tensor"]))
    assert seconds == pytest.approx(1e9 / 2 * 63 / 64 / (0.66 * 270e9) + 6e-6 + 1e9 / 2 / 540e9 + 1e-6 + 13e-6)


def _bytes_over_the_busiest_link(num_chips: int, wraps: bool, send) -> float:
    """A row of chips on which every pair that `send` names moves bytes the shortest way; ties take both ways."""
    links = np.zeros((2, num_chips))
    for source in range(num_chips):
        for to in range(num_chips):
            ways = []
            right, left = (to - source) % num_chips, (source - to) % num_chips
            if not wraps:
                ways = [(0, to - source)] if to > source else [(1, source - to)]
            else:
                ways = [(0, right)] * (right <= left) + [(1, left)] * (left <= right)
            for direction, hops in ways:
                for hop in range(hops):
                    at = (source + hop) % num_chips if direction == 0 else (source - hop) % num_chips
                    links[direction, at] += send(source, to) / len(ways)
    return float(links.max())


@pytest.mark.parametrize(("name", "wraps"), [("v5e-256", True), ("v5e-64", False)])
def test_an_all_to_all_is_what_the_busiest_link_of_a_simulated_row_carries(name, wraps):
    size = 16 if wraps else 8
    link = placed(name, fsdp=size, tensor=size).link_of(["fsdp"])
    total = 1e12  # of which each chip sends an n-th of its n-th to each: latency does not count
    busiest = _bytes_over_the_busiest_link(size, wraps, lambda a, b: total / size**2)
    assert collective_seconds("all-to-all", total, size, link) == pytest.approx(busiest / 45e9, rel=1e-4)


def test_an_all_to_all_over_two_axes_is_bound_by_the_halves_of_the_pod():
    """Half of all bytes change sides: over 16 rows, with two links each (the ring is cut twice)."""
    link = placed("v5e-256", fsdp=256).link_of(["fsdp"])
    crossing_one_way = 1e12 / 4
    assert collective_seconds("all-to-all", 1e12, 256, link) == pytest.approx(
        crossing_one_way / (16 * 2 * 45e9), rel=0.01
    )


@pytest.mark.parametrize(
    ("name", "num_slices", "sizes", "expected"),
    [
        ("v5e-256", 1, {"fsdp": 256}, ["ICI x (16, wraps) x ICI y (16, wraps)"]),
        ("v5p-128", 1, {"fsdp": 16, "tensor": 4}, ["ICI y (4, wraps) x ICI z (4, wraps)", "ICI x (4, wraps)"]),
        ("v5e-128", 1, {"fsdp": 16, "tensor": 8}, ["ICI y (16, wraps)", "ICI x (8)"]),
        ("v5e-16", 2, {"replica": 2, "fsdp": 16}, ["DCN (2)", "ICI x (4) x ICI y (4)"]),
        ("v5e-4", 2, {"replica": 4, "tensor": 2}, ["DCN (2) x ICI y (2)", "ICI x (2)"]),
        ("v5e-16", 2, {"fsdp": 32}, ["DCN (2) x ICI x (4) x ICI y (4)"]),
        ("v5e-4", 4, {"replica": 2, "data": 2, "fsdp": 4},
         ["DCN (2 of 4, every 2nd)", "DCN (2 of 4)", "ICI x (2) x ICI y (2)"]),
        ("h100-16", 1, {"fsdp": 4, "tensor": 4}, ["NIC (2) x NVLink (2 of 8, every 4th)", "NVLink (4 of 8)"]),
        ("cpu-8", 1, {"fsdp": 8}, ["memory"]),
    ],
)  # fmt: skip
def test_where_mesh_axes_lie(name, num_slices, sizes, expected):
    assert placed(name, num_slices, **sizes).describe() == dict(zip(sizes, expected, strict=True))


def test_what_no_axis_can_cross_is_an_error_with_a_fix():
    with pytest.raises(ConfigError) as error:
        placed("v5e-4", 2, tensor=8)
    assert error.value.problems[0].fix.startswith("set mesh.replica=2")


def _topology(target: TargetPlan):
    """Devices of a topology as libtpu describes them."""
    shape, cores = target.shape or (), target.chip.num_devices if target.chip else 1
    return [
        SimpleNamespace(id=i, coords=(*at[1:-1], *(0,) * (3 - len(shape))), core_on_chip=at[-1], slice_index=at[0])
        for i, at in enumerate(np.ndindex(target.num_slices, *shape, cores))
    ]


def _sizes(target: TargetPlan, draw) -> dict[str, int]:
    """A random mesh of as many devices."""
    left = target.num_devices
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    primes = [p for p in (2, 3) for _ in range(20) if left % p == 0]
    for p in primes:
        if left % p == 0:
            sizes[draw(st.sampled_from(AXES[1:]))] *= p
            left //= p
    return sizes


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["v5e-64", "v5e-128", "v5p-128", "v5p:4x4x12", "tpu7x-16", "v4-8"]))
def test_every_mesh_uses_every_device_once_and_groups_lie_where_the_plan_says(data, name):
    target = cached_target_of(name)
    sizes = _sizes(target, data.draw)
    placement = plan_placement(sizes, target)
    mesh = placement.ordered(_topology(target))
    assert sorted(device.id for device in mesh.flat) == list(range(target.num_devices))
    num_axes = len(target.shape or ())
    names = (*"xyz"[:num_axes], "core")
    for number, axis in enumerate(AXES):
        group = np.moveaxis(mesh, number, 0).reshape(sizes[axis], -1)[:, 0]
        where = [(*device.coords[:num_axes], device.core_on_chip) for device in group]
        varying = {name for i, name in enumerate(names) if len({at[i] for at in where}) > 1}
        assert varying == {part.physical for part in placement.parts.get(axis, ())}
        assert math.prod(part.size for part in placement.parts.get(axis, ())) == sizes[axis]
        positions = np.moveaxis(np.arange(mesh.size).reshape(mesh.shape), number, 0).reshape(sizes[axis], -1)[:, 0]
        assert placement.axes_of(positions.tolist()) == ((axis,) if sizes[axis] > 1 else ())


def test_a_ring_is_a_ring_of_neighbours():
    """Along a mesh axis on a whole wrapped axis, each next device is one hop away, and the last from the first."""
    target = cached_target_of("v5p-128")
    mesh = placed("v5p-128", fsdp=16, tensor=4).ordered(_topology(target)).reshape(16, 4)
    for row in mesh:
        for one, other in pairwise([*row, row[0]]):
            hops = [min((a - b) % 4, (b - a) % 4) for a, b in zip(one.coords, other.coords, strict=True)]
            assert sum(hops) == 1


def test_devices_of_another_shape_are_an_error():
    with pytest.raises(ConfigError, match="do not have the shape of v5e-32"):
        placed("v5e-32", fsdp=32).ordered(_topology(cached_target_of("v5e-16")))


@pytest.mark.tpu
@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "num_slices", "sizes"),
    [
        ("v5e-16", 1, {"fsdp": 4, "tensor": 4}),
        ("v5e-8", 1, {"fsdp": 8}),
        ("v5e-1", 1, {}),
        ("v5e-16", 2, {"replica": 2, "fsdp": 8, "tensor": 2}),
        ("v4-16", 1, {"fsdp": 8}),
        ("v5p-256", 1, {"fsdp": 32, "tensor": 4}),
        ("v6e-256", 1, {"fsdp": 64, "tensor": 4}),
        ("tpu7x-16", 2, {"replica": 2, "fsdp": 8, "tensor": 2}),
    ],
)
def test_devices_of_libtpu_are_taken_as_planned(name, num_slices, sizes):
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    chosen = (f"target={name}", *(() if num_slices == 1 else (f"target.num_slices={num_slices}",)))
    spec = read_spec(Request(chosen), then=lambda spec: spec.target)
    assert isinstance(spec, TpuTarget)
    placement = placed(name, num_slices, **sizes)
    target = placement.target
    name = str(target.topology_name)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **topology_arguments(spec)).devices
    assert len(devices) == target.num_devices
    assert {device.device_kind for device in devices} == {spec.chip.device_kind}
    mesh = MeshPlan(placement.sizes, placement).of_devices(devices)
    assert isinstance(mesh, jax.sharding.Mesh)
    grid = mesh.devices.reshape(placement.sizes["replica"], placement.sizes["fsdp"], placement.sizes["tensor"])
    for s, slice_devices in enumerate(grid):
        assert {getattr(device, "slice_index", 0) for device in slice_devices.flat} == {s}
    for along, axis in ((grid[0, :, 0], "fsdp"), (grid[0, 0], "tensor")):
        used = {"xyz"[i] for i in range(3) if len({device.coords[i] for device in along}) > 1}
        used |= {"core"} if len({device.core_on_chip for device in along}) > 1 else set()
        assert used == {part.physical for part in placement.parts.get(axis, ())}


@pytest.mark.parametrize(
    ("name", "order", "parts"),
    [
        ("h100-16", (), {"fsdp": "NIC (2) x NVLink (4 of 8, every 2nd)", "tensor": "NVLink (2 of 8)"}),
        ("h100-16", ("fsdp",), {"fsdp": "NVLink (8)", "tensor": "NIC (2)"}),
        ("v5e:4x4", (), {"fsdp": "ICI x (2 of 4, every 2nd) x ICI y (4)", "tensor": "ICI x (2 of 4)"}),
        ("v5e:4x4", ("fsdp",), {"fsdp": "ICI x (4) x ICI y (2 of 4)", "tensor": "ICI y (2 of 4, every 2nd)"}),
    ],
)
def test_a_declared_order_says_which_devices_lie_nearest(name, order, parts):
    target = cached_target_of(name)
    sizes = dict.fromkeys(AXES, 1) | {"fsdp": 8, "tensor": 2}
    placement = plan_placement(sizes, target, order)
    assert placement.describe() == parts
    assert len(set(placement.places)) == target.num_devices


@pytest.mark.parametrize(
    ("name", "sizes", "order", "expert", "fsdp"),
    [  # GB/s by hand: a link carries 90 or 100 one way; two groups of every second chip share each link of a ring
        ("v6e-256", {"fsdp": 64, "expert": 4}, "expert:2x2", (2 * 90, 4), 0.66 * 2 * 2 * 90 / 2),
        ("v6e-256", {"fsdp": 32, "expert": 8}, "expert:2x4", (2 * 90, 8), 2 * 90 / 2),  # along the faster axis
        ("v6e-64", {"fsdp": 16, "expert": 4}, "expert:2x2", (2 * 90, 4), 2 * 90 / 2),  # 8 x 8 does not wrap
        ("v5p-128", {"fsdp": 16, "expert": 4}, "expert:2x1x2", (100, 4), 0.66 * (2 * 100 / 2 + 2 * 100 + 2 * 100 / 2)),
    ],
)
def test_an_axis_may_be_a_block_of_chips(name, sizes, order, expert, fsdp):
    """Its devices are a ring of neighbours around the block, on two links of each chip."""
    target = cached_target_of(name)
    placement = plan_placement(dict.fromkeys(AXES, 1) | sizes, target, (order,))
    assert len(set(placement.places)) == target.num_devices
    link = placement.link_of(["expert"])
    assert (link.bytes_per_second, link.group_size) == (pytest.approx(expert[0] * 1e9), expert[1])
    assert placement.link_of(["fsdp"]).bytes_per_second == pytest.approx(fsdp * 1e9)
    block = placement.places[: sizes["expert"]]
    for place, following in zip(block, (*block[1:], block[0]), strict=True):
        assert sum(abs(a - b) for a, b in zip(place, following, strict=True)) == 1


def test_a_block_is_as_fast_as_its_busiest_link():
    """An all-to-all of each pair's part along x, then y: two parts on each link; a gather both ways around the ring."""
    placement = plan_placement(dict.fromkeys(AXES, 1) | {"fsdp": 64, "expert": 4}, cached_target_of("v6e-256"),
                               ("expert:2x2",))  # fmt: skip
    blocks = [range(first, first + 4) for first in range(0, 256, 4)]
    pairs = [(a, b) for block in blocks for a in block for b in block if a != b]
    exchanged = collective_seconds("all-to-all", 16e9, 4, placement.link_of(["expert"]))
    assert exchanged == pytest.approx(send_between(placement, pairs, 1e9).seconds + CALL)
    ring = [(block[i], block[(i + way) % 4]) for block in blocks for i in range(4) for way in (1, -1)]
    gathered = collective_seconds("all-gather", 16e9, 4, placement.link_of(["expert"]))
    assert gathered == pytest.approx(send_between(placement, ring, 16e9 * 3 / 4 / 2).seconds + CALL)
    on_a_line = placed("v6e-256", fsdp=64, expert=4)
    assert collective_seconds("all-to-all", 16e9, 4, on_a_line.link_of(["expert"])) == pytest.approx(
        2 * ((exchanged or 0) - CALL) + CALL, rel=1e-4
    )


@pytest.mark.parametrize(
    ("name", "order", "what"),
    [
        ("v6e-256", ("expert:2x4",), r"expert:2x4 is a block of 8 chips, and expert has 4 chips in a slice"),
        ("v6e-256", ("tensor:2x2",), r"tensor:2x2 is a block of 4 chips, and tensor has 1 chip in a slice"),
        ("v6e-256", ("expert:2x2x1",), r"expert:2x2x1 does not divide the torus of 16x16 chips"),
        ("v6e-256", ("expert:1x4", "fsdp:4x16"), r"the blocks expert, fsdp leave the other mesh axes no way"),
        ("h100-256", ("expert:2x2",), r"h100-256 has no torus"),
    ],
)
def test_a_block_that_cannot_be_is_an_error(name, order, what):
    with pytest.raises(ConfigError, match=what):
        plan_placement(dict.fromkeys(AXES, 1) | {"fsdp": 64, "expert": 4}, cached_target_of(name), order)


@pytest.mark.parametrize(
    ("name", "all_reduce", "bisection"), [("v5e-256", 51.2e12, 1.6e12), ("v6e-256", 102.4e12, 3.2e12)]
)
def test_a_wrapped_slice_has_the_bandwidth_that_its_vendor_says(name, all_reduce, bisection):
    """Cloud counts links at 50 and 100 GB/s, of which 90 % were measured: all four links of each chip reduce at once,
    of which both axes together reach 0.66, and a cut through the middle has two links for each row."""
    placement, share, at_once = placed(name, fsdp=256), 0.9, 0.66
    one_axis = placed(name, fsdp=16, tensor=16)
    both, along_x = placement.link_of(["fsdp"]).bytes_per_second, one_axis.link_of(["fsdp"]).bytes_per_second
    assert both == pytest.approx(at_once * share * all_reduce / 256)
    assert along_x == pytest.approx(both / at_once / 2)  # pyright: ignore[reportOptionalOperand]
    halves = [(x * 16 + y, (x + 8) % 16 * 16 + y) for x in range(16) for y in range(16)]
    across = send_between(one_axis, halves, 1e9).seconds  # each chip to the one opposite: all cross the middle
    assert across == pytest.approx(128 * 1e9 / (share * bisection / 2), rel=0.01)


def test_replicas_follow_the_slices_where_none_are_declared():
    """Weights are then gathered within a slice; what is declared wins, with a warning where they are not."""
    one = ("target=v5e-16", "sharding=hsdp", "global_batch_size=64", "model=llama2_7b", "data=synthetic")
    words = (*one, "target.num_slices=4")
    plan = plan_as_declared(*words)
    assert (plan.mesh.sizes["replica"], plan.mesh.sizes["fsdp"]) == (4, 16)
    assert plan.mesh.placement.describe()["fsdp"] == "ICI x (4) x ICI y (4)"
    assert plan.mesh.reasons == {"replica": "one for each of the 4 slices: mesh.replica is not set"}
    assert not plan.mesh.placement.warnings()
    declared = plan_as_declared(*words, "mesh.replica=2")
    assert (declared.mesh.sizes["replica"], declared.mesh.sizes["fsdp"], declared.mesh.reasons) == (2, 32, {})
    (warning,) = declared.mesh.placement.warnings()
    assert (warning.where, warning.fix[:34]) == ("mesh.fsdp", "use sharding=hsdp mesh.replica=4 i")
    assert warning in declared.warnings
    single = plan_as_declared(*one)
    assert (single.mesh.sizes["replica"], single.mesh.sizes["fsdp"]) == (2, 8)
    with pytest.raises(ConfigError, match=r"replica=4 x fsdp=32 is 128, not the 64 devices of target 4 x v5e-16"):
        plan_as_declared(*words, "mesh.fsdp=32")


def test_axes_that_cross_slices_come_first_in_the_order_in_which_they_do():
    """The numbers of devices in a program go slice by slice then, which readers of groups rely on."""
    assert tuple(MeshSpec.model_fields)[: len(ACROSS_SLICES)] == ACROSS_SLICES


def test_a_chip_of_your_own_is_itself_in_name_memory_and_range(tmp_path):
    (tmp_path / "target").mkdir()
    own = "defaults: [_v6e, _self_]\nshape: [4, 4]\nchip: {name: next, hbm_bytes: 68719476736}\n"
    (tmp_path / "target/mine.yaml").write_text(own)
    words = (f"hydra.searchpath=[file://{tmp_path}]", "target=mine")
    specs = [read_spec(Request(each), then=lambda spec: spec.target) for each in (words, ("target=v6e-16",))]
    mine, made_of = (plan_target(spec, "bfloat16") for spec in specs)
    assert (mine.name, made_of.name) == ("next-16", "v6e-16")
    assert mine.chip
    assert made_of.chip
    assert mine.hbm_bytes_per_device
    assert made_of.hbm_bytes_per_device
    more = mine.chip.hbm_bytes - made_of.chip.hbm_bytes
    assert mine.hbm_bytes_per_device - made_of.hbm_bytes_per_device == more == 2**35
    assert (mine.topology_name, mine.compiler) == (made_of.topology_name, made_of.compiler)
    known, unknown = accuracy_of(made_of, ("dense",)), accuracy_of(mine, ("dense",))
    assert known
    assert unknown
    assert (unknown.chip, unknown.num_on_chip) == ("next", 0)
    assert known.num_on_chip > 0
