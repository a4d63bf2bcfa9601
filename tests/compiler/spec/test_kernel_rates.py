"""Rates of attention kernels: operations that were measured, in the units in which they were, and declared kernels."""

import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler.analysis.schedule_analysis import chip_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.kernels import AttentionCall
from meshloom.compiler.spec.kernel_rates import attention_kernels

V4, V5P, V6E, H100 = 275e12, 459e12, 918e12, 989.4e12


def score_flops(matmuls, head_dim):
    return 2 * matmuls * head_dim


@pytest.mark.parametrize(
    ("kernel", "peak", "call", "scores", "milliseconds"),
    [
        # 16 heads of 2,048 tokens, of whose 16 blocks of 512 a causal mask leaves 10: a profile of v5p
        ("splash_v5p", V5P, AttentionCall(128, 2048, 512), 16 * 10 * 512**2, 0.1232),
        # 3 x 32 heads of 8,192 tokens in blocks of 2,048, one backward kernel: a profile of v6e
        ("splash_v6e", V6E, AttentionCall(128, 8192, 2048, 5), 96 * 10 * 2048**2, 13.87),
        # and in blocks of 1,024, of which 36 of 64 are left: 217 and 485 ms in 36 layers
        ("splash_v6e", V6E, AttentionCall(128, 8192, 1024), 96 * 36 * 1024**2, 217 / 36),
        ("splash_v6e", V6E, AttentionCall(128, 8192, 1024, 5), 96 * 36 * 1024**2, 485 / 36),
        # 528 - 136 blocks of 512 for each of 8 heads: from 8,192 to 16,384 tokens on v4
        ("splash_v5p", V4, AttentionCall(128, 16384, 512), 8 * (528 - 136) * 512**2, 5.809 - 1.837),
    ],
)
def test_measured_kernels_take_as_long_as_they_were_measured_to(kernel, peak, call, scores, milliseconds):
    rate = attention_kernels()[kernel].flops_per_second(call, peak)
    assert scores * score_flops(call.matmuls, call.head_dim) / rate == pytest.approx(milliseconds * 1e-3, rel=0.03)


@pytest.mark.parametrize(("matmuls", "measured"), [(2, 554e12), (5, 473e12)])
def test_heads_of_deepseek_reach_what_its_profile_has(matmuls, measured):
    rate = attention_kernels()["cudnn_h100"].flops_per_second(AttentionCall(192, 4096, 128, matmuls), H100)
    assert rate == pytest.approx(measured, rel=0.01)


def test_both_backward_kernels_of_the_profile_of_v5p_take_as_long_as_they_did():
    """272 us for the queries' gradient, 332 for that of keys and values, which have one number."""
    kernel, scores = attention_kernels()["splash_v5p"], 16 * 10 * 512**2
    dq, dkv = (
        scores * score_flops(n, 128) / kernel.flops_per_second(AttentionCall(128, 2048, 512, n), V5P) for n in (3, 4)
    )
    assert dq + dkv == pytest.approx(604e-6, rel=0.01)
    assert (dq, dkv) == (pytest.approx(272e-6, rel=0.07), pytest.approx(332e-6, rel=0.07))


@pytest.mark.parametrize(("head_dim", "share"), [(128, 0.69), (256, 0.8)])
def test_blocks_of_1024_reach_what_long_steps_of_v5p_did(head_dim, share):
    """Steps that are nearly all attention, in one forward and one backward kernel: 7 matmuls."""
    kernel = attention_kernels()["splash_v5p"]
    seconds = sum(n / kernel.flops_per_second(AttentionCall(head_dim, 2**20, 1024, n), 1.0) for n in (2, 5))
    assert 7 / seconds == pytest.approx(share, rel=0.04)


def test_a_block_costs_the_same_at_every_length_and_a_larger_one_less_for_each_score():
    kernel = attention_kernels()["splash_v5p"]
    shares = {
        block: {kernel.flops_per_second(AttentionCall(128, n, block), 1.0) for n in (2048, 8192, 2**20, 0)}
        for block in (256, 512, 1024, 2048)
    }
    assert {len(each) for each in shares.values()} == {1}
    assert [min(each) for each in shares.values()] == sorted(min(each) for each in shares.values())


