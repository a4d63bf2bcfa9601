"""What each policy computes again, in FLOPs of the traced step."""

import jax
import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler.flops import matmul_flops
from meshloom.compiler.remat import policy_of
from meshloom.compiler.step import build_loss
from meshloom.models import DecoderConfig


def _flops(*overrides: str) -> int:
    """Matmul FLOPs of loss and gradients on one device."""
    plan = plan_of("target=cpu-1", *overrides)
    batch = {name: jax.ShapeDtypeStruct((16, 16), np.int32) for name in ("inputs", "targets")}
    with jax.set_mesh(plan.mesh.of_devices(jax.devices()[:1])):
        return matmul_flops(jax.make_jaxpr(build_loss(plan, with_gradients=True))(plan.abstract["params"], batch).jaxpr)


@pytest.fixture(scope="module")
def matmul():
    """FLOPs of one pass through matrices of a layer, all layers, by the names of their sizes."""
    plan = plan_of("target=cpu-1")
    c, tokens = plan.spec.model, plan.spec.tokens_per_step
    assert isinstance(c, DecoderConfig)
    one = 2 * tokens * c.num_layers * c.embed_dim
    return {
        "query": one * c.num_heads * c.head_dim,
        "key": one * c.num_kv_heads * c.head_dim,
        "mlp": one * c.mlp_dim,
        "scores": 2 * tokens * c.num_layers * c.num_heads * c.head_dim * plan.spec.sequence_length,
        "step": plan.model_flops_per_step,
    }


def test_none_computes_nothing_again(matmul):
    assert _flops("remat=none") == matmul["step"]


def test_full_computes_all_again_that_the_backward_pass_reads(matmul):
    # All but the last matmul of a layer, whose result is the input of the next one: gate, up; q, k, v, out; attention.
    again = 2 * matmul["mlp"] + 2 * matmul["query"] + 2 * matmul["key"] + 2 * matmul["scores"]
    assert _flops("remat=full") == matmul["step"] + again


@pytest.mark.parametrize("remat", ["save_names", "offload"])
def test_what_is_named_is_not_computed_again(matmul, remat):
    full = _flops("remat=full")
    assert full - _flops(f"remat={remat}", "remat.names=[queries]") == matmul["query"]
    assert full - _flops(f"remat={remat}", "remat.names=[keys,values]") == 2 * matmul["key"]


def test_a_policy_may_be_of_one_stack_alone():
    plan = plan_of("remat=none", "remat.stacks.layers=full")
    assert policy_of(plan.spec.remat, "layers") == "full"
    assert policy_of(plan.spec.remat, "others") == "none"
    assert _flops("remat=none", "remat.stacks.layers=full") == _flops("remat=full")
    assert _flops("remat=full", "remat.stacks.layers=none") == _flops("remat=none")
