"""Matmuls in blocks that share a scale: their products and gradients, where they run, and what they cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.formats.block import ELEMENTS, SCALES
from meshloom.compiler.formats.operands import operand_formats
from meshloom.compiler.parallel.block_scaled import block_scaled_matmul, repeated_scales
from meshloom.compiler.parallel.quantized import Arithmetic
from meshloom.compiler.target.topology import find_devices

MXFP8 = operand_formats()["mxfp8"]
WIDTHS = ("model.num_layers=2", "model.embed_dim=512", "model.num_heads=4", "model.num_kv_heads=2",
          "model.head_dim=128", "model.mlp_dim=1024", "global_batch_size=8", "sequence_length=512",
          "sharding=fsdp")  # fmt: skip
SHAPES = {"bte,ehd->bthd": ((2, 64, 256), (256, 3, 128)), "bthd,hde->bte": ((1, 128, 3, 128), (3, 128, 256))}
TILES = ("fp8_blockwise", "fp8_blockwise_ue8m0")
REAL = {"mxfp8": ("f8E4M3FN", "f8E8M0FNU"), "fp8_blockwise_ue8m0": ("f8E4M3FN", "f8E8M0FNU"),
        "nvfp4": ("f4E2M1FN", "f8E4M3FN")}  # fmt: skip


def _arithmetic(name: str = "mxfp8", *, emulated: bool = True, tokens: tuple[str, ...] = ()) -> Arithmetic:
    format = operand_formats()[name]
    return Arithmetic(format, format, rounds_at_random=False, emulated=emulated, tokens=tokens)


def _e4m3(x: np.ndarray) -> np.ndarray:
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-300))), -6) - 3)
    return np.clip(np.round(x / step) * step, -448, 448)


def _nvfp4(x: np.ndarray) -> np.ndarray:
    """(rows, k) as it is read again, by NVIDIA's definition (arXiv:2509.25149, appendix B): one scale for all, with
    which the largest block's own is 448, the largest e4m3; 6 is the largest e2m1."""
    blocks = x.reshape(len(x), -1, 16)
    of_all = np.abs(x).max() / (6 * 448)
    scale = _e4m3(np.abs(blocks).max(-1, keepdims=True) / 6 / of_all) * of_all
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = np.divide(np.abs(blocks), scale, out=np.zeros_like(blocks), where=scale > 0)
    nearest = levels[np.abs(scaled[..., None] - levels).argmin(-1)]
    return (np.sign(blocks) * nearest * scale).reshape(x.shape)


def _scales(amax: np.ndarray, name: str) -> np.ndarray:
    """Of e4m3, whose largest number 448 has the exponent 8. OCP: X = 2^(floor(log2(amax)) - 8), which clips larger
    elements. DeepSeek-V3: amax / 448. UE8M0: the least power of two that clips none."""
    if name == "mxfp8":
        return 2.0 ** (np.floor(np.log2(amax)) - 8)
    exact = amax / 448
    return exact if name == "fp8_blockwise" else 2.0 ** np.ceil(np.log2(exact))


