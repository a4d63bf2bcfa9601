"""A GPU's attention where there is no GPU and no cuDNN."""

import pytest
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn  # private: it asks for cuDNN's version here

from conftest import SMALL, plan_of
from meshloom.compiler.config.target_names import chip_file, kinds
from meshloom.compiler.config.target_spec import SwitchSpec
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.parallel import attention as attention_module
from meshloom.compiler.parallel.attention import AttentionOp
from meshloom.compiler.parallel.cudnn import shapes_of_cudnn
from meshloom.compiler.report import explain as explain_module
from meshloom.runtime.cli.main import run

GPUS = [kind for kind in kinds() if kind != "cpu" and isinstance(chip_file(kind)[1], SwitchSpec)]
IN_16_BITS = (*SMALL, "precision=bfloat16", "model.head_dim=8")


@pytest.mark.parametrize("kind", GPUS)
def test_every_gpu_is_explained_without_cuda(kind, capsys):
    assert run(["explain", *IN_16_BITS, f"target={kind}-8"]) == 0
    printed = capsys.readouterr()
    assert "attention by cudnn" in printed.out
    assert "no step is shorter than" in printed.out
    assert printed.err == ""


def test_a_page_is_printed_whole_or_not_at_all(monkeypatch, capsys):
    def fail(_):
        raise RuntimeError("the estimate fails")

    monkeypatch.setattr(explain_module, "estimate_step", fail)
    with pytest.raises(RuntimeError, match="the estimate fails"):
        run(["explain", *SMALL, "target=cpu-8"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "overrides",
    [
        ("remat=none",),
        ("remat=full", "num_microbatches=2"),
        ("remat=save_dots", "data.isolate_documents=true"),
        ("remat=save_names", "model.attention_windows=[5,null,6]", "overlap=prefetch"),
        ("remat=full", "sharding=fsdp_tensor", "mesh.tensor=2"),
        ("remat=full", "sharding=fsdp_context", "mesh.context=2", "parallel.context=ring"),
        ("remat=full", "sharding=fsdp_context", "mesh.context=2", "parallel.context=all_gather"),
    ],
)
def test_the_estimate_is_that_of_the_kernel_that_is_compiled(overrides, monkeypatch):
    """JAX's own call is traced too where its question for cuDNN's version is answered."""
    plan = plan_of("target=h100-8", "precision=bfloat16", "model.head_dim=8", *overrides)
    assert plan.operation("attention").chosen.name == "cudnn"
    ours = estimate_step(plan)
    monkeypatch.setattr(AttentionOp, "to_estimate", lambda _, plan: plan)
    monkeypatch.setattr(jax_cudnn, "check_cudnn_version", lambda: 91000)
    assert estimate_step(plan) == ours


def test_each_device_calls_the_kernel_with_its_own_heads(monkeypatch):
    """XLA's partitioner fails on JAX's call where it has to split it: "'GSPMDSharding' object has no attribute"."""
    found = set()

    def attend(q_BTHD, *args, **options):
        found.add(q_BTHD.shape[2])
        return shapes_of_cudnn(q_BTHD, *args, **options)

    monkeypatch.setattr(attention_module, "shapes_of_cudnn", attend)
    estimate_step(plan_of(*IN_16_BITS, "target=h100-8", "sharding=fsdp_tensor", "mesh.tensor=4"))
    assert found == {16 // 4}


def test_attention_flops_are_half_the_square():
    """Two matmuls forward and five backward (Dao et al. 2022, arXiv:2205.14135), of the blocks up to the diagonal."""
    plan = plan_of("target=h100-8", "precision=bfloat16", "model.head_dim=8", "sequence_length=1024", "remat=none")
    attention = next(part for part in estimate_step(plan).roofline if part.name == "attention")
    square = 3 * (16 // 8) * 16 * 8 * 1024**2  # layers, sequences of a device, heads, head_dim, scores
    assert attention.flops == 2 * 7 * square * (8 + 1) // (2 * 8)


@pytest.mark.parametrize("name", ["ring", "all_gather", "ulysses"])
def test_attention_over_a_split_length_takes_the_flops_that_the_mask_leaves(name):
    """1,024 tokens in 4 chunks of 256 on 2 devices: of 4 x 4 chunks 10 are seen, 4 of them half, on each device 4; with
    all tokens, half of the heads and half of the square. cuDNN's blocks of 128 leave more of what is seen in half."""
    plan = plan_of(
        "target=h100-8", "precision=bfloat16", "model.head_dim=8", "sequence_length=1024", "remat=none",
        "sharding=fsdp_context", "mesh.fsdp=4", "mesh.context=2", f"parallel.context={name}", "global_batch_size=4",
    )  # fmt: skip
    assert plan.operation("attention").chosen.name == "cudnn"
    attention = next(part for part in estimate_step(plan).roofline if part.name == "attention")
    of_chunks = {"ring": 3 + 2 * 3 / 4, "all_gather": 3 + 2 * 3 / 4, "ulysses": 8 * (8 + 1) / 16}[name]
    assert attention.flops == pytest.approx(3 * 16 * of_chunks * 256**2 * 8 * 2 * 7, rel=0.01)  # layers, heads


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("model.head_dim=12",), "it takes a head_dim of a multiple of 8 up to 128, and the model's is 12"),
        (("model.head_dim=136",), "it takes a head_dim of a multiple of 8 up to 128, and the model's is 136"),
        (("sequence_length=15", "model.head_dim=8"), "sequence_length=15 is odd"),
    ],
)
def test_what_jax_would_refuse_is_not_planned(overrides, why):
    attention = plan_of("precision=bfloat16", "target=h100-8", *overrides).operation("attention")
    assert (attention.chosen.name, attention.reason) == ("xla", f"cudnn is not used: {why}")
