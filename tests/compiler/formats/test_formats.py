"""EncodedArray arrays against float64 NumPy: each element is the nearest of its type, each scale that of its block."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from meshloom.compiler.formats import element
from meshloom.compiler.formats.block import ELEMENTS, SCALES, BlockFormat, cut_blocks, per_channel, per_tensor
from meshloom.compiler.formats.element import ElementFormat, element_formats, register_element

RNG = np.random.default_rng(0)


def normal_quantile(p):
    """The quantile of a standard normal distribution, by bisection of its integral."""
    low, high = np.full_like(p, -9.0), np.full_like(p, 9.0)
    erf = np.vectorize(math.erf)
    for _ in range(200):
        middle = (low + high) / 2
        is_above = 0.5 * (1 + erf(middle / np.sqrt(2))) > p
        low, high = np.where(is_above, low, middle), np.where(is_above, middle, high)
    return (low + high) / 2


def float_levels(exponent_bits, mantissa_bits, bias, largest):
    """All magnitudes of a small floating-point type, by the definition of IEEE 754."""
    found = set()
    for exponent, mantissa in itertools.product(range(2**exponent_bits), range(2**mantissa_bits)):
        fraction = mantissa / 2**mantissa_bits
        found.add(fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(sorted(x for x in found if x <= largest))


def dynamic_levels():
    """bitsandbytes' signed dynamic map, from its description: 2^e middles in each decade."""
    positive = []
    for e in range(7):
        edges = 0.1 + 0.9 * np.arange(2**e + 1) / 2**e
        positive += list((edges[:-1] + edges[1:]) / 2 * 10.0 ** (e - 6))
    return np.array(sorted([-x for x in positive] + positive + [0.0, 1.0]))


def nf4_levels():
    outermost = (31 / 32 + 29 / 30) / 2
    above = normal_quantile(np.linspace(outermost, 0.5, 9)[:-1])
    below = -normal_quantile(np.linspace(outermost, 0.5, 8)[:-1])
    return np.sort(np.concatenate([below, [0.0], above])) / above[0]


def mirrored(x):
    return np.unique(np.concatenate([-x, x]))


LEVELS = {
    "int8": np.arange(-127, 128.0),
    "int4": np.arange(-7, 8.0),
    "uint8": np.arange(0, 256.0),
    "float8_e4m3fn": mirrored(float_levels(4, 3, 7, 448)),
    "float8_e5m2": mirrored(float_levels(5, 2, 15, 57344)),
    "float4_e2m1fn": mirrored(float_levels(2, 1, 1, 6)),
    "nf4": nf4_levels(),
    "dynamic8": dynamic_levels(),
    "root4": (np.arange(256) / 255.0) ** 4,
}


def test_every_type_is_tried():
    assert set(LEVELS) == set(element_formats())


@pytest.mark.parametrize("name", LEVELS)
def test_an_element_is_the_nearest_of_its_type(name):
    one, levels = element_formats()[name], LEVELS[name]
    scaled: Any = np.float32(RNG.uniform(-1.1, 1.1, 4000) * one.largest)
    scaled = np.concatenate([scaled, levels, [0.0, one.largest * 9, -one.largest * 9]]).astype(np.float32)
    got = np.asarray(one.decode(one.encode(scaled)), np.float64)
    clipped = np.clip(np.float64(scaled), levels[0], levels[-1])
    # The fourth root is rounded: the nearest in the root, not in the number.
    root = (lambda x: np.maximum(x, 0) ** 0.25) if name == "root4" else lambda x: x
    nearest = np.min(np.abs(root(clipped)[:, None] - root(levels)[None]), axis=1)
    np.testing.assert_allclose(np.abs(root(got) - root(clipped)), nearest, atol=2e-7 * root(one.largest))
    assert np.all(np.min(np.abs(got[:, None] - levels[None]), axis=1) <= 1e-6 * one.largest)


@pytest.mark.parametrize("name", sorted(LEVELS))
def test_the_stored_array_has_the_bits_that_it_says(name):
    one = element_formats()[name]
    stored = np.dtype(getattr(ml_dtypes, one.dtype, one.dtype))
    info = ml_dtypes.finfo(stored) if "float" in one.dtype else ml_dtypes.iinfo(stored)
    assert info.bits == one.bits


FORMATS = [
    per_tensor("int8"),
    per_channel("int8", [0], 2),
    per_channel("float8_e4m3fn", [0], 2),
    BlockFormat("float8_e4m3fn", (16, 32)),
    BlockFormat("nf4", (64, 1)),
    BlockFormat("nf4", (64, 1), "float32", BlockFormat("uint8", (1, 32))),
    BlockFormat("float8_e4m3fn", (1, 32), "power_of_two"),
    BlockFormat("float4_e2m1fn", (1, 32), "power_of_two"),
    BlockFormat("float8_e4m3fn", (64, 32), "power_of_two_above"),
]