def _rounded(x: np.ndarray, name: str, *, is_weight: bool = False) -> np.ndarray:
    """(rows, k) as it is read again."""
    if name == "nvfp4":
        return _nvfp4(x)
    entries = 32 if name == "mxfp8" else 128
    rows = 128 if is_weight and name != "mxfp8" else 1
    blocks = x.reshape(len(x) // rows, rows, -1, entries)
    scale = _scales(np.abs(blocks).max((1, 3), keepdims=True), name)
    return (_e4m3(blocks / scale) * scale).reshape(x.shape)


def _product(a: np.ndarray, b: np.ndarray, subscripts: str, name: str, *, has_weight: bool = True) -> np.ndarray:
    of_a, of_b, result = subscripts.replace("->", ",").split(",")
    summed = "".join(letter for letter in of_a if letter not in result)
    matrices = []
    for x, letters, is_weight in ((a, of_a, False), (b, of_b, has_weight)):
        kept = "".join(letter for letter in letters if letter in result)
        ordered = np.einsum(f"{letters}->{kept}{summed}", x)
        rows = int(np.prod(ordered.shape[: len(kept)]))
        matrix = _rounded(ordered.reshape(rows, -1), name, is_weight=is_weight)
        matrices.append((kept, ordered.shape[: len(kept)], matrix))
    (kept_a, shape_a, left), (kept_b, shape_b, right) = matrices
    return np.einsum(f"{kept_a}{kept_b}->{result}", (left @ right.T).reshape(*shape_a, *shape_b))


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", *TILES])
@pytest.mark.parametrize("subscripts", SHAPES)
def test_each_product_rounds_its_own_operands_along_what_it_sums(subscripts, name):
    """Against float64; a rounding has the gradient of the identity. Where a scale is no power of two, few numbers may
    be on the other side of a tie in float32: each changes a row or a column of a product."""
    rng = np.random.default_rng(1)
    of_x, of_weight, result = subscripts.replace("->", ",").split(",")
    x, weight = (rng.normal(size=s) * 10.0 ** rng.integers(-3, 2, s) for s in SHAPES[subscripts])
    x, weight = (np.asarray(each, np.float32).astype(np.float64) for each in (x, weight))
    product = jax.jit(lambda x, w: block_scaled_matmul(_arithmetic(name), x, w, subscripts=subscripts))
    y, pull_back = jax.vjp(product, jnp.float32(x), jnp.float32(weight))
    g = np.asarray(rng.normal(size=y.shape), np.float32).astype(np.float64)
    found = (y, *pull_back(jnp.float32(g)))
    expected = (
        _product(x, weight, subscripts, name),
        _product(g, weight, f"{result},{of_weight}->{of_x}", name),
        _product(g, x, f"{result},{of_x}->{of_weight}", name, has_weight=False),
    )
    for ours, theirs in zip(found, expected, strict=True):
        apart = np.abs(ours - theirs) > 2e-6 * np.abs(theirs).max()
        assert np.mean(apart) <= (0.005 if name in ("fp8_blockwise", "nvfp4") else 0.0)


def test_tiles_are_read_as_a_gpu_reads_them():
    """XLA takes a power of two for each 32 entries of a row: those of tiles are repeated."""
    x, weight = (jax.random.normal(jax.random.key(at), (256, 384)) for at in range(2))
    format = operand_formats()["fp8_blockwise_ue8m0"]
    for matrix, blocks in ((x, format.of_matrix()), (weight, format.of_matrix(is_weight=True))):
        encoded = blocks.encode(matrix)
        repeated = {ELEMENTS: encoded[ELEMENTS], SCALES: repeated_scales(blocks, encoded[SCALES])}
        mxfp8 = MXFP8.of_matrix()
        assert repeated[SCALES].shape == mxfp8.scales_shape(matrix.shape)
        np.testing.assert_array_equal(mxfp8.decode(repeated), blocks.decode(encoded))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_blocks_are_the_same_over_a_mesh(name):
    """A block is within the tokens of a device. What the blocks of an operand share comes from all devices."""
    x, weight = (jax.random.normal(jax.random.key(at), shape) for at, shape in enumerate(((4, 32, 64), (64, 96))))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    x = x * jnp.array([1.0, 3.0, 0.1, 20.0])[:, None, None]  # the largest number is another one on each device

    def gradients(x: jax.Array, weight: jax.Array, tokens: tuple[str, ...] = ()) -> tuple[jax.Array, jax.Array]:
        how = _arithmetic(name, tokens=tokens)
        return jax.grad(lambda *o: jnp.sum(jnp.sin(block_scaled_matmul(how, *o, subscripts="bte,em->btm"))),
                        (0, 1))(x, weight)  # fmt: skip

    def on_device(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        dx, dw = gradients(x, jax.lax.pcast(weight, ("data",), to="varying"), ("data",))
        return dx, jax.lax.psum(dw, "data")

    spec = PartitionSpec("data")
    over_mesh = jax.shard_map(on_device, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=(spec, PartitionSpec()))
    for ours, theirs in zip(jax.jit(over_mesh)(x, weight), jax.jit(gradients)(x, weight), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def _lowered(name: str):
    def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(block_scaled_matmul(_arithmetic(name, emulated=False), x, weight, subscripts="bte,em->btm"))

    shapes = (jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 384), jnp.bfloat16))
    return jax.jit(jax.grad(loss, (0, 1))).trace(*shapes)


@pytest.mark.parametrize("name", REAL)
def test_a_gpu_is_given_elements_and_scales(name):
    text = _lowered(name).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "__op$block_scaled_dot" in line]
    assert len(calls) == 2, "the gradients; the loss does not read the result"
    assert all(line.count(f"x{dtype}>") == 2 for line in calls for dtype in REAL[name])
    assert "dot_general" not in text


