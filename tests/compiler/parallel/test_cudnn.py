"""A GPU's attention where there is no GPU and no cuDNN."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn  # private: it asks for cuDNN's version here
from jax.extend.core import jaxprs_in_params

from conftest import SMALL, plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.parallel.attention import attention as attention_module
from meshloom.compiler.parallel.attention.cudnn import attend_cudnn
from meshloom.compiler.spec.target_names import chip_file, kinds
from meshloom.compiler.spec.target_spec import SwitchSpec
from meshloom.models.attention import Mask
from meshloom.runtime.cli import explain as explain_module
from meshloom.runtime.cli.main import run

GPUS = [kind for kind in kinds() if kind != "cpu" and isinstance(chip_file(kind)[1], SwitchSpec)]
LATENT = ("model=deepseek_v3", "model.num_dense_layers=1", "model.num_kv_heads=16", "model.head_dim=128")
IN_16_BITS = (*SMALL, "precision=bfloat16", "model.head_dim=8")


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("kind", GPUS)
def test_every_gpu_is_explained_without_cuda(kind, capsys):
    assert run(["explain", *IN_16_BITS, f"target={kind}-8"]) == 0
    printed = capsys.readouterr()
    assert "attention by cudnn" in printed.out
    assert "roofline of this program" in printed.out
    assert printed.err == ""


def test_a_page_is_printed_whole_or_not_at_all(monkeypatch, capsys):
    def fail(_):
        raise RuntimeError("the estimate fails")

    monkeypatch.setattr(explain_module, "estimate_step", fail)
    with pytest.raises(RuntimeError, match="the estimate fails"):
        run(["explain", *SMALL, "target=cpu-8"])
    assert capsys.readouterr().out == ""


def calls_of(attend, *arrays) -> list[dict]:
    """The kernels that a function and its gradient call: their name, parameters, and shapes of what they take."""
    jaxpr = jax.make_jaxpr(jax.grad(lambda *arrays: attend(*arrays).astype(jnp.float32).sum(), (0, 1, 2)))(*arrays)
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name.startswith("dot_product_attention"):
                shapes = [x.aval.str_short() for x in (*eqn.invars, *eqn.outvars)]
                found.append({"name": eqn.primitive.name, "shapes": shapes} | eqn.params)
            for inner in jaxprs_in_params(eqn.params):
                visit(inner)

    visit(jaxpr.jaxpr)
    return found


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_kernel_is_called_as_jax_calls_it(window, is_packed, monkeypatch):
    """Where its questions for cuDNN and the GPU are answered. The mask's gradient, which nobody needs, is left out."""
    monkeypatch.setattr(jax_cudnn, "check_cudnn_version", lambda: 91000)
    q, k, v = (jnp.zeros((2, 16, heads, 8), jnp.bfloat16) for heads in (4, 2, 2))
    segments = jnp.zeros((2, 16), jnp.int32) if is_packed else None
    mask = jnp.ones((2, 1, 16, 16), bool) if is_packed else None
    ours = calls_of(
        lambda q, k, v: attend_cudnn(q, k, v, segments, scale=0.5, mask=Mask(window), soft_cap=None), q, k, v
    )
    theirs = calls_of(
        lambda *x: jax.nn.dot_product_attention(
            *x, mask=mask, scale=0.5, is_causal=True, implementation="cudnn",
            local_window_size=None if window is None else (window - 1, 0),
        ), q, k, v,
    )  # fmt: skip
    if is_packed:
        assert theirs[1].pop("variadic_args") == (True, True)
        assert ours[1].pop("variadic_args") == (True, False)
        theirs[1]["shapes"].pop()
        assert theirs[0].pop("variadic_args") == (True, True)
        assert ours[0].pop("variadic_args") == (True, False)
    assert len(ours) == 2
    assert ours == theirs


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("tensor", [4, 8])
def test_each_device_calls_the_kernel_with_its_own_heads(monkeypatch, tensor):
    """XLA's partitioner fails on JAX's call where it has to split it: "'GSPMDSharding' object has no attribute"; and
    where no axis is left to split it by but those of one device, as under tensor parallelism alone."""
    found = set()

    def attend(q_BTHD, *args, **options):
        mesh = jax.sharding.get_abstract_mesh()
        found.add((q_BTHD.shape[2], *(set(mesh.axis_names) - set(mesh.manual_axes))))
        return attend_cudnn(q_BTHD, *args, **options)

    monkeypatch.setattr(attention_module, "attend_cudnn", attend)
    heads = ("model.num_heads=16", "model.num_kv_heads=8")
    estimate_step(plan_of(*IN_16_BITS, *heads, "target=h100-8", "sharding=fsdp_tensor", f"mesh.tensor={tensor}"))
    assert found == {(16 // tensor,)}


def test_values_of_another_width_have_the_kernel_from_hopper_on():
    """DeepSeek-V3's heads: 192 for queries and keys, 128 for values."""
    for kind, name in (("a100", "xla"), ("h100", "cudnn"), ("b200", "cudnn")):
        plan = plan_of(*LATENT, f"target={kind}-8", "precision=bfloat16")
        assert plan.operation("attention").chosen.name == name
    with pytest.raises(ConfigError, match="head_dim of 192, and values one of 128, which needs Hopper"):
        plan_of(*LATENT, "target=a100-8", "precision=bfloat16", "parallel.attention=cudnn")
    q, k, v = (jnp.zeros((2, 16, 4, size), jnp.bfloat16) for size in (192, 192, 128))

    def total(q, k, v):
        return attend_cudnn(q, k, v, None, scale=0.5, mask=Mask(), soft_cap=None).astype("f4").sum()

    grad = jax.grad(total, (0, 2))
    assert [x.shape for x in jax.eval_shape(grad, q, k, v)] == [q.shape, v.shape]


def test_attention_flops_are_half_the_square():
    """Two matmuls forward and five backward (Dao et al. 2022, arXiv:2205.14135), of the blocks up to the diagonal."""
    plan = plan_of("target=h100-8", "precision=bfloat16", "model.head_dim=8", "sequence_length=1024", "remat=none")
    attention = next(part for part in estimate_step(plan).roofline if part.name == "attention")
    square = 3 * (16 // 8) * 16 * 8 * 1024**2  # layers, sequences of a device, heads, head_dim, scores
    assert attention.flops == 2 * 7 * square * (8 + 1) // (2 * 8)


@pytest.mark.cases(plain=1)
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
        (("model.head_dim=12",), "it takes a head_dim of a multiple of 8 up to 256, and the model's is 12"),
        (("model.head_dim=264",), "it takes a head_dim of a multiple of 8 up to 256, and the model's is 264"),
        (
            ("model.head_dim=136", "target=a100-8"),
            "it takes a head_dim of a multiple of 8 up to 128, and the model's is 136",
        ),
        (("sequence_length=15", "model.head_dim=8"), "sequence_length=15 is odd"),
    ],
)
def test_what_jax_would_refuse_is_not_planned(overrides, why):
    attention = plan_of("target=h100-8", "precision=bfloat16", *overrides).operation("attention")
    assert (attention.chosen.name, attention.reason) == ("xla", f"cudnn is not used: {why}")
