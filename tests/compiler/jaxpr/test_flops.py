"""FLOPs of single operations, against XLA's own count and against counts by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.jaxpr.flops import count_flops


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def counted(function, *args):
    return count_flops(jax.make_jaxpr(function)(*args).jaxpr, "layers")


def of_xla(function, *args) -> float:
    cost = jax.jit(function).trace(*args).lower().compile().cost_analysis()
    assert cost
    return cost["flops"]


def convolution(x, kernel, *, stride=1, dilation=1, groups=1):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        x, kernel, (stride,), ((0, 0),), (dilation,), (1,), dimension_numbers=numbers, feature_group_count=groups
    )


CONVOLUTIONS = {
    "plain": (convolution, f32(4, 64, 8), f32(5, 8, 16)),
    "with strides": (lambda x, k: convolution(x, k, stride=2), f32(4, 64, 8), f32(5, 8, 16)),
    "of each feature": (lambda x, k: convolution(x, k, groups=8), f32(4, 64, 8), f32(5, 1, 8)),
    "of two dimensions": (
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID"), f32(2, 3, 12, 14), f32(5, 3, 3, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_flops_of_a_convolution_are_those_of_xla(case):
    function, *args = CONVOLUTIONS[case]
    assert counted(function, *args).products == of_xla(function, *args) > 0


def test_zeros_that_a_dilation_puts_in_do_no_work():
    """32 elements three apart fill 94 places, which 5 taps meet at 90: a third of the products are of an element."""
    flops = counted(lambda x, k: convolution(x, k, dilation=3), f32(1, 32, 8), f32(5, 8, 16)).products
    assert flops == 2 * 90 * 5 * 8 * 16 // 3
    assert flops == pytest.approx(of_xla(lambda x, k: convolution(x, k, dilation=3), f32(1, 32, 8), f32(5, 8, 16)), 0.1)


def test_flops_of_gradients_of_a_convolution_are_twice_its_own():
    """The gradient of what goes in meets zeros around it: a little more."""
    function, x, kernel = convolution, f32(4, 512, 8), f32(5, 8, 16)
    forward = counted(function, x, kernel).products
    backward = counted(lambda x, k, y: jax.vjp(function, x, k)[1](y), x, kernel, f32(4, 508, 16)).products
    assert 3 * forward <= backward <= 3.05 * forward


def test_flops_of_a_ragged_dot_are_those_of_the_matmuls_of_its_groups():
    """Groups of 3, 2 and 4 rows, forward and for both gradients, as three matmuls."""
    sizes, first = (3, 2, 4), (0, 3, 5)

    def ragged(x, w, y):
        return jax.vjp(lambda x, w: lax.ragged_dot(x, w, jnp.asarray(sizes)), x, w)[1](y)

    def by_hand(x, w, y):
        parts = [(x[i : i + n], w[g], y[i : i + n]) for g, (i, n) in enumerate(zip(first, sizes, strict=True))]
        return [(x @ w, x.T @ y, y @ w.T) for x, w, y in parts]

    args = f32(9, 6), f32(3, 6, 10), f32(9, 10)
    assert counted(ragged, *args).products == of_xla(by_hand, *args) == 3 * 2 * 9 * 6 * 10


@pytest.mark.parametrize(
    ("function", "x", "flops"),
    [
        (jnp.fft.fft, jax.ShapeDtypeStruct((3, 64), jnp.complex64), 3 * 5 * 64 * 6),
        (jnp.fft.rfft, f32(3, 64), 3 * 5 * 64 * 6 // 2),
        (jnp.fft.irfft, jax.ShapeDtypeStruct((3, 33), jnp.complex64), 3 * 5 * 64 * 6 // 2),
        (jnp.fft.fft2, jax.ShapeDtypeStruct((3, 16, 32), jnp.complex64), 3 * 5 * 512 * 9),
    ],
)
def test_flops_of_ffts_are_the_usual_ones(function, x, flops):
    """5 N log2 N of a complex transform, half of a real one (fftw.org/speed/method.html)."""
    assert counted(function, x).transforms == flops


def test_flops_of_factorizations():
    n, m = 12, 5
    assert counted(jnp.linalg.cholesky, f32(4, n, n)).products == 4 * n**3 // 3
    solve = counted(lambda a, b: jax.scipy.linalg.solve_triangular(a, b), f32(n, n), f32(n, m))
    assert solve.products == n * n * m


def test_loops_of_fixed_length_are_counted_and_others_are_not():
    def loop(x, trips):
        return lax.fori_loop(0, trips, lambda _, x: x @ x, x)

    assert counted(lambda x: loop(x, 7), f32(8, 8)).known == 7 * 2 * 8**3
    open_end = counted(loop, f32(8, 8), jax.ShapeDtypeStruct((), jnp.int32))
    assert [one.name for one in open_end.unknown] == ["while"]
    assert open_end.known == 0
    assert not counted(lambda x: lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x), f32(8)).unknown


def test_a_branch_that_cannot_be_counted_makes_its_cond_unknown():
    def program(x):
        return lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: jnp.linalg.qr(x)[1], x)

    assert counted(program, f32(8, 8)).unknown


def test_a_print_takes_no_arithmetic():
    def program(x):
        jax.debug.print("{}", x[0, 0])
        return x @ x

    assert counted(program, f32(8, 8)) == counted(lambda x: x @ x, f32(8, 8))


OURS = (
    *((f"model={name}", f"optimizer={optimizer}") for name, optimizer in (
        ("tiny", "adamw"), ("gpt2_124m", "muon"), ("gemma2_9b", "lion"), ("llama3_8b", "sgd"),
        ("qwen3_0_6b", "adafactor"),
    )),
    ("model=tiny", "model.dropout_rate=0.1", "precision=float16"),
    ("model=tiny", "sharding=fsdp_tensor", "mesh.tensor=2", "remat=offload", "optimizer=muon"),
    ("model=tiny", "target=h100-8", "num_microbatches=2", "data.packing=first_fit"),
)  # fmt: skip


@pytest.mark.parametrize("overrides", OURS)
def test_every_primitive_of_ours_is_known(overrides):
    declared = ("target=v5p-8", "data=synthetic", "global_batch_size=16", *overrides)
    plan = read_spec(Request(declared), then=plan_run)
    assert plan.model_flops_per_step
    assert estimate_step(plan).unknown == ()