@pytest.mark.gpu
@pytest.mark.release
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize(("target", "is_real"), [("b200-1", True), ("gb300-1", True), ("h100-1", False)])
def test_cudnn_multiplies_scales_from_the_declared_capability_on(target, is_real, name):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="pip install -e '.[cuda]'")
    plan = plan_of(f"target={target}", "sharding=ddp")
    (device,) = find_devices(plan.spec.target, plan.target)
    sharding = jax.sharding.SingleDeviceSharding(device)
    dot = jax.jit(lambda x, w: block_scaled_matmul(_arithmetic(name, emulated=False), x, w, subscripts="bte,em->btm"))
    shapes = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for s in ((2, 256, 512), (512, 256)))
    text = dot.lower(*shapes).compile().as_text() or ""
    assert ("__cudnn$blockScaledDot" in text) == is_real


@pytest.mark.ci
@pytest.mark.parametrize("remat", ["none", "save_dots"])
def test_it_is_priced_and_saved_as_a_matmul_in_float8(remat):
    """As fp8: the arithmetic of the layers at the peak of float8, and as many bytes of saved products."""
    plans = [plan_of("target=b200-8", f"precision={name}", f"remat={remat}", *WIDTHS) for name in ("fp8", "mxfp8")]
    fp8, mxfp8 = (estimate_step(plan) for plan in plans)
    layers = [next(part for part in each.roofline if "layers" in part.name) for each in (fp8, mxfp8)]
    assert layers[0].flops == layers[1].flops
    assert layers[0].flops_seconds == pytest.approx(layers[1].flops_seconds)
    assert mxfp8.unknown == ()
    if remat == "save_dots":
        assert mxfp8.memory.activations == pytest.approx(fp8.memory.activations, rel=0.1)


@pytest.mark.ci
def test_each_type_of_blocks_is_priced_at_its_own_peak():
    plans = {name: plan_of("target=b200-8", f"precision={name}", *WIDTHS) for name in ("mxfp8", "nvfp4")}
    peaks = {name: plans["mxfp8"].target.peak_of(name) or 0.0 for name in ("bfloat16", "float8", "float4")}
    gain = {name: 1 / peaks["bfloat16"] - 1 / peaks[of] for name, of in (("mxfp8", "float8"), ("nvfp4", "float4"))}
    saved = {name: plan.work.saved_seconds for name, plan in plans.items()}
    assert saved["nvfp4"] / saved["mxfp8"] == pytest.approx(gain["nvfp4"] / gain["mxfp8"])
    layers = {name: next(part for part in estimate_step(plan).roofline if "layers" in part.name)
              for name, plan in plans.items()}  # fmt: skip
    assert layers["nvfp4"].flops == layers["mxfp8"].flops
    assert (layers["nvfp4"].flops_seconds or 0.0) < (layers["mxfp8"].flops_seconds or 0.0)


def _rule(name: str) -> tuple[str, ...]:
    return (f"precision.matmuls=[{{match:null,forward:{name},gradients:{name},rounding:nearest}}]",)


