"""Kernels of libraries, which a program calls by name: known families by their shapes, others as a lower bound."""

import pytest

from meshloom.compiler.core.traffic import Placed
from meshloom.compiler.spec.cost_model import cost_model
from meshloom.compiler.spec.kernel_rates import grouped_kernels
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.schedule.prices import Chip
from meshloom.compiler.xla.schedule.program import read_steps
from meshloom.compiler.xla.schedule.simulate import Simulation, simulate
from support.schedules import attention_of, module

FLOPS, BANDWIDTH = 1e9, 1e9


def chip(platform: str = "gpu", *, bandwidth: float = 1e15, flops: float = FLOPS) -> Chip:
    peaks: dict[str, float] = dict.fromkeys(["bfloat16", "float16", "float32", "float8"], flops)
    return Chip(platform, None, peaks, bandwidth, attention=attention_of({1: 0.5}))


def called(target: str, result: str, *operands: str, config: str = "", of: Chip | None = None) -> Simulation:
    """Returns a step of one call of a kernel."""
    names = [f"%o{n}" for n in range(len(operands))]
    lines = [
        f"  {name} = {kind} parameter({n + 1})" for n, (name, kind) in enumerate(zip(names, operands, strict=True))
    ]
    call = f'custom-call({", ".join(names)}), custom_call_target="{target}"{config}'
    text = module(*lines, f"  ROOT %k.1 = {result} {call}")
    return simulate(read_steps(parse_module(text), of or chip()), lambda _: Placed(0.0, ()))


@pytest.mark.parametrize(
    "target",
    ["my_fft", "te_moe_shuffle_ffi", "xla_python_gpu_callback", "nccl_push", "cusolver_geqrf_ffi", "mosaic_gpu_v2"],
)
def test_a_kernel_that_nothing_is_known_of_is_named_and_takes_a_launch_and_what_it_writes(target):
    result = called(target, "(f32[1000000], f32[500])", "f32[9000000]", of=chip(bandwidth=BANDWIDTH))
    assert result.unpriced == {"k.1": f"communication by {target}" if "nccl" in target else target}
    assert result.priced_by == {"nothing": 1}
    assert result.seconds == pytest.approx(4 * 1_000_500 / BANDWIDTH + cost_model().kernel_gap_seconds)
    small = called(target, "f32[4]", "f32[9000000]", of=chip(bandwidth=BANDWIDTH))
    assert small.seconds == pytest.approx(cost_model().kernel_seconds + cost_model().kernel_gap_seconds)


def test_results_that_are_operands_are_not_written_for_sure():
    config = ", output_to_operand_aliasing={{0}: (0, {})}"
    result = called("insert_page", "(f32[1000000], f32[500])", "f32[1000000]", config=config, of=chip(bandwidth=1e6))
    assert result.seconds == pytest.approx(4 * 500 / 1e6 + cost_model().kernel_gap_seconds)


def test_a_kernel_of_pallas_that_communicates_is_named_so():
    config = ', backend_config={name = "all_gather_matmul"}'
    found = called("__gpu$xla.gpu.triton", "f32[8]", "f32[8]", config=config)
    assert found.unpriced == {"k.1": "communication by all_gather_matmul"}


def test_kernels_of_pallas_have_their_own_names():
    config = ', backend_config={grid_x = 8 : i32, name = "my_kernel", num_warps = 4 : i32}'
    assert called("__gpu$xla.gpu.triton", "f32[8]", "f32[8]", config=config).unpriced == {"k.1": "my_kernel"}
    assert called("tpu_custom_call", "f32[8]", "f32[8]", of=chip("tpu")).unpriced == {"k.1": "k"}


@pytest.mark.parametrize("target", ["te_norm_forward_ffi", "te_act_lu_ffi", "te_dbias_quantize_ffi", "__gpu$TopK",
                                    "te_grouped_quantize_ffi", "te_grouped_gemm_d2h_group_sizes_ffi"])  # fmt: skip
def test_kernels_that_only_stream_take_the_time_of_their_bytes(target):
    result = called(target, "bf16[1000000]", "bf16[1000000]", of=chip(bandwidth=BANDWIDTH))
    assert (result.priced_by, result.unpriced) == ({"bytes": 1}, {})
    assert result.seconds == pytest.approx(4_000_000 / BANDWIDTH + cost_model().kernel_gap_seconds)


