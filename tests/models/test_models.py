"""The named models: as many parameters as published; each shape of decoder the same on every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from support.programs import Gradients, batch_of
from support.reference import reference_loss
from support.tiers import tiered

# Sums of the shapes in the checkpoints that their makers published; tied tables once.
PUBLISHED = {
    "gpt2_124m": 124_439_808,  # openai-community/gpt2
    "llama2_7b": 6_738_415_616,  # meta-llama/Llama-2-7b-hf
    "llama2_70b": 68_976_648_192,  # meta-llama/Llama-2-70b-hf
    "llama3_8b": 8_030_261_248,  # meta-llama/Meta-Llama-3-8B
    "llama3_70b": 70_553_706_496,  # meta-llama/Meta-Llama-3-70B
    "llama3_405b": 405_853_388_800,  # meta-llama/Llama-3.1-405B
    "llama3_1_8b": 8_030_261_248,  # meta-llama/Llama-3.1-8B
    "llama3_2_1b": 1_235_814_400,  # meta-llama/Llama-3.2-1B
    "llama3_2_3b": 3_212_749_824,  # meta-llama/Llama-3.2-3B
    "smollm2_135m": 134_515_008,  # HuggingFaceTB/SmolLM2-135M
    "mistral_7b": 7_248_023_552,  # mistralai/Mistral-7B-v0.3
    "qwen2_5_0_5b": 494_032_768,  # Qwen/Qwen2.5-0.5B
    "qwen2_5_7b": 7_615_616_512,  # Qwen/Qwen2.5-7B
    "qwen2_5_32b": 32_763_876_352,  # Qwen/Qwen2.5-32B
    "qwen2_5_72b": 72_706_203_648,  # Qwen/Qwen2.5-72B
    "qwen3_4b": 4_022_468_096,  # Qwen/Qwen3-4B
    "qwen3_0_6b": 596_049_920,  # Qwen/Qwen3-0.6B
    "qwen3_8b": 8_190_735_360,  # Qwen/Qwen3-8B
    "qwen3_32b": 32_762_123_264,  # Qwen/Qwen3-32B
    "gemma_2b": 2_506_172_416,  # google/gemma-2b
    "gemma_7b": 8_537_680_896,  # google/gemma-7b
    "gemma2_27b": 27_227_128_320,  # google/gemma-2-27b
    "gemma2_2b": 2_614_341_888,  # google/gemma-2-2b
    "gemma2_9b": 9_241_705_984,  # google/gemma-2-9b
    "gemma3_1b": 999_885_952,  # google/gemma-3-1b-pt
    "gemma3_4b": 3_880_263_168,  # google/gemma-3-4b-pt: 4,300,079,472 less its vision tower
    "gemma3_12b": 11_766_034_176,  # google/gemma-3-12b-pt: 12,187,325,040 less its vision tower
    "gemma3_27b": 27_009_346_304,  # google/gemma-3-27b-pt: 27,432,406,640 less its vision tower
    "mixtral_8x7b": 46_702_792_704,  # mistralai/Mixtral-8x7B-v0.1
    "mixtral_8x22b": 140_620_634_112,  # mistralai/Mixtral-8x22B-v0.1
    "qwen3_30b_a3b": 30_532_122_624,  # Qwen/Qwen3-30B-A3B
    "qwen3_235b_a22b": 235_093_634_560,  # Qwen/Qwen3-235B-A22B
    "gpt_oss_20b": 20_914_757_184,  # openai/gpt-oss-20b
    "gpt_oss_120b": 116_829_156_672,  # openai/gpt-oss-120b
    "deepseek_v2_lite": 15_706_484_224,  # deepseek-ai/DeepSeek-V2-Lite
    "deepseek_v2": 235_741_434_880,  # deepseek-ai/DeepSeek-V2
    "deepseek_v3": 671_026_419_200,  # deepseek-ai/DeepSeek-V3
}
ACTIVE = {  # in billions, as published, the embedding among them
    "mixtral_8x7b": 12.9,  # arXiv:2401.04088
    "mixtral_8x22b": 39.2,  # mistral.ai/news/mixtral-8x22b: 39 B; with one more digit by its shapes
    "qwen3_30b_a3b": 3.35,  # arXiv:2505.09388: 3.3 B
    "qwen3_235b_a22b": 22.2,  # arXiv:2505.09388: 22 B
    "gpt_oss_20b": 4.19,  # arXiv:2508.10925: 3.61 B without the embedding
    "gpt_oss_120b": 5.71,  # 5.13 B without the embedding
    "deepseek_v2_lite": 2.66,
    "deepseek_v2": 21.4,
    "deepseek_v3": 37.55,  # arXiv:2412.19437: 37 B
}


ONE_OF_EACH_SHAPE = [
    "gpt2_124m",
    "llama3_405b",
    "qwen2_5_0_5b",
    "gemma2_9b",
    "gemma3_1b",
    "mixtral_8x7b",
    "deepseek_v2_lite",
]


@pytest.mark.parametrize("name", tiered(PUBLISHED, plain=ONE_OF_EACH_SHAPE))
def test_a_named_model_has_as_many_parameters_as_published(name):
    plan = read_spec(Request((f"model={name}",)), then=plan_run)
    assert plan.num_parameters == PUBLISHED[name]
    if name not in ACTIVE:
        assert plan.num_active_parameters == plan.num_parameters
        return
    assert plan.num_active_parameters == pytest.approx(ACTIVE[name] * 1e9, rel=0.004)
    # 6 FLOPs for each matrix entry that a token meets; the embedding's table is looked up, the rest is attention.
    looked_up = plan.spec.model.vocab_size * plan.spec.model.embed_dim  # pyright: ignore[reportAttributeAccessIssue]
    assert plan.model_flops_per_step is not None
    per_token = plan.model_flops_per_step / plan.spec.tokens_per_step / 6
    assert per_token == pytest.approx(plan.num_active_parameters - looked_up, rel=0.02)


SHAPES = {
    "gpt2": ("model=gpt2_124m", "model.vocab_size=264", "model.num_kv_heads=16", "model.num_positions=16",
             "model.dropout_rate=0.0"),
    "gemma": ("model=gemma3_4b", "model.vocab_size=264", "model.num_layers=5", "model.attention_windows=[5,null]",
              "model.attention_soft_cap=50.0", "model.logit_soft_cap=30.0"),
    "qwen3": ("model=qwen3_0_6b", "model.vocab_size=264"),
    "gpt_oss": ("model=gpt_oss_20b", "model.vocab_size=264", "model.num_layers=3", "model.attention_windows=[5,null]",
                "model.num_experts=4", "model.num_experts_per_token=2", "model.load_balancing_weight=0.0"),
}  # fmt: skip
LAYOUTS = {
    "fsdp": ("sharding=fsdp", "num_microbatches=2", "loss.max_logits_bytes=8192"),
    "fsdp_tensor": ("sharding=fsdp_tensor", "remat=full"),
}
OF_EXPERTS = {
    "padded": ("sharding=fsdp_expert", "mesh.fsdp=4", "mesh.expert=2", "parallel.experts=padded"),
    "gathered": ("sharding=fsdp_expert", "mesh.fsdp=2", "mesh.expert=4", "parallel.experts=gathered"),
    "capacity": ("sharding=fsdp_expert", "mesh.fsdp=4", "mesh.expert=2", "parallel.experts=capacity",
                 "moe.capacity_factor=4.0"),
}  # fmt: skip


@pytest.mark.parametrize("layout", tiered(LAYOUTS, plain=["fsdp"], release=["fsdp_tensor"]))
@pytest.mark.parametrize("shape", tiered(SHAPES, plain=()))
def test_every_gradient_of_every_shape_is_that_of_one_device(shape, layout, tokens, proof):
    check_gradients(plan_of(*SHAPES[shape], *LAYOUTS[layout]), tokens, proof)


@pytest.mark.ci
@pytest.mark.parametrize("exchange", OF_EXPERTS)
def test_biases_of_experts_are_added_once_in_every_exchange(exchange, tokens, proof):
    check_gradients(plan_of(*SHAPES["gpt_oss"], *OF_EXPERTS[exchange]), tokens, proof)


def check_gradients(plan, tokens, proof):
    """Against one device without a plan, with large random weights."""
    step = Gradients(plan, batch_of(tokens[0]))
    if proof.is_known(step.parts):
        return
    leaves, tree = jax.tree.flatten(plan.abstract["params"])
    chance = np.random.default_rng(0)  # biases and scales too, which start at zeros and ones
    params = jax.tree.unflatten(tree, [chance.normal(0, 0.2, x.shape).astype(np.float32) for x in leaves])
    inputs, targets = jnp.asarray(tokens[0][:, :-1]), jnp.asarray(tokens[0][:, 1:])
    expected_loss, expected = jax.jit(jax.value_and_grad(lambda p: reference_loss(plan.model, p, inputs, targets)))(
        params
    )
    loss, gradients = step(params)
    assert loss == pytest.approx(float(expected_loss), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max() + 1e-7), gradients, expected)


@pytest.mark.ci
def test_a_tied_table_is_one_parameter_with_the_gradients_of_both_uses(tokens, proof):
    """Against a model with two tables: their gradients, added."""
    tied, separate = (
        Gradients(plan_of("target=cpu-1", f"model.embeddings={kind}"), batch_of(tokens[0]))
        for kind in ("tied", "separate")
    )
    if proof.is_known(tied.parts, separate.parts):
        return
    params = tied.plan.model.init(jax.random.key(0))
    table = params["embed"]["table_VE"]
    assert "table_VE" not in params["head"]
    _, together = tied(params)
    apart = params | {"head": params["head"] | {"kernel_EV": table.T}}
    _, each = separate(apart)
    expected = each["embed"]["table_VE"] + each["head"]["kernel_EV"].T
    np.testing.assert_allclose(together["embed"]["table_VE"], expected, atol=1e-6)