MISTAKES = {
    "target": (
        ("target=h100-8", *WIDTHS), "the compiler for h100-8 makes no matmul faster in blocks of 'mxfp8'",
        "choose a target of b200, gb200, gb300, or set precision.emulate=true",
    ),
    "tensor": (
        ("target=b200-8", *WIDTHS, "sharding=fsdp_tensor", "mesh.tensor=2"),
        "'mxfp8' multiplies whole weights, and tensor splits those of 'queries'", "set mesh.tensor=1, or choose fp8",
    ),
    "width": (
        ("target=b200-8", *WIDTHS, "model.mlp_dim=1000"),
        "blocks of 32 do not divide 1000, what it makes of a token, at 'mlp_up'",
        "make model.mlp_dim a multiple of 32, or give 'mlp_up' another type",
    ),
    "scales": (
        ("target=b200-8", *WIDTHS, *_rule("fp8_blockwise")),
        "no compiler multiplies 'fp8_blockwise', with scales in float32, faster than bfloat16",
        "choose a type with a scale for each tensor or channel, or mxfp8 or nvfp4 or fp8_blockwise_ue8m0 on b200",
    ),
    "tile": (
        ("target=cpu-4", *WIDTHS, *_rule("fp8_blockwise"), "precision.emulate=true", "sharding=fsdp_tensor",
         "mesh.tensor=4", "model.num_heads=8", "model.num_kv_heads=4", "model.head_dim=64"),
        "blocks of 128 do not divide 64 (256 over tensor), what it makes of a token, at 'keys'",
        "make model.num_kv_heads x model.head_dim a multiple of 512, split it over 1 or 2 of 4 devices, or give 'keys'",
    ),
    "tokens": (
        ("target=b200-8", *WIDTHS, "sequence_length=24"),
        "blocks of 32 do not divide 24, the tokens of a device in a microbatch",
        "use sequence_length=32, or a global_batch_size, num_microbatches or mesh",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_what_blocks_cannot_multiply_is_one_error(name):
    words, what, fix = MISTAKES[name]
    with pytest.raises(ConfigError) as error:
        plan_of("precision=mxfp8", *words)
    (problem,) = error.value.problems
    assert (problem.where, problem.what) == ("precision.matmuls[0].forward", what)
    assert problem.fix.startswith(fix)


def test_the_length_that_the_error_names_is_the_next_that_blocks_divide():
    """Of four sequences of a device."""
    size = ("precision=mxfp8", "target=b200-8", *WIDTHS, "global_batch_size=32")
    for length in (5, 6, 7):
        with pytest.raises(ConfigError, match="use sequence_length=8, or"):
            plan_of(*size, f"sequence_length={length}")
    assert plan_of(*size, "sequence_length=8").batch.tokens_of_device == 32


def test_blocks_are_not_multiplied_with_whole_tensors():
    rule = "precision.matmuls=[{match:null,forward:mxfp8,gradients:fp8,rounding:nearest}]"
    with pytest.raises(ConfigError, match="'fp8' cannot be multiplied with 'mxfp8': one of them"):
        plan_of("target=b200-8", "precision=mxfp8", rule, *WIDTHS)


def test_blocks_are_not_multiplied_with_others():
    rule = "precision.matmuls=[{match:null,forward:fp8_blockwise,gradients:mxfp8,rounding:nearest}]"
    with pytest.raises(ConfigError, match="with 'fp8_blockwise': their scales are of other blocks"):
        plan_of("precision=mxfp8", rule, "precision.emulate=true", *WIDTHS)


def test_experts_multiply_as_they_are():
    plan = plan_of("precision=mxfp8", "precision.emulate=true", "model=tiny_moe")
    found = {each.site.name: each.precision.arithmetic for each in plan.operations if each.precision}
    assert found["routed"] is None
    queries = found["queries"]
    assert queries
    assert queries.forward == MXFP8
    rule = "precision.matmuls=[{match:layers/mlp/*_X*,forward:mxfp8,gradients:mxfp8,rounding:nearest}]"
    with pytest.raises(ConfigError, match="and experts multiply in groups"):
        plan_of("precision=mxfp8", "precision.emulate=true", "model=tiny_moe", rule)