@pytest.mark.parametrize(
    ("target", "result", "operands"),
    [
        ("te_gemm_ffi", "(bf16[640,320], u8[4096])", ("bf16[640,200]", "bf16[200,320]", "f32[320]")),
        ("te_gemm_v2_ffi", "bf16[640,320]", ("bf16[200,640]", "f32[1]", "bf16[320,200]", "f32[1]")),
        ("te_gemm", "bf16[2,320,320]", ("bf16[2,320,200]", "bf16[200,320]")),
    ],
)
def test_a_matmul_that_names_no_dimensions_is_known_by_its_shapes(target, result, operands):
    found = called(target, result, *operands)
    assert (found.priced_by, found.unpriced) == ({"flops": 1}, {})
    assert found.seconds == pytest.approx(2 * 640 * 200 * 320 / FLOPS + cost_model().kernel_gap_seconds)


@pytest.mark.parametrize(
    ("target", "result", "operands"),
    [
        ("my_gemm", "bf16[640,320]", ("bf16[640,200]", "bf16[210,320]")),  # no product of these
        ("my_gemm", "bf16[640,320]", ("bf16[640]",)),
        ("my_grouped_gemm", "bf16[640,320]", ("bf16[640,200]", "bf16[4,210,320]")),
        ("my_grouped_gemm", "bf16[640,320]", ("bf16[128000]", "bf16[256000]", "s32[4]")),  # flat, and no sizes
        ("my_grouped_gemm", "bf16[4,640,320]", ("bf16[640,200]", "bf16[4,200,320]")),  # rows of each group?
    ],
)
def test_a_gemm_whose_shapes_do_not_say_is_not_known(target, result, operands):
    assert called(target, result, *operands).unpriced == {"k.1": target}


def test_a_matmul_that_also_communicates_takes_its_arithmetic_at_least():
    found = called("te_comm_gemm_ffi", "bf16[640,320]", "bf16[640,200]", "bf16[200,320]")
    assert found.unpriced == {"k.1": "communication by te_comm_gemm_ffi"}
    assert found.seconds == pytest.approx(2 * 640 * 200 * 320 / FLOPS + cost_model().kernel_gap_seconds)


FLAT = ("bf16[128000]", "bf16[0]", "bf16[256000]", "bf16[0]", "bf16[0]", "s32[4]", "s32[1]")  # with scales and a bias
SIZES = (
    ", backend_config={K = %s : i64, M = %s : i64, N = %s : i64, has_bias = false, is_grouped_dense_wgrad = %s, "
    "lhs_is_trans = false, rhs_is_trans = false, scaling_mode = 0 : i64}"
)


@pytest.mark.parametrize(
    ("target", "result", "operands", "config"),
    [
        ("te_grouped_gemm_ffi", "(bf16[640,320], u8[99])", FLAT, SIZES % (200, 640, 320, "false")),
        ("te_grouped_gemm_v2_ffi", "(bf16[4,200,320], u8[99])", ("bf16[128000]", "bf16[0]", "bf16[204800]", "s32[4]"),
         SIZES % (640, 200, 320, "true")),
        ("te_grouped_gemm_ffi", "bf16[640,320]", ("bf16[640,200]", "bf16[4,200,320]", "s32[4]"), ""),
        ("my_grouped_matmul", "bf16[640,320]", ("bf16[640,200]", "bf16[4,320,200]", "f32[4,320]", "s32[4]"), ""),
        ("te_grouped_gemm_ffi", "bf16[4,200,320]", ("bf16[640,200]", "bf16[640,320]", "s32[4]"), ""),
        ("te_grouped_gemm_ffi", "bf16[4,200,320]", ("bf16[200,640]", "bf16[640,320]", "s32[4]"), ""),
    ],
)  # fmt: skip
def test_a_grouped_matmul_meets_one_matrix_for_each_row_forward_and_for_the_gradient(target, result, operands, config):
    """640 rows of 200, by 4 matrices of 200 x 320."""
    found = called(target, result, *operands, config=config)
    seconds = 2 * 640 * 200 * 320 / (grouped_kernels()["library"].share * FLOPS)
    assert (found.priced_by, found.unpriced) == ({"flops": 1}, {})
    assert found.compute_seconds == {"matmul": pytest.approx(seconds + cost_model().kernel_gap_seconds)}


NESTED = """%left {
  ROOT %l = bf16[640,200] parameter(0)
}
%product {
  %a = bf16[640,200] parameter(0)
  %b = bf16[200,320] parameter(1)
  %f = bf16[640,200] fusion(%a), kind=kCustom, calls=%left
  ROOT %d = bf16[640,320] dot(%f, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%softmax {
  %s = bf16[640,320] parameter(0)
  %e = bf16[640,320] exponential(%s)
  ROOT %q = bf16[640,320] divide(%e, %e)
}
"""