@pytest.mark.cases(plain=8)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_an_array_is_read_as_it_was_written(format, lead):
    x: Any = np.float32(RNG.normal(size=(*lead, 128, 64)) * np.exp(RNG.normal(size=(*lead, 1, 64))))
    x[..., :64, 3] = 0.0  # a block of zeros
    encoded = jax.jit(format.encode)(x)
    assert encoded[ELEMENTS].shape == x.shape
    levels: Any = LEVELS[format.element]
    b0, b1 = (size or whole for size, whole in zip(format.block, x.shape[-2:], strict=True))
    got = np.asarray(format.decode(encoded), np.float64)
    for at in np.ndindex(*lead, 128 // b0, 64 // b1):
        block = (*at[:-2], slice(at[-2] * b0, (at[-2] + 1) * b0), slice(at[-1] * b1, (at[-1] + 1) * b1))
        amax = np.abs(np.float64(x[block])).max()
        scale = amax / levels[-1]
        if format.scale == "power_of_two" and amax:
            scale = 2.0 ** (np.floor(np.log2(amax)) - np.floor(np.log2(levels[-1])))
        if format.scale == "power_of_two_above" and amax:
            scale = 2.0 ** np.ceil(np.log2(scale))
        if format.scales_format:  # one of 255 steps of the largest of its row of scales
            row: Any = np.abs(np.float64(x[*at[:-2], block[-2]])).max(axis=0).reshape(2, 32)[at[-1] // 32]
            scale = np.round(amax / row.max() * 255) * row.max() / 255
        wanted: Any = np.clip(np.float64(x[block]) / (scale or 1), levels[0], levels[-1])
        wanted = levels[np.argmin(np.abs(wanted[..., None] - levels), axis=-1)] * scale
        gap = np.max(np.diff(levels)) * scale
        # Where float32 falls on the other side of the middle of two levels, both are equally near.
        apart = np.abs(got[block] - wanted)
        assert np.all((apart <= 1e-5 * amax + 1e-30) | (apart <= gap * 1.001))
        assert np.mean(apart > 1e-5 * amax + 1e-30) < 0.01


@pytest.mark.cases(plain=4)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_bytes_are_those_of_the_arrays(format):
    encoded = format.encode(jnp.ones((3, 128, 64)))
    bits = {"nf4": 4, "float4_e2m1fn": 4}.get(format.element, 8)
    scales = jax.tree.leaves(encoded[SCALES])
    assert format.num_bytes((3, 128, 64)) == 3 * 128 * 64 * bits // 8 + sum(x.nbytes for x in scales)


def test_nothing_overflows_in_silence():
    x = jnp.asarray([[1.0, jnp.inf], [jnp.nan, 2.0]])
    back = np.asarray(per_channel("float8_e4m3fn", [], 2).decode(per_channel("float8_e4m3fn", [], 2).encode(x)))
    assert np.isfinite(back).tolist() == [[True, False], [False, True]]


@pytest.mark.cases(plain=4)
@pytest.mark.parametrize("format", [each for each in FORMATS if not each.scales_format], ids=str)
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_the_block_of_a_number_that_is_not_finite_is_not_either(format, number):
    back = np.asarray(format.decode(format.encode(jnp.ones((128, 64)).at[3, 5].set(number))))
    assert not np.isfinite(back[3, 5])
    assert np.sum(~np.isfinite(back)) == math.prod(format.block_sizes(back.shape))


def test_rounding_at_random_has_no_bias():
    format = per_tensor("int8", 1)
    x = jnp.concatenate([jnp.full(40_000, 0.3), jnp.full(40_000, -0.3), jnp.asarray([127.0])])
    back = np.asarray(format.decode(format.encode(x, key=jax.random.key(0))))
    assert set(np.round(back[:-1], 4)) == {-1.0, 0.0, 1.0}
    spread = np.sqrt(0.3 * 0.7 / 40_000)
    assert abs(back[:40_000].mean() - 0.3) < 5 * spread
    assert abs(back[40_000:-1].mean() + 0.3) < 5 * spread


def test_blocks_over_devices_share_the_largest_of_all():
    format = per_channel("int8", [0], 2)
    x: Any = RNG.normal(size=(64, 8)).astype(np.float32)
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    spec = PartitionSpec("fsdp")

    def on_shard(shard):
        return format.encode(shard, over_devices=lambda amax: jax.lax.pmax(amax, "fsdp"))

    specs = {ELEMENTS: spec, SCALES: PartitionSpec()}
    split = jax.jit(jax.shard_map(on_shard, mesh=mesh, in_specs=spec, out_specs=specs))(x)
    for got, wanted in zip(jax.tree.leaves(split), jax.tree.leaves(format.encode(x)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_block_that_a_shard_would_cut_is_named():
    format = BlockFormat("nf4", (64, 1))
    assert cut_blocks(format, (256, 64), (4, 8)) == []
    assert cut_blocks(format, (256, 64), (8, 1)) == ["dimension 0 of 256 over 8 devices leaves 32, and a block has 64"]
    assert cut_blocks(per_tensor("int8"), (256, 64), (8, 1)) == []  # the largest is taken over the devices


def test_a_type_from_elsewhere_is_one_class():
    @register_element
    class Ternary(ElementFormat):
        name, dtype, bits, largest = "ternary_of_a_test", "int8", 8, 1.0

        def encode(self, scaled, key=None):  # noqa: ARG002
            return jnp.round(self.clipped(scaled)).astype(self.dtype)

        def decode(self, elements):
            return elements.astype(jnp.float32)

    try:
        format = per_tensor("ternary_of_a_test")
        back = format.decode(format.encode(jnp.asarray([[3.0, -2.0], [0.5, -3.0]])))
        np.testing.assert_array_equal(back, [[3.0, -3.0], [0.0, -3.0]])
        with pytest.raises(ValueError, match="registered already"):
            register_element(type("Other", (Ternary,), {}))
    finally:
        element._ELEMENTS.pop("ternary_of_a_test")