def test_a_head_smaller_than_the_matrix_unit_takes_as_long():
    kernel = attention_kernels()["splash_v6e"]
    narrow, wide, wider = (kernel.flops_per_second(AttentionCall(n, 0, 1024), 1.0) / n for n in (128, 256, 512))
    assert narrow == pytest.approx(wide)
    assert wider < wide


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["splash_v5p", "splash_v6e"])
def test_the_lost_scores_are_those_whose_matmuls_take_as_long_as_the_rest_of_a_block(name, head_dim):
    def seconds(block):
        calls = (AttentionCall(head_dim, 0, block, n) for n in (2, 5))
        return sum(block**2 * score_flops(x.matmuls, head_dim) / kernel.flops_per_second(x, 1.0) for x in calls)

    kernel = attention_kernels()[name]
    lost = kernel.lost_scores(head_dim)
    assert lost
    assert seconds(512) / seconds(1024) == pytest.approx((512**2 + lost) / (1024**2 + lost))


def test_a_gpu_s_share_grows_with_the_length_up_to_the_longest_that_was_measured():
    kernel = attention_kernels()["cudnn_h100"]
    lengths = (256, 512, 724, 1024, 16384, 2**20, 0)  # 724: half way from 512 to 1,024 in logarithms
    shares = [kernel.flops_per_second(AttentionCall(128, n), 1.0) for n in lengths]
    assert shares == pytest.approx([0.398, 0.398, (0.398 + 0.466) / 2, 0.466, 0.549, 0.549, 0.549], rel=1e-4)


@pytest.mark.parametrize("kernels", [(2, 5), (2, 3, 4)], ids=["one backward kernel", "two backward kernels"])
def test_a_time_for_a_score_does_not_depend_on_what_the_program_computes_for_it(kernels):
    early = attention_kernels()["early_pallas_v5p"]
    rates = [early.flops_per_second(AttentionCall(128, 4096, 512, each), V5P) for each in kernels]
    seconds = sum(score_flops(n, 128) / rate for n, rate in zip(kernels, rates, strict=True))
    assert seconds == pytest.approx(27e-12)


@pytest.mark.parametrize("of", [AttentionCall(128, 4096), "triton"])
def test_kernels_that_were_measured_under_load_keep_their_rate_in_a_run_and_share_a_lower_limit(of):
    """`sustained` is what a run leaves of single matmuls."""
    changes = (), ("target.chip.sustained=0.5",), ("target.chip.power_limit_watts=350",)
    targets = [plan_of("target=h100-8", "sharding.on_replicated=allow", *each).target for each in changes]
    alone, in_a_run, limited = (target.kernel_rate(of) for target in targets)
    assert limited
    assert alone == in_a_run == 2 * limited
    as_sold, half, _ = (each.matmul_times() for each in targets)
    assert as_sold
    assert half
    of_matmul = "bfloat16", np.array(2.0**45), np.array(2.0**26)
    assert half.seconds(*of_matmul) == pytest.approx(1.5 * as_sold.seconds(*of_matmul), rel=1e-3)
    assert [chip_of(each).kernels_share for each in targets] == [1, 1, 0.5]


def test_a_slower_kernel_is_declared_by_name_or_by_its_figures():
    declared = "target.chip.attention={title: mine, source: a trace, forward: 7.7, backward: 19.3}"
    words = "target=v5p-16", "precision=bfloat16", "sequence_length=256"
    plans = [plan_of(*words, *each) for each in ((), ("target.chip.attention=early_pallas_v5p",), (declared,))]
    splash, early, mine = (plan.target.kernel_rate(AttentionCall(128, 4096, 512)) for plan in plans)
    assert splash is not None
    assert early is not None
    assert early < splash
    assert early == mine
    assert "priced as an early Pallas kernel" in plans[1].operation("attention").chosen.reason


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ("target.chip.attention=splash_v9", "there is no attention kernel 'splash_v9'"),
        ("target.chip.attention={title: a, source: b, forward: 0, backward: 1.0}", "nor a table of shares, nor a time"),
        ("target.chip.attention={title: a, source: b, forward: {128: {2048: 1.5}}, backward: 1.0}", "1.5"),
        (
            "target.chip.attention={title: a, source: b, forward: {128: {512: {2048: 0.38}}}, backward: 1.0}",
            "this table of shares has three levels",
        ),
        (
            "target.chip.attention={title: a, source: b, forward: {share: 0.9, lost_flops: 1}, backward: 1.0}",
            "least_head",
        ),
    ],
)
def test_a_kernel_that_is_none_is_an_error_with_its_place(declared, told):
    with pytest.raises(ConfigError, match=told):
        plan_of("target=v5p-16", declared)