@pytest.mark.parametrize(
    "call",
    [
        'fusion(%x1, %y), kind=kCustom, calls=%product, backend_config={"fusion_backend_config":{"kind":'
        '"__triton_gemm"}}',
        'fusion(%x1, %y), kind=kCustom, calls=%product, backend_config={"fusion_backend_config":{"kind":'
        '"__triton_nested_gemm_fusion"}}',
        'custom-call(%x1, %y), custom_call_target="__triton", called_computations={%product}',
    ],
)
def test_a_triton_kernel_that_xla_generates_takes_what_its_computation_does(call):
    lines = ["  %x1 = bf16[640,200] parameter(1)", "  %y = bf16[200,320] parameter(2)"]
    text = module(*lines, f"  ROOT %k = bf16[640,320] {call}", before=NESTED)
    found = simulate(read_steps(parse_module(text), chip()), lambda _: Placed(0.0, ()))
    assert (found.priced_by, found.unpriced) == ({"flops": 1}, {})
    assert found.compute_seconds == {
        "matmul": pytest.approx(2 * 640 * 200 * 320 / FLOPS + cost_model().kernel_gap_seconds)
    }


def test_a_softmax_by_triton_reads_and_writes_once():
    kind = 'backend_config={"fusion_backend_config":{"kind":"__triton"}}'
    lines = ["  %y = bf16[640,320] parameter(1)"]
    text = module(*lines, f"  ROOT %k = bf16[640,320] fusion(%y), kind=kCustom, calls=%softmax, {kind}", before=NESTED)
    found = simulate(read_steps(parse_module(text), chip(bandwidth=1e6)), lambda _: Placed(0.0, ()))
    assert (found.priced_by, found.unpriced) == ({"bytes": 1}, {})
    assert found.seconds == pytest.approx(2 * 2 * 640 * 320 / 1e6 + cost_model().kernel_gap_seconds)


QUOTED = '"{{\\"dot_dimension_numbers\\":{{\\"lhs_contracting_dimensions\\":[\\"{}\\"]}}}}"'
PLAIN = '{{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["{}"]}}}}}}'


@pytest.mark.parametrize("form", [QUOTED, PLAIN], ids=["in a string", "plain"])
def test_cublas_says_what_it_contracts_in_both_forms(form):
    config = f", backend_config={form.format(0)}"
    found = called("__cublas$gemm", "(bf16[640,320], s8[64])", "bf16[200,640]", "bf16[200,320]", config=config)
    assert found.unpriced == {}
    assert found.seconds == pytest.approx(2 * 640 * 200 * 320 / FLOPS + cost_model().kernel_gap_seconds)


TE = (
    ', backend_config={attn_heads = 8 : i64, head_dim = 64 : i64, input_batch = 2 : i64, kv_max_seqlen = 512 : i64, '
    'mask_type = %s : i64, q_max_seqlen = 256 : i64, qkv_layout = %s : i64, window_size_left = %s : i64}'
)  # fmt: skip
SQUARE = 2 * 2 * (2 * 8 * 256 * 512 * 64)  # two matmuls of all queries with all keys
BAND = SQUARE * (1 / 8 - 1 / 128)  # of a window of 64 keys before each query


@pytest.mark.parametrize(
    ("target", "shapes", "config", "flops"),
    [
        ("te_fused_attn_forward_ffi", ("bf16[2,256,8,64]", "bf16[2,512,4,64]"), TE % (2, 9, -1), SQUARE / 2),
        ("te_fused_attn_forward_ffi", ("bf16[2,256,8,64]", "bf16[2,512,4,64]"), TE % (0, 9, -1), SQUARE),
        ("te_fused_attn_forward_ffi", ("bf16[2,256,8,64]", "bf16[2,512,4,64]"), TE % (2, 9, 64), BAND),
        ("te_fused_attn_backward_ffi", ("bf16[2,256,8,64]", "bf16[2,512,8,64]"), TE % (2, 9, -1), SQUARE / 2 * 5 / 2),
        ("te_fused_attn_forward", ("bf16[2,512,3,8,32]",), "", SQUARE / 2),  # packed, and nothing else is said
        ("te_fused_attn_forward", ("bf16[2,256,8,64]", "bf16[2,512,2,8,64]"), "", SQUARE / 2),
        ("__cudnn$fmhaSoftmax", ("bf16[2,8,256,64]", "bf16[2,8,512,64]"),
         ', backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape": {"element_type": "BF16", '
         '"dimensions": ["2", "8", "256", "512"]}, "mask_type": "CAUSAL"}}', SQUARE / 2),
        *(("__cudnn$fmhaSoftmax", ("bf16[2,256,8,64]", "bf16[2,512,8,64]"),
           f', backend_config={{"cudnn_fmha_backend_config":{{"mask_type": "{mask}"}}}}', share * SQUARE)
          for mask, share in (("NO_MASK", 1.0), ("CAUSAL", 0.5))),
        ("__cudnn$fmhaSoftmaxBackward", ("bf16[2,8,256,64]", "bf16[2,8,512,64]"),
         ', backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape": {"dimensions": ["2", "8", "256", '
         '"512"]}, "mask_type": "CAUSAL", "sliding_window_length": 64}}', BAND * 5 / 2),
    ],
)  # fmt: skip
def test_attention_of_libraries_takes_the_arithmetic_that_its_mask_leaves(target, shapes, config, flops):
    found = called(target, f"({shapes[0]}, f32[8])", *shapes, config=config)
    assert (found.priced_by, found.unpriced) == ({"flops": 1}, {})
    assert found.compute_seconds == {
        "attention": pytest.approx(flops / (0.5 * FLOPS) + cost_model().kernel_gap_seconds)
    }


