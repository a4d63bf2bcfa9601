"""QLoRA: adapters over a base that is stored, and travels, in few bits. What it computes is what adapters over the
decoded base compute, in every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import LINEAR_STACK, plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path, nested_dict, node_at
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.parallel.encodings import float32_params
from meshloom.compiler.report.explain import base_lines
from meshloom.compiler.step.train_step import stored_params
from support.experts import MOE
from support.programs import Gradients, batch_of, programs_of
from support.tiers import tiered

NF4 = "adapter.base={element: nf4, block: 4, scales_block: 4}"
BASES = {
    "nf4": NF4,
    "int4": "adapter.base={element: int4, block: 8, scales_block: null}",
    "int8": "adapter.base={element: int8, block: null, scales_block: null}",
    "fp8": "adapter.base={element: float8_e4m3fn, block: null, scales_block: 2}",
}
EXPERTS = (*MOE, "model.load_balancing_weight=0.0", "model.router_z_loss_weight=0.0")
CASES = {
    "nf4, fsdp 8, prefetch": ("nf4", "decoder", "sharding=fsdp", "overlap=prefetch"),
    "int8, fsdp x tensor": ("int8", "decoder", "sharding=fsdp_tensor", "mesh.fsdp=4", "mesh.tensor=2"),
    "nf4, one device": ("nf4", "decoder", "target=cpu-1"),
    "int4, fsdp 2, microbatches": ("int4", "decoder", "target=cpu-2", "sharding=fsdp", "num_microbatches=2"),
    "fp8, fsdp x context": ("fp8", "decoder", "sharding=fsdp_context", "mesh.fsdp=4", "mesh.context=2", "remat=none"),
    "nf4, hsdp, save dots": ("nf4", "decoder", "sharding=hsdp", "remat=save_dots"),
    "nf4, fsdp x expert": ("nf4", "experts", "sharding=fsdp_expert"),
    "int8, fsdp x expert, padded": ("int8", "experts", "sharding=fsdp_expert", "parallel.experts=padded"),
    "nf4, stages": ("nf4", "decoder", "sharding=ddp", "mesh.stage=2", "target=cpu-2", "num_microbatches=4"),
    "int8, parts over stages": (
        "int8", "decoder", "sharding=fsdp", "mesh.fsdp=2", "mesh.stage=2", "target=cpu-4", "num_microbatches=4",
    ),
}  # fmt: skip


def _drawn(plan):
    """Returns parameters in float32 as after some steps: B is not zero any more."""
    rng = np.random.default_rng(4)
    leaves = leaves_by_path(plan.model.init(jax.random.key(3)))
    moved = {p: rng.normal(0, 0.1, x.shape) if p.endswith("lora_B") else x for p, x in leaves.items()}
    return nested_dict({path: jnp.asarray(x, jnp.float32) for path, x in moved.items()})


@pytest.fixture(scope="module")
def over_decoded():
    """Gives, by base and model, the parameters that are stored, and the loss and the gradients of LoRA in float32 over
    what they stand for, on one device."""
    cache = {}

    def get(base, model, tokens):
        if (base, model) not in cache:
            more = EXPERTS if model == "experts" else ()
            plan = plan_of("target=cpu-1", "adapter=lora", BASES[base], *more)
            stored = stored_params(plan.weights, _drawn(plan), None)
            plain = plan_of("target=cpu-1", "adapter=lora", *more)
            decoded = jax.tree.map(np.asarray, float32_params(plan.weights, stored))
            cache[base, model] = stored, *Gradients(plain, batch_of(tokens[0]))(decoded)
        return cache[base, model]

    return get


RELEASE = ("nf4, one device", "nf4, hsdp, save dots", "int8, parts over stages")


@pytest.mark.parametrize("name", tiered(CASES, plain=(), release=RELEASE))
def test_every_layout_computes_what_lora_does_over_the_decoded_base(name, tokens, over_decoded):
    base, model, *words = CASES[name]
    plan = plan_of("adapter=lora", BASES[base], *(EXPERTS if model == "experts" else ()), *words)
    stored, expected_loss, expected = over_decoded(base, model, tokens)
    loss, gradients = Gradients(plan, batch_of(tokens[0]), shapes=plan.abstract["params"])(stored)
    assert loss == pytest.approx(expected_loss, rel=2e-6)
    ours, expected = leaves_by_path(gradients), leaves_by_path(expected)
    assert ours.keys() == expected.keys()
    for path, gradient in ours.items():
        scale = np.abs(expected[path]).max()
        np.testing.assert_allclose(gradient, expected[path], rtol=1e-4, atol=1e-5 * scale, err_msg=path)


def test_matrices_of_layers_alone_are_encoded_in_blocks_of_what_is_summed():
    """The blocks of a (out, in) matrix that is stored row by row, as bitsandbytes has it: of `out_HDE`, 8 of (H, D)."""
    plan = plan_of("adapter=lora", "adapter.base={element: nf4, block: 8, scales_block: null}", "target=cpu-1", *MOE)
    formats = {each.array.path: each.array.format for each in plan.sharding.parameters if each.array.format}
    shapes = {path: format.block_sizes(node_at(plan.model.abstract(), path).shape) for path, format in formats.items()}
    attention = {f"layers/attention/{name}": (1, 8, 1, 1) for name in ("query_EHD", "key_EKD", "value_EKD")}
    experts = {f"layers/mlp/{name}": (1, 1, 8, 1) for name in ("gate_XEM", "up_XEM", "down_XME")}
    assert shapes == {**attention, **experts, "layers/attention/out_HDE": (1, 2, 4, 1)}
    params = _drawn(plan)
    stored = stored_params(plan.weights, params, None)
    w = np.asarray(node_at(params, "layers/attention/out_HDE"), np.float64)
    rows = np.moveaxis(w, -1, 1).reshape(3, 32, -1, 8)  # (layers, out, blocks, 8)
    scales = np.asarray(node_at(stored, "layers/attention/out_HDE/scales"))
    np.testing.assert_allclose(np.moveaxis(scales, -1, 1).reshape(3, 32, -1), np.abs(rows).max(-1), rtol=1e-6)


def test_the_state_is_as_large_as_planned_and_starts_as_the_drawn_base():
    plan = plan_of(*LINEAR_STACK, "adapter=lora", NF4, "sharding=fsdp")
    state = programs_of(plan)["init"]()
    specs = leaves_by_path(plan.specs["params"], is_leaf=lambda x: isinstance(x, jax.P))
    held = {path: x.addressable_shards[0].data for path, x in leaves_by_path(state["params"]).items()}
    assert all(x.sharding.spec == specs[path] for path, x in leaves_by_path(state["params"]).items())
    bits = {"uint4": 4, "uint8": 8, "float32": 32}
    num_bytes = sum(x.size * bits[str(x.dtype)] // 8 for x in held.values())
    assert num_bytes == plan.memory.parameters == sum(each.bytes_per_device for each in plan.sharding.parameters)
    drawn = plan.model.init(jax.random.key(plan.spec.seed))
    decoded = leaves_by_path(float32_params(plan.weights, state["params"]))
    for path, x in leaves_by_path(drawn).items():
        is_encoded = path == "layers/kernel_EM"
        np.testing.assert_allclose(decoded[path], x, atol=0.2 * np.abs(x).max() if is_encoded else 1e-7, err_msg=path)
        assert not is_encoded or np.any(decoded[path] != x)


def test_few_bits_travel():
    """Each matrix is gathered as elements of four bits and as scales: the estimate has their bytes."""
    plan = plan_of(*LINEAR_STACK, "adapter=lora", NF4, "sharding=fsdp", "target=v5e-8")
    gathers = [
        each
        for each in estimate_step(plan).communication
        if each.kind == "all-gather" and each.origin and each.origin.parameter == "layers/kernel_EM"
    ]
    matrix = np.prod(node_at(plan.model.abstract(), "layers/kernel_EM").shape[1:])
    by_type = {each.dtype: each.bytes_each for each in gathers}
    assert by_type == {"uint4": matrix // 2, "uint8": matrix // 4, "float32": matrix // 4 // 4 * 4}


MISTAKES = [
    (("adapter.base={element: nf5, block: 64, scales_block: null}",), "'nf5' is not a type of elements that hold"),
    (("adapter.base={element: root4, block: 64, scales_block: null}",), "'root4' is not a type of elements that hold"),
    (
        ("adapter.base={element: nf4, block: 24, scales_block: null}",),
        r"blocks of 24 do not divide 32, the rows of '.*' \(and 6 more\)\n  fix: use 8, 16, 32, or null",
    ),
    (
        ("adapter.base={element: nf4, block: 8, scales_block: null}", "sharding=fsdp", "target=cpu-8"),
        r"over 8 devices leaves 4, and a block has 8 \(and 4 more\)\n  fix: use 4, null",
    ),
    (
        ("adapter.base={element: nf4, block: 4, scales_block: 8}", "sharding=fsdp", "target=cpu-8"),
        r"adapter.base.scales_block: .* of its scales dimension 3 of 32 over 8 devices leaves 4.*\n  fix: use 4, null",
    ),
]


@pytest.mark.parametrize(("words", "error"), MISTAKES)
def test_a_base_that_cannot_be_encoded_is_one_clear_error(words, error):
    with pytest.raises(ConfigError, match=error) as found:
        plan_run(spec_of("adapter=lora", *words))
    assert len(found.value.problems) == 1


def test_explain_says_what_is_encoded_and_what_is_not_and_why():
    plan = plan_of("adapter=qlora", "adapter.base.block=4", "adapter.base.scales_block=null", "target=cpu-1")
    encoded, plain = base_lines(plan.sharding.parameters)
    assert encoded.startswith("nf4 in blocks of 4, float32 scales: layers/attention/key_EKD")
    assert "1.500 bytes a number (adapter.base)" in encoded  # half a byte, and 4 bytes for 4 numbers
    assert plain.startswith("float32: embed/table_VE")
    assert plain.endswith("no matrices of layers, so they are not encoded")
    assert not list(base_lines(plan_of("adapter=lora").sharding.parameters))
