"""Parts of the decoder against their formulas in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.models import Context, build_piece
from meshloom.models.attention import Mask
from meshloom.models.decoder import rope_of, rounds
from meshloom.models.family_configs import DecoderConfig, LinearScaling, Llama3Scaling, YarnScaling
from meshloom.models.parts import Norm, Rope, rotate

EPSILON = 0.1
NORMS = {
    "rms": lambda x, w: x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * w["scale_E"],
    "rms_zero_centered": lambda x, w: x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * (1 + w["scale_E"]),
    "layer": lambda x, w: (
        (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON) * w["scale_E"] + w["bias_E"]
    ),
}


class NormPiece(Norm):
    """A norm that is called as every piece of a model is."""

    def __call__(self, x, context):  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__call__(x)


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_its_formula_in_float64(kind):
    piece = build_piece(lambda _: NormPiece(kind, 8, axis="embed", epsilon=EPSILON))
    draw = np.random.default_rng(0).normal
    weights, x = {name: draw(size=8) for name in piece.abstract}, draw(1.0, 2.0, size=(3, 5, 8))
    ours = piece.apply(jax.tree.map(np.float32, weights), np.float32(x), None)
    np.testing.assert_allclose(ours, NORMS[kind](x, weights), rtol=1e-5, atol=1e-6)
    fresh = {"scale_E": np.float64(kind != "rms_zero_centered"), "bias_E": 0.0}  # without an effect
    ours = piece.apply(piece.init(jax.random.key(0)), np.float32(x), None)
    np.testing.assert_allclose(ours, NORMS[kind](x, fresh), rtol=1e-5, atol=1e-6)


def wavelengths(scaling, half=32, theta=10_000.0):
    """Returns what heads of size 2 * half turn by, as a float64 array, from one position to the next."""
    unit = jnp.concatenate([jnp.ones((1, 1, 1, half)), jnp.zeros((1, 1, 1, half))], axis=-1)
    turned = np.asarray(rotate(unit, jnp.ones((1, 1), jnp.int32), Rope(theta, scaling)), np.float64).reshape(2, half)
    return 2 * np.pi / np.arctan2(turned[1], turned[0]), np.hypot(*turned)


PLAIN = 2 * np.pi * 10_000.0 ** (np.arange(32) / 32)


def test_long_rotary_wavelengths_are_stretched_and_short_ones_stay():
    """Wavelengths below 64 / 4 tokens stay, those above 64 / 1 are 8 times as long, and others lie between."""
    factors = {"factor": 8.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0}
    scaling = Llama3Scaling(kind="llama3", **factors, original_length=64)
    np.testing.assert_allclose(wavelengths(None)[0], PLAIN, rtol=1e-3)
    stretch = wavelengths(scaling)[0] / PLAIN
    short, long = PLAIN < 16, PLAIN > 64
    assert min(short.sum(), long.sum(), (~short & ~long).sum()) >= 3
    np.testing.assert_allclose(stretch[short], 1, rtol=1e-3)
    np.testing.assert_allclose(stretch[long], 8, rtol=1e-3)
    between = stretch[~short & ~long]
    assert (np.diff(between) > 0).all()


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_stretches_by_the_turns_over_the_original_length(truncate):
    """Dimensions that turn 32 times or more over 4,096 tokens stay, those that turn less than once are 40 times as
    long. In the dimensions between, frequencies go from one to the other on a line."""
    yarn = {"factor": 40.0, "original_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": truncate}
    stretched, length = wavelengths(YarnScaling(kind="yarn", **yarn, mscale=1.0, mscale_all_dim=0.0))
    np.testing.assert_allclose(length, 1 + 0.1 * np.log(40), rtol=1e-5)  # the paper's factor
    turns, slow = 4096 / PLAIN, PLAIN / stretched
    fast, long = turns >= 32, turns < 1
    fast, long = (np.roll(fast, -1) & fast, np.roll(long, 1) & long) if truncate else (fast, long)
    np.testing.assert_allclose(slow[fast], 1, rtol=1e-3)
    np.testing.assert_allclose(slow[long], 1 / 40, rtol=2e-2)
    between = slow[~fast & ~long]
    assert len(between) > 8
    np.testing.assert_allclose(np.diff(between[1:-1]), np.diff(between[1:-1]).mean(), rtol=5e-2)


def test_both_factors_of_yarn_are_those_of_deepseek():
    """With equal factors turned heads keep their length, and scores are multiplied by their square."""
    yarn = {"factor": 40.0, "original_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    scaling = YarnScaling(kind="yarn", **yarn, mscale=0.707, mscale_all_dim=0.707)
    np.testing.assert_allclose(wavelengths(scaling)[1], 1, rtol=1e-5)
    assert Rope(1e4, scaling).factor_of_scores == pytest.approx((1 + 0.0707 * np.log(40)) ** 2)


def test_layers_with_a_window_have_a_base_of_their_own():
    config = spec_of("model=gemma3_4b", "target=cpu-8").model
    assert isinstance(config, DecoderConfig)
    assert rope_of(config, Mask(1024)) == Rope(10_000.0)
    assert rope_of(config, Mask()) == Rope(1e6, LinearScaling(kind="linear", factor=8.0))
    np.testing.assert_allclose(wavelengths(LinearScaling(kind="linear", factor=8.0))[0], 8 * PLAIN, rtol=2e-3)


@pytest.mark.parametrize(
    ("windows", "num_layers"),
    [((5, 5, None), 8), ((5, 5, None), 2), ((5, None, 7), 8), ((5, None), 4), ((5,), 3), ((5, 7, None), 2)],
)
def test_windows_repeat_over_all_layers(windows, num_layers):
    """Against a loop over the layers; no stack is empty, and no name is twice there."""
    stacks = rounds(tuple(map(Mask, windows)), num_layers)
    found = [mask.window for _, group, times in stacks for _ in range(times) for mask in group]
    assert found == [windows[i % len(windows)] for i in range(num_layers)]
    assert [name for name, *_ in stacks] == ["layers", "rest_layers"][: len(stacks)]


def test_matrices_start_with_the_declared_deviation():
    """Those that write to the residual stream, of which there are two in each of 8 layers, with a quarter of it."""
    model = plan_of("target=cpu-1", "model.num_layers=8", "model.initializer_stddev=0.2").model
    made = model.init(jax.random.key(0))
    flat = {path[-1].key: np.asarray(x, np.float64) for path, x in jax.tree_util.tree_leaves_with_path(made)}
    matrices = {name: x for name, x in flat.items() if name != "scale_E"}
    assert len(matrices) == 9
    for name, x in matrices.items():
        expected = 0.2 / 16**0.5 if name in ("out_HDE", "down_ME") else 0.2
        assert x.std() == pytest.approx(expected, rel=0.05), name
        assert abs(x.mean()) < 0.05 * expected, name


def test_a_head_caps_its_logits():
    plain, capped = (plan_of("target=cpu-1", f"model.logit_soft_cap={cap}").model for cap in ("null", "1.5"))
    context = Context(jnp.arange(4)[None], lambda name, x, *axes, **_: x)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 32)), jnp.float32)
    params = plain.init(jax.random.key(0))["head"]
    logits, ours = (np.asarray(model.head.apply(params, x, context), np.float64) for model in (plain, capped))
    assert np.abs(logits).max() > 2
    np.testing.assert_allclose(ours, 1.5 * np.tanh(logits / 1.5), rtol=1e-5, atol=1e-6)


def test_factors_of_wavelengths_that_are_exchanged_are_an_error():
    with pytest.raises(ConfigError) as error:
        spec_of("model=llama3_405b", "target=cpu-8", "model.rope_scaling.low_frequency_factor=8")
    (problem,) = error.value.problems
    assert problem.where == "model.rope_scaling.low_frequency_factor"