def test_attention_over_sequences_of_any_length_is_not_known():
    shapes = ("bf16[2,256,8,64]", "bf16[2,512,8,64]", "bf16[2,512,8,64]")
    found = called("te_fused_attn_forward_ffi", shapes[0], *shapes, config=TE % (3, 14, -1))
    assert found.unpriced == {"k.1": "te_fused_attn_forward_ffi over sequences of any length"}


IMAGE, KERNEL, OUT = "f16[4,32,30,30]", "f16[64,32,3,3]", "f16[4,64,28,28]"


@pytest.mark.parametrize(
    ("target", "result", "operands"),
    [
        ("__cudnn$convForward", OUT, (IMAGE, KERNEL)),
        ("__cudnn$convBackwardInput", IMAGE, (OUT, KERNEL)),
        ("__cudnn$convBackwardFilter", KERNEL, (IMAGE, OUT)),
    ],
)
def test_a_convolution_of_cudnn_takes_as_long_forward_as_for_each_gradient(target, result, operands):
    config = ", window={size=3x3}, dim_labels=bf01_oi01->bf01"
    found = called(target, f"({result}, u8[0])", *operands, config=config)
    assert found.unpriced == {}
    assert found.seconds == pytest.approx(2 * 4 * 64 * 28 * 28 * 32 * 9 / FLOPS + cost_model().kernel_gap_seconds)
    assert set(found.compute_seconds) == {"matmul"}


def test_a_mosaic_kernel_takes_the_bytes_that_its_author_declares():
    config = ', backend_config={"custom_call_config":{"cost_estimate":{"flops":"8","bytes_accessed":"5000000"}}}'
    found = called("tpu_custom_call", "f32[8]", "f32[8]", config=config, of=chip("tpu", bandwidth=1e6))
    assert (found.seconds, found.unpriced) == (pytest.approx(5.0), {})


def test_sorts_take_all_their_passes():
    """A radix sort of 32 bits passes four times, of keys and values; XLA's own sort of two tiles thrice."""
    radix = called("__cub$DeviceRadixSort", "(u32[1000000], f32[1000000])", "u32[1000000]", "f32[1000000]",
                   of=chip(bandwidth=BANDWIDTH))  # fmt: skip
    assert radix.seconds == pytest.approx(4 * 2 * 8_000_000 / BANDWIDTH + cost_model().kernel_gap_seconds)

    def bitonic(length: int) -> float:
        line = f"  ROOT %s = f32[{length},100] sort(%o), dimensions={{0}}, to_apply=%less"
        text = module(f"  %o = f32[{length},100] parameter(1)", line)
        return simulate(read_steps(parse_module(text), chip(bandwidth=1e6)), lambda _: Placed(0.0, ())).seconds

    assert bitonic(4096) / bitonic(2048) == pytest.approx(2 * 3, rel=1e-4)


@pytest.mark.parametrize(
    "line",
    [
        "fft(%o), fft_type=FFT, fft_length={1000000}",
        "cholesky(%o), lower=true",
        "triangular-solve(%o, %o), left_side=true",
    ],
)
def test_what_passes_an_unknown_number_of_times_takes_one_pass_at_least(line):
    text = module("  %o = c64[1,1000000] parameter(1)", f"  ROOT %f = c64[1,1000000] {line}")
    found = simulate(read_steps(parse_module(text), chip(bandwidth=BANDWIDTH)), lambda _: Placed(0.0, ()))
    assert found.unpriced == {"f": line.partition("(")[0]}
    assert found.seconds >= 2 * 8_000_000 / BANDWIDTH


def test_an_unknown_kernel_within_a_fusion_is_counted():
    before = """%fused (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %c = f32[8] custom-call(%p), custom_call_target="mystery"
}
"""
    text = module("  ROOT %f = f32[8] fusion(%x), kind=kCustom, calls=%fused", before=before)
    found = simulate(read_steps(parse_module(text), chip()), lambda _: Placed(0.0, ()))
    assert found.unpriced == {"f": "mystery"}
