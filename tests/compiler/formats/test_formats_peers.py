"""NF4 as bitsandbytes, which QLoRA's authors publish, writes and reads it."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.compiler.formats.block import ELEMENTS, SCALES, BlockFormat
from meshloom.compiler.formats.dynamic8 import dynamic8_levels
from meshloom.compiler.formats.nf4 import nf4_levels

torch = pytest.importorskip("torch", reason="pip install -e '.[peers]'")
bnb = pytest.importorskip("bitsandbytes.functional", reason="pip install -e '.[peers]'")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

NF4 = BlockFormat("nf4", (1, 64))
W = np.random.default_rng(0).normal(0, 0.02, (96, 1024)).astype(np.float32)


@pytest.fixture(scope="module")
def theirs():
    """A matrix in NF4 with blocks of 64, with scales in float32."""
    return bnb.quantize_4bit(torch.from_numpy(W), blocksize=64, quant_type="nf4", compress_statistics=False)


def test_the_levels_are_those_of_the_published_tables():
    np.testing.assert_allclose(nf4_levels(), bnb.get_4bit_type("nf4", device="cpu"), rtol=0, atol=2e-7)
    np.testing.assert_allclose(dynamic8_levels(), bnb.create_dynamic_map(), rtol=0, atol=1e-7)


def test_elements_scales_and_values_are_the_same(theirs):
    packed, state = theirs
    ours = NF4.encode(jnp.asarray(W))
    first, second = packed.numpy().ravel() >> 4, packed.numpy().ravel() & 15  # of a byte, the high half comes first
    elements = np.stack([first, second], -1).reshape(W.shape)
    np.testing.assert_array_equal(np.asarray(ours[ELEMENTS].astype(jnp.uint8)), elements)
    np.testing.assert_array_equal(np.asarray(ours[SCALES]).ravel(), state.absmax)
    np.testing.assert_allclose(NF4.decode(ours), bnb.dequantize_4bit(packed, state), rtol=1e-6)


def test_double_quantization_is_as_close_in_as_many_bytes():
    """Both have a byte for each scale and a float32 for 256 of them. bitsandbytes subtracts the mean and takes its
    dynamic type; ours are linear, and scales are positive."""
    twice = BlockFormat("nf4", (1, 64), scales_format=BlockFormat("uint8", (256 // 16, 16)))
    packed, state = bnb.quantize_4bit(torch.from_numpy(W), blocksize=64, quant_type="nf4", compress_statistics=True)
    ours = twice.decode(twice.encode(jnp.asarray(W)))
    published = bnb.dequantize_4bit(packed, state).numpy()
    held = packed.numel() + state.absmax.numel() + 4 * state.state2.absmax.numel()
    assert twice.num_bytes(W.shape) == held
    error, expected = (np.linalg.norm(x - W) for x in (np.asarray(ours), published))
    assert error == pytest.approx(expected, rel=1e-3)
