"""Gradients of the loops over layers against finite differences of a NumPy forward pass, all in float64.

Each layer adds an auxiliary loss to the objective.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshloom.compiler.core.partition_spec import keep_axes
from meshloom.compiler.parallel.encodings import Encoding
from meshloom.compiler.parallel.weight_plan import frozen, plan_weight
from meshloom.compiler.parallel.weights import (
    Reduction,
    Weights,
    gather_dims,
    gradient_accumulator,
    hoist,
    reduce_gradient,
    scatter_dims,
)
from meshloom.compiler.sharding.roles import AxisRoles
from meshloom.compiler.spec.overlap_spec import LayerLoop
from meshloom.compiler.step.schedule import StackFunctions
from meshloom.compiler.step.sequential import prefetch_layers, scan_layers
from meshloom.compiler.target.compiler_options import plan_preset_options, refused_options
from meshloom.models import Aux
from support.programs import target_of
from support.proofs import Computation

DIMENSIONS = {"scale_E": "LE", "up_EM": "LEM", "down_ME": "LME"}  # of a layer's weights
SIZES = {"L": 3, "E": 8, "M": 6}
NUM_SEQUENCES = 16
STEP = 1e-5  # of central differences: their error is of the size of its square
PENALTY = 0.1  # weight of the auxiliary loss that each layer returns
BATCH_AXES = ("replica", "fsdp")


@dataclass(frozen=True)
class Layout:
    """Mesh axes by dimension, of weights as stored and accumulated, and as updated."""

    stored: dict[str, tuple[str, ...]]
    updated: dict[str, tuple[str, ...]]
    mesh: dict[str, int] = field(default_factory=lambda: {"replica": 2, "fsdp": 4})
    frozen: tuple[str, ...] = ()

    def num_devices(self, axes: tuple[str, ...]) -> int:
        return prod(self.mesh[axis] for axis in axes)

    @property
    def alone(self) -> tuple[str, ...]:
        """The batch axes along which every device accumulates a gradient of its own."""
        return tuple(axis for axis in BATCH_AXES if not any(axis in axes for axes in self.stored.values()))


FSDP, BOTH, WITH_TENSOR = {"E": ("fsdp",)}, {"E": ("fsdp", "replica")}, {"E": ("fsdp",), "M": ("tensor",)}
LAYOUTS = {
    "ddp": Layout({}, {}),
    "hsdp": Layout(FSDP, FSDP),
    "hsdp, updated over replicas too": Layout(FSDP, BOTH),
    "zero1": Layout({}, FSDP),
    "hsdp, a matrix and a vector frozen": Layout(FSDP, FSDP, frozen=("scale_E", "up_EM")),
    "hsdp with a tensor axis": Layout(WITH_TENSOR, WITH_TENSOR, {"replica": 2, "fsdp": 2, "tensor": 2}),
}
LOOPS = {f"scan, {unroll} in a trip": (unroll, 0, False) for unroll in (1, 2)} | {
    f"prefetch {distance}, {unroll} in a trip, {'one late' if deferred else 'at once'}": (unroll, distance, deferred)
    for distance in (1, 2)
    for unroll in (1, 2)
    for deferred in (False, True)
}
SOME_LOOPS = ("scan, 1 in a trip", "prefetch 2, 2 in a trip, one late")
# When the sum over devices is taken: behind the backward pass, in it, or in it on top of microbatches before.
BEHIND, INSIDE, ADDED = "behind", "in backward", "in backward, added"
CASES = dict.fromkeys([
    *[("hsdp", loop, ADDED) for loop in LOOPS],
    *[(name, loop, when) for name in LAYOUTS for loop in SOME_LOOPS for when in (INSIDE, ADDED)],
    *[(name, SOME_LOOPS[-1], BEHIND) for name in LAYOUTS],
])  # fmt: skip

# Each layout, unroll, distance, time of reduction and way to skip is in one of the first, most pairs in both.
PLAIN = {
    ("hsdp", "scan, 1 in a trip", ADDED, False),
    ("hsdp", "prefetch 1, 2 in a trip, at once", ADDED, True),
    ("hsdp", "prefetch 2, 1 in a trip, one late", ADDED, False),
    ("ddp", "prefetch 2, 2 in a trip, one late", INSIDE, False),
    ("zero1", "scan, 1 in a trip", INSIDE, False),
    ("zero1", "prefetch 2, 2 in a trip, one late", BEHIND, False),
    ("hsdp, updated over replicas too", "prefetch 2, 2 in a trip, one late", ADDED, False),
    ("hsdp with a tensor axis", "prefetch 2, 2 in a trip, one late", INSIDE, False),
    ("hsdp, a matrix and a vector frozen", "prefetch 2, 2 in a trip, one late", ADDED, False),
}
CI = {
    ("hsdp", "scan, 2 in a trip", ADDED, False),
    ("hsdp", "prefetch 1, 1 in a trip, one late", ADDED, True),
    ("ddp", "scan, 1 in a trip", ADDED, False),
    ("ddp", "prefetch 2, 2 in a trip, one late", BEHIND, False),
    ("hsdp", "prefetch 2, 2 in a trip, one late", BEHIND, False),
    ("zero1", "prefetch 2, 2 in a trip, one late", ADDED, False),
    ("hsdp, updated over replicas too", "scan, 1 in a trip", INSIDE, False),
    ("hsdp with a tensor axis", "scan, 1 in a trip", ADDED, False),
    ("hsdp, a matrix and a vector frozen", "scan, 1 in a trip", ADDED, False),
}


def _in_tiers():
    """All cases: some in the plain tier, some in that of CI, the others in that of releases."""
    cases = [(*case, skip) for case in CASES for skip in _skips(*case)]
    assert {*cases} >= PLAIN | CI
    for case in cases:
        mark = () if case in PLAIN else pytest.mark.ci if case in CI else pytest.mark.release
        yield pytest.param(*case, marks=mark)


def _skips(name, loop, when):
    """Returns True if the ends of the loop are skipped: both where that is most of what differs."""
    return (False, True) if (name, when) == ("hsdp", ADDED) and LOOPS[loop][1] else (False,)


@cache
def _arrays():
    """Weights; gradients that microbatches before have left; inputs; and the slope of the loss by the outputs."""
    draw = partial(np.random.default_rng(0).normal, scale=0.3)  # small third derivatives
    weights, before = (
        {name: draw(size=[SIZES[d] for d in dimensions]) for name, dimensions in DIMENSIONS.items()} for _ in range(2)
    )
    return weights, before, *draw(size=(2, NUM_SEQUENCES, SIZES["E"]))


def _numpy_loss(arrays, slope):
    x, auxiliary = arrays["x"], 0.0
    for index in range(SIZES["L"]):
        scale, up, down = (arrays[name][index] for name in DIMENSIONS)
        hidden = np.sin((x * scale + 0.5 * index) @ up)
        x, auxiliary = x + hidden @ down, auxiliary + PENALTY * (index + 1) * (hidden**2).sum()
    return (x * slope).sum() + auxiliary


@cache
def _differences():
    """The gradient of the loss by each weight, and by the inputs."""
    weights, _, x, slope = _arrays()
    arrays = {**weights, "x": x}
    found = {name: np.zeros_like(array) for name, array in arrays.items()}
    for name, array in arrays.items():
        for place in np.ndindex(array.shape):
            losses = []
            for step in (STEP, -STEP):
                moved = array.copy()
                moved[place] += step
                losses.append(_numpy_loss(arrays | {name: moved}, slope))
            found[name][place] = (losses[0] - losses[1]) / (2 * STEP)
    return found


def _layer(weights, shared, index, x):
    hidden = jnp.sin((x * weights["scale_E"] + shared * index) @ weights["up_EM"])
    loss = (index + 1) * jnp.sum(jnp.square(hidden))
    return x + hidden @ weights["down_ME"], Aux({"penalty": PENALTY * loss}, {"half": jnp.sum(hidden) / 2})


IN_FLOAT64 = Encoding("float64", "float64", "float64")


def _gradients(layout, loop, when, skip_boundary_collectives):
    """Returns the computation of gradients: of the weights, in the layout of the update, and of the inputs."""
    stored, updated = (
        {name: PartitionSpec(*map(axes.get, dimensions)) for name, dimensions in DIMENSIONS.items()}
        for axes in (layout.stored, layout.updated)
    )
    others = tuple(axis for axis in layout.mesh if axis not in BATCH_AXES)
    roles = AxisRoles(sequence=BATCH_AXES, length=(), stage=(), partitioner=others)
    plans = {
        name: plan_weight(name, stored[name], stored[name], updated[name], roles, is_stacked=True, encoding=IN_FLOAT64)
        for name in DIMENSIONS
    }
    if plans["scale_E"].gathered:
        plans["scale_E"] = replace(plans["scale_E"], use="hoisted")
    plans |= {name: frozen(plans[name]) for name in layout.frozen}
    trained = [name for name in plans if name not in layout.frozen]
    reduction = Reduction(jnp.float64, "float64", is_last=when != BEHIND)

    def local(weights, before, x, slope):
        accumulators = {
            name: gradient_accumulator(weights[name], plans[name], reduction, layout.num_devices) for name in plans
        }
        added = {name: before[name] * (1.0 + jax.lax.axis_index(layout.alone)) for name in trained}
        added |= dict.fromkeys(layout.frozen)

        def loss(accumulators, x):
            layers = Weights(accumulators, added if when == ADDED else None, weights, plans, reduction)
            stack = StackFunctions("layers", SIZES["L"], _layer, jax.checkpoint_policies.nothing_saveable)
            scan, prefetch = (
                partial(scan_layers, unroll=loop.unroll),
                partial(prefetch_layers, loop=loop, skip_boundary_collectives=skip_boundary_collectives),
            )
            run = prefetch if loop.prefetch else scan
            x, aux = run(stack, hoist(layers), jnp.array(0.5), x)
            assert {aux.losses["penalty"].shape, aux.statistics["half"].shape} == {(SIZES["L"],)}
            return (x * slope).sum() + aux.losses["penalty"].sum()

        grads, dx = jax.grad(loss, (0, 1))(accumulators, x)
        if when == BEHIND:
            grads = {name: reduce_gradient(grads[name], plans[name], reduction) for name in trained}
        return {name: grads[name] for name in trained}, dx

    rows = PartitionSpec(BATCH_AXES)
    manual_stored, manual_updated = (
        {name: keep_axes(spec, BATCH_AXES) for name, spec in specs.items()} for specs in (stored, updated)
    )
    split = jax.shard_map(
        local,
        in_specs=(manual_stored, manual_stored, rows, rows),
        out_specs=({name: manual_updated[name] for name in trained}, rows),
        axis_names=set(BATCH_AXES),
        check_vma=False,
    )
    types = (AxisType.Auto,) * len(layout.mesh)
    mesh = jax.make_mesh(tuple(layout.mesh.values()), tuple(layout.mesh), axis_types=types)
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (stored, stored, rows, rows))
        return Computation(split, *jax.device_put(_arrays(), shardings))


@pytest.mark.cases(plain=4)
@pytest.mark.parametrize(("name", "loop", "when", "skip_boundary_collectives"), list(_in_tiers()), ids=str)
def test_gradients_are_finite_differences(name, loop, when, skip_boundary_collectives, proof):
    layout, (unroll, distance, deferred) = LAYOUTS[name], LOOPS[loop]
    chosen = LayerLoop(
        unroll=unroll,
        batch_split=1,
        prefetch=distance,
        deferred_reduce_scatter=deferred,
        reduce_in_backward=when != BEHIND,
    )
    with jax.enable_x64(True):
        computation = _gradients(layout, chosen, when, skip_boundary_collectives)
        if proof.is_known(computation.parts):
            return
        grads, dx = jax.tree.map(np.asarray, computation.run())
    copies = layout.num_devices(layout.alone)
    before = copies * (copies + 1) / 2 if when == ADDED else 0  # 1 + 2 + ... along these devices
    expected = {name: _differences()[name] + before * _arrays()[1][name] for name in DIMENSIONS}
    assert set(grads) == set(DIMENSIONS) - set(layout.frozen)
    for weight, ours in {**grads, "x": dx}.items():
        assert ours.dtype == np.float64
        wanted = _differences()["x"] if weight == "x" else expected[weight]
        np.testing.assert_allclose(ours, wanted, rtol=1e-7, atol=1e-7, err_msg=weight)


def _moved_both_ways(mesh, dimension, tile_rows):
    """Gathers a sharded matrix, and reduce-scatters what each device has made of it, over the axis "fsdp"."""
    parts, spec = ((dimension, ("fsdp",)),), PartitionSpec(*[None] * dimension, "fsdp")

    def local(w, x):
        whole = gather_dims(w, parts, tile_rows)
        return whole, scatter_dims((x.T @ x @ whole).astype(jnp.float32), parts, tile_rows)

    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(spec, PartitionSpec("fsdp")), out_specs=(PartitionSpec(), spec), check_vma=False
        )
    )


@pytest.mark.parametrize(
    ("shape", "dimension", "as_whole_tiles"),
    [((40, 256), 0, True), ((256, 40), 1, True), ((64, 256), 0, False), ((40, 192), 0, False), ((192, 40), 1, False)],
)
def test_rows_that_are_no_whole_tiles_are_the_same_however_they_are_moved(shape, dimension, as_whole_tiles):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    draw = np.random.default_rng(0).integers
    arrays = [draw(-3, 4, size=size).astype(np.float32) for size in (shape, (16, shape[0]))]  # all sums are exact
    plain, tiled = (_moved_both_ways(mesh, dimension, tile_rows) for tile_rows in (1, 8))
    for ours, wanted in zip(tiled(*arrays), plain(*arrays), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    assert ("f32[40,2,128]" in str(jax.make_jaxpr(tiled)(*arrays))) == as_whole_tiles


@pytest.mark.ci
@pytest.mark.tpu
@pytest.mark.parametrize(("tile_rows", "kind"), [(1, "all-reduce"), (8, "reduce-scatter")])
def test_a_tpus_compiler_all_reduces_padded_rows(tile_rows, kind):
    """Shards of 28 rows, in tiles of 8. So a compiler that no longer does it is noticed, too."""
    target = target_of("v6e-16")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:4x4").devices
    mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=rows) for shape in ((448, 2048), (4096, 448))]
    options: dict[str, Any] = dict(plan_preset_options(("sparse_core",), target))
    known = {name: options[name] for name in options.keys() - refused_options(options, devices[0]).keys()}
    compiled = _moved_both_ways(mesh, 0, tile_rows).lower(*shapes).compile(known)
    found = set(re.findall(r" (all-reduce|reduce-scatter)\(", compiled.as_text() or ""))
    assert found == {kind}
