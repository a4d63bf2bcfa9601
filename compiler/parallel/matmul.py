"""Matmuls with a contracted dimension that a mesh axis splits: partial results are summed after the matmul, or in a
ring while they are made (a collective matmul; Wang et al. 2023, doi:10.1145/3567955.3567959).

Each device has a part of what is contracted, and keeps a shard of the result's length. After the matmul that is a
reduce-scatter, which waits for all of it and has nothing beside it. In a ring a device multiplies for one shard after
another, its own last, and adds what has arrived of the shard from the neighbour before it:

    device 2 of 4    part for shard 1   +  part for shard 0   +  part for shard 3   +  part for shard 2
                              |            ^        |            ^        |            ^
                              to 3         from 1   to 3         from 1   to 3         from 1

So a transfer runs beside the next matmul. One half of each shard goes this way around, the other half the other way.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from meshloom.models.contract import matmul

from ..core.format import human_seconds
from ..core.kernels import KernelCall, KernelCost
from ..core.partition_spec import Axes
from ..core.scopes import OperationName, fact_scope, nested_scope
from ..core.traffic import Traffic
from ..sharding.arrays import Operand, OpSite
from ..spec.cost_model import cost_model
from ..spec.overlap_spec import StrategyChoice
from ..target.compiler_options import why_permutes_wait
from .block_scaled import block_scaled_cost, block_scaled_matmul
from .choose import chosen_or_fallback
from .encodings import decoded_weight, encoded_weight
from .operation import Cost, Lowered, OpInputs, OpPlan, ParallelOp, Refusal, Strategy, moved
from .quantized import dot, quantized_matmul

PLAIN, COLLECTIVE_MATMUL = "plain", "collective_matmul"
RING = "ring"  # the fact in a scope: the activation that a matmul sums in a ring
LENGTH = 1  # the dimension of an activation (batch, length, ...)


@dataclass(frozen=True)
class MatmulRing:
    """A collective matmul around the devices of a mesh axis. both_ways: halves of each shard go opposite ways."""

    axis: str
    both_ways: bool


@dataclass(frozen=True)
class _Product:
    """The operands of a matmul, by its subscripts. contracted: the letters of x that are not in the result, of `depth`
    entries together. width: the width of the result for each token. is_ring_shaped: x is contracted over all of its
    dimensions after the length, with the first ones of the weight."""

    letters: str
    contracted: str
    depth: int
    width: int
    is_ring_shaped: bool


def _product(site: OpSite) -> _Product:
    """Returns the product of a site: "btm,me->bte" of (16, 128, 384) and (384, 128) has contracted "m", depth 384,
    width 128, and is ring-shaped."""
    operands, result = site.option("subscripts").split("->")
    x, weight = operands.split(",")
    contracted = "".join(letter for letter in x if letter not in result)
    sizes = dict(zip(x + weight, site.operands[0].shape + site.operands[1].shape, strict=True))
    return _Product(
        letters=x,
        contracted=contracted,
        depth=math.prod(sizes[letter] for letter in contracted),
        width=math.prod(sizes[letter] for letter in result[LENGTH + 1 :]),
        is_ring_shaped=weight.startswith(x[LENGTH + 1 :]) and result == x[: LENGTH + 1] + weight[len(contracted) :],
    )


class MatmulOp(ParallelOp):
    kind = "matmul"
    title = "matmul"
    names = (PLAIN, COLLECTIVE_MATMUL)
    fallback = PLAIN
    beside_compute = MappingProxyType({COLLECTIVE_MATMUL: cost_model().ring_matmul_passes})

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        x, split_over = site.operands[0].activation, _split_over(site, inputs)
        if not split_over:
            what = f"'{x}'" if x else "an array without a name"
            refusal = f"no mesh axis splits what {what} is contracted over"
            ring = Strategy(COLLECTIVE_MATMUL, "", refusal=Refusal(refusal))
            return ring, Strategy(PLAIN, "on each device by itself", is_trivial=True)
        over = " and ".join(split_over)
        plain = Strategy(PLAIN, f"partial results summed over {over} after the matmul", None, _summed(site, inputs))
        if refusal := _refusal(site, inputs, split_over):
            return Strategy(COLLECTIVE_MATMUL, f"summed in a ring over {over}", refusal=Refusal(refusal)), plain
        # A ring costs what does not run beside its matmuls, a plain matmul its reduce-scatter. Where the batch has
        # several parts, only the reduce-scatter of one has nothing beside it.
        axis, mesh, target = split_over[0], inputs.mesh, inputs.target
        n, num_parts, ways = mesh.sizes[axis], inputs.spec.overlap.layers.batch_split, 2 if _both_ways(inputs) else 1
        result_bytes = _result_bytes(site, inputs)
        sent = moved("collective-permute", (axis,), n, result_bytes // n // ways, num_parts * (n - 1) * ways, "forward")
        what = f"partial results summed in a ring over {axis}"
        ring = Strategy(COLLECTIVE_MATMUL, what, MatmulRing(axis, ways == 2), (sent,))
        if objection := why_permutes_wait(target):
            return replace(ring, refusal=Refusal(objection, is_hard=False)), plain
        scatter = mesh.alone_seconds("reduce-scatter", result_bytes, (axis,))
        transfer = mesh.alone_seconds("collective-permute", result_bytes / n / 2, (axis,))
        peak, bandwidth = target.peak_flops_per_second, target.hbm_bytes_per_second_per_device
        if scatter is None or transfer is None or peak is None or bandwidth is None:
            return replace(ring, refusal=Refusal("how long its transfers take is not known", is_hard=False)), plain
        tokens, product = inputs.batch.tokens_of_device // num_parts, _product(site)
        multiplied = 2 * (tokens / n) * (product.depth / n) * product.width / peak
        sums = cost_model().ring_matmul_passes * result_bytes / n / bandwidth
        in_ring = num_parts * (n - 1) * (max(0.0, transfer - multiplied) + sums)
        figures = f"{human_seconds(in_ring)} of a ring not beside matmuls, {human_seconds(scatter)} of a reduce-scatter"
        return (
            replace(ring, cost=Cost(in_ring, "seconds"), reason=figures),
            replace(plain, cost=Cost(scatter, "seconds"), reason=figures),
        )

    def multiplied(self, site: OpSite) -> Sequence[Operand]:
        return site.operands[1:]

    def summed_dims(self, site: OpSite) -> tuple[int, ...]:
        operands, result = site.option("subscripts").split("->")
        return tuple(at for at, letter in enumerate(operands.split(",")[1]) if letter not in result)

    def lower(self, plan: OpPlan) -> Lowered | None:
        ring: MatmulRing | None = plan.chosen.parameters
        if plan.precision and (arithmetic := plan.precision.arithmetic):
            if arithmetic.forward.blocks:
                return partial(block_scaled_matmul, arithmetic)
            forward = partial(_dot_in_ring, ring) if ring else dot

            def in_few_bits(x: Array, weight: Any, *, subscripts: str, scales: Array | None = None) -> Array:
                whole, encoded = decoded_weight(weight), encoded_weight(weight)
                options = {"forward": forward, "encoded": encoded, "scales": scales}
                return quantized_matmul(arithmetic, x, whole, subscripts, **options)

            return in_few_bits
        if ring is None:
            return None

        def in_ring(x: Array, weight: Array, **options: Any) -> Array:
            return _matmul_in_ring(x, weight, ring, partial(matmul, **options))

        return in_ring

    def kernel_cost(self, call: KernelCall) -> KernelCost | None:
        return block_scaled_cost(call)

    def candidates(self, plans: Sequence[OpPlan]) -> Sequence[StrategyChoice]:
        return chosen_or_fallback(plans)

    def scope(self, plan: OpPlan) -> str:
        """Returns the scope of a matmul, which has no other name in the compiled program."""
        own = fact_scope(self.kind, plan.site.name)
        return own if plan.chosen.name == PLAIN else nested_scope(own, fact_scope(RING, plan.site.name))

    def source(self, name: OperationName) -> str | None:
        """Returns 'mlp_output, in a ring'. The partitioner's collectives of other matmuls have their activation's
        name."""
        site = name.fact(RING)
        return f"{site}, in a ring" if site else None


def _split_over(site: OpSite, inputs: OpInputs) -> Axes:
    """Returns the mesh axes that split what is contracted, by the layout of the activation that x is."""
    x, product = inputs.activation(site.operands[0].activation), _product(site)
    if x is None:
        return ()
    dimensions = zip(product.letters, x.dimensions, strict=True)
    return tuple(axis for letter, d in dimensions if letter in product.contracted for axis in d.axes)


def _result_length_axes(site: OpSite, inputs: OpInputs) -> Axes:
    """Returns the mesh axes that split the length of the result, by its layout, besides those that split the batch."""
    result = inputs.activation(site.name)
    return tuple(axis for axis in result.dimensions[LENGTH].axes if axis in inputs.roles.partitioner) if result else ()


def _refusal(site: OpSite, inputs: OpInputs, split_over: Axes) -> str | None:
    """Returns why partial results cannot be summed in a ring; None where they can."""
    spec, mesh = inputs.spec, inputs.mesh
    if inputs.why_no_ring:
        return inputs.why_no_ring
    if not _product(site).is_ring_shaped:
        return f"{site.option('subscripts')} does not contract all of x after its length"
    axis, *others = split_over
    kept = _result_length_axes(site, inputs)
    if kept != split_over or others or axis in inputs.roles.tokens:
        where = f"split over {' and '.join(kept)}" if kept else "whole"
        return f"partial results are on {' and '.join(split_over)}, and the length of their sum is {where}"
    sequences = inputs.batch.sequences_of_device // spec.overlap.layers.batch_split
    length = inputs.batch.length_of_device // mesh.sizes[axis]
    if _both_ways(inputs) and sequences % 2 and length % 2:
        return f"neither {sequences} (sequences) nor {length} (tokens of each in a shard) is even"
    return None


def _both_ways(inputs: OpInputs) -> bool:
    return not inputs.target.compiler.unordered_collectives


def _result_bytes(site: OpSite, inputs: OpInputs) -> int:
    """Returns the bytes of the result for one part of the batch on a device, in the compute type, with its length
    whole."""
    itemsize = jnp.dtype(inputs.spec.precision.compute).itemsize
    tokens = inputs.batch.tokens_of_device // inputs.spec.overlap.layers.batch_split
    return tokens * _product(site).width * itemsize


def _summed(site: OpSite, inputs: OpInputs) -> tuple[Traffic, ...]:
    """Returns the collective of a plain matmul, once for each part of the batch."""
    split_over = _split_over(site, inputs)
    is_scattered = set(split_over) <= set(_result_length_axes(site, inputs))
    kind = "reduce-scatter" if is_scattered else "all-reduce"
    num_parts, group_size = inputs.spec.overlap.layers.batch_split, inputs.mesh.num_shards(split_over)
    return (moved(kind, split_over, group_size, _result_bytes(site, inputs), num_parts, "forward"),)


def _matmul_in_ring(x: Array, weight: Array, ring: MatmulRing, plain: Callable[[Array, Array], Array]) -> Array:
    """Returns the result in shards of its length. Backward it is a plain matmul: its gradient arrives whole."""
    summed = _summed_in_ring(ring, plain)

    @jax.custom_vjp
    def use(x: Array, weight: Array) -> Array:
        return summed(x, weight)

    def backward(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
        return jax.vjp(plain, *operands)[1](gradient)

    use.defvjp(lambda *operands: (summed(*operands), operands), backward)
    return use(x, weight)


def _dot_in_ring(ring: MatmulRing, x: Array, weight: Array, subscripts: str, dtype: Any) -> Array:
    """Returns `dot` in shards of its length, without a gradient."""
    return _summed_in_ring(ring, lambda x, weight: dot(x, weight, subscripts, dtype))(x, weight)


def _summed_in_ring(ring: MatmulRing, multiply: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    axis = ring.axis
    return jax.shard_map(
        lambda x, weight: ring_reduce_scatter(x, weight, axis, multiply, both_ways=ring.both_ways),
        in_specs=(PartitionSpec(None, None, axis), PartitionSpec(axis)),
        out_specs=PartitionSpec(None, axis),
        axis_names={axis},
        check_vma=False,
    )


def ring_reduce_scatter(
    x: Array, weight: Array, axis: str, multiply: Callable[[Array, Array], Array], *, both_ways: bool
) -> Array:
    """Returns what `multiply` gives for this device's shard of the length, summed over the devices of a mesh axis.

    x: (B, T, *K), weight: (*K, E), this device's part of what is contracted. Returns (B, T / n, E) of n devices.
    both_ways: halves of each shard, of its sequences or else of its tokens, go around in opposite ways at once.
    """
    n, here, length = jax.lax.axis_size(axis), jax.lax.axis_index(axis), x.shape[LENGTH] // jax.lax.axis_size(axis)
    halved = LENGTH if x.shape[0] % 2 else 0

    def part(shard: Array, half: int | None) -> Array:
        of_shard = jax.lax.dynamic_slice_in_dim(x, shard % n * length, length, LENGTH)
        of_shard = of_shard if half is None else jnp.split(of_shard, 2, halved)[half]
        return multiply(of_shard, weight)

    def around(way: int, half: int | None) -> Array:
        neighbours = [(device, (device + way) % n) for device in range(n)]
        total = part(here - way, half)
        for step in range(2, n + 1):
            total = jax.lax.ppermute(total, axis, neighbours) + part(here - step * way, half)
        return total

    if not both_ways:
        return around(1, None)
    return jnp.concatenate([around(1, 0), around(-1, 1)], halved)
