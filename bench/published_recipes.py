"""Training runs that others measured and published, declared as overrides, with the XLA options that they set."""

from dataclasses import dataclass, field
from typing import Any, Literal

Options = dict[str, bool | int | str]
MIB = 2**20

MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/main"
TPU_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/blob/main/training/trillium"
LONG_SOURCE = (
    "https://github.com/AI-Hypercomputer/tpu-recipes/blob/main/training/v5p/Llama3.1-8B-LongContext-Maxtext/"
    "cluster_toolkit/README.md"
)
TORCHTITAN = "https://github.com/pytorch/torchtitan/blob"

# XLA options of recipes: MaxText/configs/v5e/*.sh and v5p/*.sh, benchmarks/xla_flags_library.py. Of the last, libtpu
# 0.0.42.1 has no xla_sc_disjoint_spmem.
ASYNC_GATHERS: Options = {
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
}
DATA_PARALLEL: Options = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
}
V5E: Options = DATA_PARALLEL | ASYNC_GATHERS
V5P: Options = V5E | {
    "xla_tpu_megacore_fusion_allow_ags": False,
    "xla_enable_async_collective_permute": True,
    "xla_tpu_enable_ag_backward_pipelining": True,
}
# Left out of v6e's recipes: xla_tpu_scoped_vmem_limit_kib, with which a compile takes over 20 minutes on two cores.
# What it makes faster by the compiler's own estimate is bounded anyway (docs/schedule.md).
SPARSE_CORE: Options = {
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_enable_all_reduce_offload_tracing": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_enable_instruction_fusion": False,
    "xla_sc_disable_megacore_partitioning": True,
}
SCATTER_LAYOUT: Options = {
    "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
    "xla_tpu_assign_all_reduce_scatter_layout": True,
}
HOST_OFFLOAD: Options = {
    "xla_tpu_enable_all_experimental_scheduler_features": True,
    "xla_tpu_enable_scheduler_memory_pressure_tracking": True,
    "xla_tpu_host_transfer_overlap_limit": 24,
    "xla_tpu_aggressive_opt_barrier_removal": "ENABLED",
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
    "xla_tpu_enable_ag_backward_pipelining": True,
    "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
    "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    "xla_max_concurrent_host_send_recv": 100,
    "xla_tpu_scheduler_percent_shared_memory_limit": 100,
    "xla_latency_hiding_scheduler_rerun": 2,
}
V6E_DENSE: Options = ASYNC_GATHERS | SCATTER_LAYOUT | DATA_PARALLEL | SPARSE_CORE | HOST_OFFLOAD
# cluster_toolkit/run_recipe.sh of the recipe for long contexts on v5p; xla_tpu_scoped_vmem_limit_kib is left out
LONG_CONTEXT: Options = ASYNC_GATHERS | {
    "xla_enable_async_collective_permute": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
}
V6E_EXPERTS: Options = ASYNC_GATHERS | DATA_PARALLEL
# tpu-recipes, training/v5p/DeepSeek3-671B-MaxText. Rows that are not compiled have xla_tpu_scoped_vmem_limit_kib, too
V5P_EXPERTS: Options = DATA_PARALLEL | SCATTER_LAYOUT | HOST_OFFLOAD | {
    "xla_tpu_scoped_vmem_limit_kib": 81920,
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_megacore_fusion_allow_ags": False,
    "xla_enable_async_collective_permute": True,
}  # fmt: skip
V4: Options = {"xla_enable_async_all_gather": True}
TPU7X: Options = {
    "xla_tpu_bf16_emission_mode": "NATIVE_EMISSION",
    "xla_tpu_enable_sparse_core_reduce_scatter_v2": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_enable_all_gather_offload_tracing": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_tpu_use_single_sparse_core_for_all_gather_offload": True,
    "xla_sc_disable_megacore_partitioning": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
    "xla_enable_async_all_gather": True,
    "xla_tpu_prefer_async_allgather_to_allreduce": True,
}
LARGE_VMEM: Options = {"xla_tpu_scoped_vmem_limit_kib": 65536}
# MaxText/configs/a3/llama_2_7b/2vm.sh; those that jaxlib 0.10.2 no longer has, or has as defaults, are left out
GPU: Options = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 67108864,
    "xla_gpu_all_gather_combine_threshold_bytes": 134217728,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 67108864,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
}
LOOP_UNROLLED_TWICE: Options = {"xla_gpu_enable_while_loop_double_buffering": True}
GPU_LATER: Options = GPU | {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
}


def gpu_options(reduced: int, gathered: int, scattered: int) -> Options:
    """Returns the options of the later GPU recipes, by the bytes up to which collectives are combined."""
    combined = {
        "xla_gpu_all_reduce_combine_threshold_bytes": reduced,
        "xla_gpu_all_gather_combine_threshold_bytes": gathered,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": scattered,
    }
    return GPU_LATER | combined


# What PyTorch's FSDP does by itself: it sends beside compute, gathers and reductions at the same time
OVERLAPPED: Options = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}


@dataclass(frozen=True)
class Recipe:
    """A published training configuration. half: a constant may be chosen by rows that are `fitted`, never by those that
    are `checked`. tokens_per_second: of one chip, None where only MFU is published. published_mfu: as its authors count
    it, None where they give none. remat: what the recipe calls its own."""

    half: Literal["fitted", "checked"]
    name: str
    source: str
    tokens_per_second: float | None
    published_mfu: float | None
    remat: str
    overrides: tuple[str, ...]
    options: Options = field(default_factory=dict)

    @property
    def declaration(self) -> tuple[str, ...]:
        """The overrides, with the recipe's XLA options instead of the chip's default preset."""
        if not self.options:
            return self.overrides
        options = ", ".join(f"{name}: {_typed(value)}" for name, value in self.options.items())
        return (*self.overrides, "overlap.flag_presets=[]", f"compiler_options={{{options}}}")


def _typed(value: bool | int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def declared(
    model: str, target: str, sequences_per_chip: float, num_chips: int, length: int, remat: str, *others: str
) -> tuple[str, ...]:
    return (
        f"model={model}", f"target={target}", f"global_batch_size={sequences_per_chip * num_chips:g}",
        f"sequence_length={length}", f"remat={remat}", "data=synthetic", *others,
    )  # fmt: skip


def maxtext(*words: Any) -> tuple[str, ...]:
    """As `declared`. MaxText casts weights to bfloat16 before it multiplies, so XLA sums their gradients in bfloat16,
    too: the all-reduces of its compiled steps that are exposed most are all of that type (bench/peer.jsonl)."""
    return (*declared(*words), BFLOAT16_REDUCTION)


def default_model(embed_dim: int, num_heads: int, mlp_dim: int, num_layers: int) -> tuple[str, ...]:
    """MaxText's model without a name, at the scale of `global_parameter_scale`: Llama 2's with other dimensions."""
    return (
        f"model.embed_dim={embed_dim}", f"model.num_heads={num_heads}", f"model.num_kv_heads={num_heads}",
        f"model.mlp_dim={mlp_dim}", f"model.num_layers={num_layers}",
    )  # fmt: skip


SCALE_16 = default_model(4096, 64, 28672, 32)
SCALE_32 = default_model(8192, 64, 28672, 32)
SCALE_64 = default_model(8192, 64, 28672, 64)
FSDP = "sharding=fsdp"
BFLOAT16_REDUCTION = "precision.gradient_reduction=bfloat16"
# MaxText splits what lies between the layers over the tensor axis, too
TENSOR_4 = (
    "sharding=fsdp_tensor", "mesh.tensor=4",
    "sharding.activations=[{logical: [batch], mesh: [replica, data, fsdp]}, "
    "{logical: [vocab, mlp, heads, kv_heads, embed], mesh: [tensor]}, "
    "{logical: [length, sequence_parallel_length, head_dim], mesh: []}]",
)  # fmt: skip
LLAMA2_13B = default_model(5120, 40, 13824, 40)
GRAND_TETON = ("target.chip.hbm_bytes_per_second=2.4e12", "target.chip.power_limit_watts=500")  # its H100 has HBM2e
QKV_OUT = "remat.names=[queries,keys,values,attention_residual]"  # query_proj, key_proj, value_proj, out_proj there

H100_SOURCE = f"{TORCHTITAN}/31a17bfdb70bab6f62a13d21816a5339b911d6e3/benchmarks/llama3_h100_202412_torchtitan.md"
H100_TP_SOURCE = (
    f"{TORCHTITAN}/5ecb74e54b8d28abf605a248b7dec5f1876b08d8/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
)
A100_SOURCE = f"{TORCHTITAN}/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md"
FMS_FSDP = "https://github.com/foundation-model-stack/fms-fsdp"  # nodes with 400 Gb/s (A100), 800 (H100)
GPU_RECIPES = "https://github.com/AI-Hypercomputer/gpu-recipes/blob/main/training"
DGXC = "https://github.com/NVIDIA/dgxc-benchmarking/tree/main/maxtext"  # README_70b.md, configure.sh: 25.01 and later
IRONWOOD = "https://github.com/AI-Hypercomputer/tpu-recipes/blob/main/training/ironwood/README.md"
DEEPSEEK_V5P = "https://github.com/AI-Hypercomputer/tpu-recipes/blob/main/training/v5p/DeepSeek3-671B-MaxText/README.md"
MEGATRON_BRIDGE = (
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/067f987df03b8355b03192d88d70f1709fedf51a/docs/"
    "performance-summary-archive.md"  # gpt-oss: 26.04.01; others: 25.11
)
AXLEARN = "https://github.com/apple/axlearn/blob/main/axlearn/experiments/text/gpt/fuji.py"
HONEYCRISP = (
    "https://github.com/apple/axlearn/blob/03cfa39630e8f38215d2f56435b0fb42c0be6801/axlearn/experiments/text/gpt/"
    "honeycrisp.py"
)
AUTOMODEL = (
    "https://github.com/NVIDIA-NeMo/Automodel/blob/01926a5c443b7979463c73341bf64adf79de638e/docs/performance-summary.md"
)
LLAMA_3 = "https://arxiv.org/abs/2407.21783"  # section 3.3.2 and table 4
A3_SOURCE = f"{MAXTEXT}/MaxText/configs/a3/llama_2_7b/README.md"
V4_SOURCE, V5E_SOURCE, V5P_SOURCE = (f"{MAXTEXT}/MaxText/configs/{chip}/README.md" for chip in ("v4", "v5e", "v5p"))
TIERS = "https://maxtext.readthedocs.io/en/latest/reference/models/tiering.html"
BESIDE_BACKWARD = "overlap.layers.reduce_in_backward=true"  # layer by layer
FMS_A100, FMS_H100 = ("target.network.node_bytes_per_second=5e10",), ("target.network.node_bytes_per_second=1e11",)
A3_NETWORK = "target.network.node_bytes_per_second=1e11"  # A3 High: 4 adapters of 200 Gb/s for its GPUs
A3_MEGA = "target.network.node_bytes_per_second=2e11"  # 8 adapters of 200 Gb/s for its GPUs
# MaxText's policies, by our names: save_qkv_proj; save_dot_with_context_except_mlp; minimal_flash
QKV = "remat.names=[queries,keys,values]"
ATTENTION = "remat.names=[queries,keys,values,attended,attention_residual]"
ALL_MATMULS = "remat.names=[queries,keys,values,attended,attention_residual,mlp_up,mlp_gate]"
LAYER_INPUTS = "remat.names=[layer_input,queries,keys,values,attention_residual]"
# 22b.sh has two matrices in its MLP and heads of 256: MaxText's defaults of 2023, at which it has 22 B parameters
SCALE_22_V4 = (
    *default_model(6144, 24, 24576, 48),
    "model.head_dim=256",
    "model.mlp=plain",
    "model.mlp_activation=relu",
)
LLAMA_34B = (*default_model(8192, 64, 22016, 48), "model.num_kv_heads=8")
SCALE_128 = default_model(8192, 128, 57344, 64)
MISTRAL_7B = ("model.vocab_size=32000", "model.rope_theta=10000.0")
TENSOR_8 = ("sharding=fsdp_tensor", "mesh.tensor=8", TENSOR_4[2])
HONEYCRISP_3B = (
    "model.embed_dim=3072", "model.num_heads=24", "model.num_kv_heads=8", "model.mlp_dim=8064", "model.num_layers=26",
    "model.qk_norm=rms", "model.vocab_size=49152", "model.embeddings=tied",
)  # fmt: skip


def a3(num_nodes: int, mfu: float) -> Recipe:
    """MaxText's Llama 2 7B on Google's A3 machines: fully sharded in a node, replicas over nodes."""
    target, others = f"h100-{8 * num_nodes}", (FSDP,)
    if num_nodes > 1:
        others = ("sharding=hsdp", f"mesh.replica={num_nodes}", BESIDE_BACKWARD, A3_NETWORK)
    return Recipe("checked", f"MaxText Llama 2 7B, {8 * num_nodes} H100", A3_SOURCE, None, mfu, "minimal_flash",
                  maxtext("llama2_7b", target, 4, 8 * num_nodes, 4096, "save_dots", *others), GPU)  # fmt: skip


def long_context(half: Literal["fitted", "checked"], length: int, seconds: float, mfu: float, *remat: str) -> Recipe:
    """MaxText's Llama 3.1 8B with 16 heads of 256, 2,097,152 tokens in a step of 64 chips: 16,384 tokens of a sequence
    on each device of its ring."""
    context = length // 16384
    declared_as = (
        "model=llama3_8b", "model.num_heads=16", "model.num_kv_heads=4", "model.head_dim=256", "target=v5p-128",
        "sharding=fsdp_context", f"mesh.fsdp={64 // context}", f"mesh.context={context}", "parallel.context=ring",
        f"global_batch_size={2**21 // length}", f"sequence_length={length}", *remat, "data=synthetic",
        BFLOAT16_REDUCTION,
    )  # fmt: skip
    name = f"MaxText Llama 3.1 8B, {length // 1024}k tokens, v5p-128"
    return Recipe(half, name, LONG_SOURCE, 2**21 / 64 / seconds, mfu, "custom", declared_as, LONG_CONTEXT)


def gemma3(half: Literal["fitted", "checked"], num_slices: int, tokens_per_second: float) -> Recipe:
    """MaxText's Gemma 3 12B of 32k tokens, without options of XLA that overlap anything. Its loss by slices chose
    v6e's `slice_wait`."""
    over = (FSDP,) if num_slices == 1 else ("sharding=hsdp", f"target.num_slices={num_slices}")
    slices = f"{num_slices} x " if num_slices > 1 else ""
    folder = f"Gemma3-12B-MaxText/{f'{num_slices}x-' if num_slices > 1 else ''}v6e-256"
    return Recipe(half, f"MaxText Gemma 3 12B, 32k tokens, {slices}v6e-256", f"{TPU_RECIPES}/{folder}/README.md",
                  tokens_per_second, None, "custom",
                  maxtext("gemma3_12b", "v6e-256", 1, 256 * num_slices, 32768, "full", *over),
                  {"xla_tpu_scoped_vmem_limit_kib": 122880})  # fmt: skip


def honeycrisp(num_chips: int, seconds: float) -> Recipe:
    """AXLearn's Honeycrisp 3B on v5p: data parallel, 8 Mi tokens in a step. It has the early Pallas kernel of
    attention, whose figures these steps chose."""
    return Recipe("fitted", f"AXLearn Honeycrisp 3B, v5p, {num_chips} chips", HONEYCRISP, 2**23 / num_chips / seconds,
                  None, "dots_saveable",
                  maxtext("llama3_8b", f"v5p-{2 * num_chips}", 2048 / num_chips, num_chips, 4096, "save_dots",
                          "sharding=ddp", *HONEYCRISP_3B, "target.chip.attention=early_pallas_v5p"),
                  DATA_PARALLEL)  # fmt: skip


def automodel(name: str, model: str, num_gpus: int, sequences: int, of_microbatch: int, tokens_per_second: float,
              own_remat: str, remat: str) -> Recipe:  # fmt: skip
    """NeMo AutoModel's steps of experts, which a balanced gate gives equal numbers of tokens. A step without
    recomputation is declared as `minimal` with the rows of experts, since `none` does not fit."""
    more = ["moe.max_imbalance=1", f"num_microbatches={sequences // num_gpus // of_microbatch}"]
    more += ["remat.names=[expert_input]"] if remat == "minimal" else []
    return Recipe("checked", f"NeMo AutoModel {name}, {num_gpus} H100", AUTOMODEL, tokens_per_second, None, own_remat,
                  declared(model, f"h100-{num_gpus}", sequences / num_gpus, num_gpus, 4096, remat,
                           "sharding=fsdp_expert", f"mesh.expert={num_gpus}", *more))  # fmt: skip


def megatron(name: str, model: str, gpus: str, sequences: int, mesh: tuple[int, int, int], of_microbatch: int,
             tokens_per_second: float) -> Recipe:  # fmt: skip
    """Megatron Bridge's steps of experts in bfloat16, which a balanced gate gives equal numbers of tokens. Norms and
    activations are computed again there, so `minimal` with the rows of experts is nearest. mesh: the stages, the chunks
    of each, and the devices along `expert`."""
    (stages, chunks, experts), (chip, count) = mesh, gpus.split("-")
    num_gpus, in_stage = int(count), int(count) // stages
    more = [f"num_microbatches={sequences // in_stage // of_microbatch}"]
    if stages > 1:
        more += [f"mesh.stage={stages}", f"mesh.fsdp={in_stage // experts}"]
        more += ["pipeline=interleaved_1f1b", f"pipeline.num_chunks={chunks}"] if chunks > 1 else ["pipeline=1f1b"]
    return Recipe("checked", f"Megatron Bridge {name}, {num_gpus} {chip.upper()}", MEGATRON_BRIDGE, tokens_per_second,
                  None, "selective",
                  declared(model, gpus, sequences / num_gpus, num_gpus, 4096, "minimal", "sharding=fsdp_expert",
                           f"mesh.expert={experts}", "moe.max_imbalance=1", "remat.names=[expert_input]",
                           *more))  # fmt: skip


def llama_3(num_gpus: int, teraflops: float) -> Recipe:
    """Llama 3 405B: 2,048 sequences over 16 stages of 8 chunks, the first with the embedding and the last with the
    head. Nothing was recomputed; `none` does not fit here, `minimal` does."""
    replicas = num_gpus // 128
    return Recipe("checked", f"Llama 3 405B, {num_gpus:,} H100", LLAMA_3, None, teraflops / 989.4, "none",
                  declared("llama3_405b", f"h100-{num_gpus}", 2048 / num_gpus, num_gpus, 8192, "minimal",
                           "sharding=fsdp_tensor", "mesh.tensor=8", "mesh.stage=16", f"mesh.fsdp={replicas}",
                           f"num_microbatches={2048 // replicas}", "pipeline=interleaved_1f1b",
                           "pipeline.num_chunks=8", f"pipeline.layers=[0{',1' * 126},0]"))  # fmt: skip


RECIPES = (
    Recipe("fitted", "torchtitan Llama 3.1 8B, 8 H100", H100_SOURCE, 6667, None, "selective op",
           declared("llama3_8b", "h100-8", 2, 8, 8192, "save_dots", FSDP, *GRAND_TETON)),
    Recipe("fitted", "torchtitan Llama 3.1 8B, 128 H100", H100_SOURCE, 6514, None, "selective op",
           declared("llama3_8b", "h100-128", 2, 128, 8192, "save_dots", FSDP, *GRAND_TETON)),
    Recipe("fitted", "torchtitan Llama 3 8B, 64 A100", A100_SOURCE, 2973, 0.582, "selective op",
           declared("llama3_8b", "a100-64", 1, 64, 8192, "save_dots", FSDP)),
    Recipe("fitted", "torchtitan Llama 3 70B, 64 A100", A100_SOURCE, 331, 0.517, "full",
           declared("llama3_70b", "a100-64", 1, 64, 8192, "full", FSDP)),
    Recipe("fitted", "torchtitan Llama 2 13B, 64 A100", A100_SOURCE, 2162, 0.611, "no",
           declared("llama2_7b", "a100-64", 2, 64, 4096, "save_dots", FSDP, *LLAMA2_13B)),
    Recipe("fitted", "torchtitan Llama 2 70B, 64 A100", A100_SOURCE, 353, 0.505, "full",
           declared("llama2_70b", "a100-64", 2, 64, 4096, "full", FSDP)),
    Recipe("fitted", "fms-fsdp Llama 2 7B, 128 A100", FMS_FSDP, 3760, None, "none",
           declared("llama2_7b", "a100-128", 2, 128, 4096, "save_dots", "sharding=hsdp", "mesh.replica=16",
                    BESIDE_BACKWARD, BFLOAT16_REDUCTION, *FMS_A100), OVERLAPPED),
    Recipe("fitted", "fms-fsdp Llama 2 7B, 96 H100", FMS_FSDP, 7500, None, "none",
           declared("llama2_7b", "h100-96", 2, 96, 4096, "save_dots", "sharding=hsdp", "mesh.replica=12",
                    BESIDE_BACKWARD, BFLOAT16_REDUCTION, *FMS_H100), OVERLAPPED),
    Recipe("fitted", "MaxText 16B, v5e-256", V5E_SOURCE, None, 0.6110, "full",
           maxtext("llama2_7b", "v5e-256", 6, 256, 2048, "full", FSDP, *SCALE_16), V5E),
    Recipe("fitted", "MaxText 32B, v5p-128, its remat", V5P_SOURCE, None, 0.7147, "minimal",
           maxtext("llama2_7b", "v5p-128", 7, 64, 2048, "save_dots", *TENSOR_4, *SCALE_32), V5P),
    Recipe("fitted", "MaxText 32B, v5p-128", V5P_SOURCE, None, 0.7147, "minimal",
           maxtext("llama2_7b", "v5p-128", 7, 64, 2048, "save_names", QKV_OUT, *TENSOR_4, *SCALE_32), V5P),
    Recipe("fitted", "MaxText Llama 2 70B, v5p, 512 chips", TIERS, 692, 0.654, "save_dot_except_mlpwi",
           maxtext("llama2_70b", "v5p-1024", 4, 512, 4096, "save_names", FSDP, QKV_OUT), V5P),
    Recipe("fitted", "MaxText 32B, v5e-256", V5E_SOURCE, None, 0.6686, "full",
           maxtext("llama2_7b", "v5e-256", 4, 256, 2048, "full", FSDP, *SCALE_32), V5E),
    Recipe("fitted", "MaxText 64B, v5p-128", V5P_SOURCE, None, 0.7031, "minimal",
           maxtext("llama2_7b", "v5p-128", 3, 64, 2048, "save_names", QKV_OUT, *TENSOR_4, *SCALE_64), V5P),
    long_context("fitted", 65536, 10.25, 0.673, "remat=save_names", "remat.names=[attended]"),
    long_context("checked", 262144, 26.31, 0.681, "remat=offload", "remat.names=[attended,layer_input]"),
    long_context("checked", 1048576, 95.73, 0.6486, "remat=offload", "remat.names=[attended]"),
    Recipe("fitted", "MaxText Llama 3.1 8B, v6e-256", f"{TPU_RECIPES}/Llama3.1-8B-MaxText/v6e-256/README.md",
           7207.336, 0.4546, "custom, offloaded",
           maxtext("llama3_8b", "v6e-256", 4, 256, 8192, "offload", FSDP, LAYER_INPUTS), V6E_DENSE),
    Recipe("fitted", "MaxText Llama 2 7B, 256 H100",
           f"{GPU_RECIPES}/a3mega/llama-2-7b/maxtext-pretraining-gke/README.md", 10922.973, 503.384 / 989.4,
           "minimal_flash",
           maxtext("llama2_7b", "h100-256", 4, 256, 4096, "save_names", ALL_MATMULS, "sharding=hsdp", "mesh.replica=32",
                   BESIDE_BACKWARD, A3_MEGA, "overlap.layers.unroll=32"), gpu_options(512 * MIB, 128 * MIB, 64 * MIB)),
    Recipe("checked", "MaxText Llama 2 70B, 64 H100", DGXC, 74908.99 / 64, 0.5259, "save_qkv_proj",
           maxtext("llama2_70b", "h100-64", 2, 64, 4096, "save_names", QKV, FSDP),
           gpu_options(2048 * MIB, 2048 * MIB, 32 * MIB) | LOOP_UNROLLED_TWICE),
    Recipe("fitted", "MaxText Llama 3 70B, 128 H100", DGXC, 134752.43 / 128, 0.5120, "save_qkv_proj",
           maxtext("llama3_70b", "h100-128", 2, 128, 8192, "save_names", QKV, FSDP),
           gpu_options(2048 * MIB, 2048 * MIB, 32 * MIB) | LOOP_UNROLLED_TWICE),
    Recipe("checked", "MaxText Llama 3.1 70B, 256 H200",
           f"{GPU_RECIPES}/a3ultra/llama3-1-70b/maxtext-pretraining-gke/README.md", 1055.949, 508.371 / 989.4,
           "save_dot_with_context_except_mlp",
           maxtext("llama3_70b", "h200-256", 2, 256, 8192, "save_names", ATTENTION, "sharding=hsdp", "mesh.replica=2",
                   BESIDE_BACKWARD), gpu_options(2048 * MIB, 2048 * MIB, 16 * MIB) | LOOP_UNROLLED_TWICE),
    Recipe("fitted", "AXLearn 7B v2, 256 H100", AXLEARN, 1024 * 4096 / 256 / 1.78, 0.39, "[qkvo]_proj, context",
           maxtext("llama2_7b", "h100-256", 4, 256, 4096, "save_names", ATTENTION, "sharding=hsdp", "mesh.replica=32",
                   BESIDE_BACKWARD, "model.vocab_size=32768", "model.embeddings=tied"), OVERLAPPED),
    Recipe("checked", "torchtitan Llama 3.1 70B, 256 H100, asynchronous", H100_TP_SOURCE, 652.4, None, "full",
           declared("llama3_70b", "h100-256", 2, 256, 8192, "full", *TENSOR_8[:2], "parallel.matmul=collective_matmul",
                    *GRAND_TETON)),
    a3(1, 492 / 989.4), a3(2, 422 / 989.4), a3(4, 407 / 989.4), a3(8, 409 / 989.4), a3(16, 375 / 989.4),
    Recipe("checked", "torchtitan Llama 3.1 70B, 256 H100", H100_TP_SOURCE, 597, None, "full",
           declared("llama3_70b", "h100-256", 2, 256, 8192, "full", *TENSOR_8[:2], *GRAND_TETON)),
    Recipe("checked", "fms-fsdp Llama 2 13B, 128 A100", FMS_FSDP, 1700, None, "none",
           declared("llama2_7b", "a100-128", 1, 128, 4096, "save_dots", "sharding=hsdp", "mesh.replica=16",
                    BESIDE_BACKWARD, BFLOAT16_REDUCTION, *FMS_A100, *LLAMA2_13B), OVERLAPPED),
    Recipe("checked", "fms-fsdp Llama 34B, 128 A100", FMS_FSDP, 772, None, "full",
           declared("llama2_7b", "a100-128", 8, 128, 4096, "full", FSDP, BFLOAT16_REDUCTION, *FMS_A100, *LLAMA_34B),
           OVERLAPPED),
    Recipe("checked", "fms-fsdp Llama 2 70B, 128 A100", FMS_FSDP, 380, None, "full",
           declared("llama2_70b", "a100-128", 6, 128, 4096, "full", FSDP, BFLOAT16_REDUCTION, *FMS_A100), OVERLAPPED),
    Recipe("checked", "MaxText 22B, v4-128", V4_SOURCE, None, 0.567, "full",
           maxtext("llama2_7b", "v4-128", 13, 64, 2048, "full", FSDP, *SCALE_22_V4), V4),
    Recipe("checked", "MaxText 22B, 2 x v4-128", V4_SOURCE, None, 0.552, "full",
           maxtext("llama2_7b", "v4-128", 13, 128, 2048, "full", "sharding=hsdp", "target.num_slices=2",
                    *SCALE_22_V4), V4),
    Recipe("checked", "MaxText 64B, v5e-256", V5E_SOURCE, None, 0.5990, "full",
           maxtext("llama2_7b", "v5e-256", 2, 256, 2048, "full", FSDP, *SCALE_64), V5E),
    Recipe("checked", "MaxText 16B, 2 x v5e-256", V5E_SOURCE, None, 0.5937, "full",
           maxtext("llama2_7b", "v5e-256", 6, 512, 2048, "full", "sharding=hsdp", "target.num_slices=2", *SCALE_16),
           V5E),
    Recipe("checked", "MaxText 32B, 2 x v5e-256", V5E_SOURCE, None, 0.6481, "full",
           maxtext("llama2_7b", "v5e-256", 4, 512, 2048, "full", "sharding=hsdp", "target.num_slices=2", *SCALE_32),
           V5E),
    Recipe("checked", "MaxText 128B, v5p-256", V5P_SOURCE, None, 0.6868, "minimal",
           maxtext("llama2_7b", "v5p-256", 1, 128, 2048, "save_dots", *TENSOR_8, *SCALE_128), V5P),
    Recipe("checked", "MaxText Llama 3.1 8B, v6e-8", f"{TPU_RECIPES}/Llama3.1-8B-MaxText/v6e-8/README.md",
           7138.890, None, "custom, offloaded",
           maxtext("llama3_8b", "v6e-8", 3, 8, 8192, "offload", FSDP, LAYER_INPUTS), V6E_DENSE),
    Recipe("checked", "MaxText Mistral 7B, v6e-8", f"{TPU_RECIPES}/Mistral-7B-MaxText/README.md", 7776.813, None,
           "custom, offloaded",
           maxtext("llama3_8b", "v6e-8", 6, 8, 8192, "offload", FSDP, LAYER_INPUTS, *MISTRAL_7B), V6E_DENSE),
    Recipe("checked", "MaxText Mixtral 8x7B, v6e-256", f"{TPU_RECIPES}/Mixtral-8x7B-MaxText/README.md", 3645.203, None,
           "custom, offloaded",
           maxtext("mixtral_8x7b", "v6e-256", 12, 256, 4096, "offload", FSDP, LAYER_INPUTS,
                    "parallel.experts=capacity"), V6E_EXPERTS),
    Recipe("checked", "MaxText Llama 3.1 405B, 2 x v6e-256", f"{TPU_RECIPES}/Llama3.1-405B-MaxText/README.md", 149.482,
           None, "custom, offloaded",
           maxtext("llama3_405b", "v6e-256", 1, 512, 8192, "offload", FSDP, "remat.names=[layer_input]",
                    "target.num_slices=2"), ASYNC_GATHERS | HOST_OFFLOAD),
    Recipe("fitted", "AXLearn 7B v2, 4 x v5e-256", AXLEARN, 1024 * 4096 / 1024 / 2.21, 0.46, "dots_saveable",
           maxtext("llama2_7b", "v5e-256", 1, 1024, 4096, "save_dots", "sharding=hsdp", "target.num_slices=4",
                    "mesh.replica=4", "model.vocab_size=32768", "model.embeddings=tied"), DATA_PARALLEL),
    Recipe("checked", "MaxText Mixtral 8x22B, v6e-256", f"{TPU_RECIPES}/Mixtral-8x22B-MaxText/README.md", 1326.307,
           None, "custom, offloaded",
           maxtext("mixtral_8x22b", "v6e-256", 8, 256, 4096, "offload", "sharding=fsdp_expert", "mesh.expert=4",
                    "device_order=[expert:2x2]", LAYER_INPUTS, "parallel.experts=capacity", "precision=bfloat16_pure",
                    "optimizer.moment_dtype=bfloat16"), V6E_EXPERTS),
    Recipe("checked", "MaxText Llama 3.1 70B, v6e-256", f"{TPU_RECIPES}/Llama3.1-70B-MaxText/v6e-256/README.md",
           960.248, 462.297 / 918, "custom, offloaded",
           maxtext("llama3_70b", "v6e-256", 5, 256, 8192, "offload", FSDP,
                    "remat.names=[layer_input,queries,keys,values]"),
           ASYNC_GATHERS | SCATTER_LAYOUT | DATA_PARALLEL | HOST_OFFLOAD),
    Recipe("checked", "MaxText Llama 3.1 70B, 64 Ironwood", IRONWOOD, 2686.98, 1207.05 / 2307, "custom",
           maxtext("llama3_70b", "tpu7x-128", 4, 64, 8192, "save_names", FSDP,
                    "remat.names=[layer_input,queries,keys,values,attended]"), TPU7X),
    Recipe("checked", "MaxText Llama 3.1 70B, 128k tokens, 256 Ironwood", IRONWOOD, 963.03, None, "custom",
           maxtext("llama3_70b", "tpu7x-512", 0.25, 256, 131072, "save_names", "sharding=fsdp_context",
                    "mesh.context=8", "remat.names=[layer_input,queries,keys,values,attended]"), TPU7X | LARGE_VMEM),
    Recipe("checked", "MaxText DeepSeek-V3, 128 Ironwood", IRONWOOD, 2425.75, None, "custom, offloaded",
           maxtext("deepseek_v3", "tpu7x-256", 16, 128, 4096, "offload", FSDP, "remat.names=[layer_input]",
                    "optimizer.moment_dtype=bfloat16"), TPU7X | LARGE_VMEM),
    Recipe("checked", "MaxText DeepSeek-V3, v5p, 512 chips", DEEPSEEK_V5P, 542.108, None, "custom, offloaded",
           maxtext("deepseek_v3", "v5p-1024", 6, 512, 8192, "offload", FSDP,
                    "remat.names=[layer_input,attention_residual]", "moe.tile_rows=512"), V5P_EXPERTS),
    gemma3("checked", 1, 4477.768), gemma3("fitted", 2, 4204.799), gemma3("fitted", 4, 3905.572),
    honeycrisp(512, 1.48), honeycrisp(1024, 0.8), honeycrisp(2048, 0.47),
    automodel("Qwen3 30B-A3B", "qwen3_30b_a3b", 8, 512, 4, 12040, "full", "full"),
    automodel("gpt-oss 20B", "gpt_oss_20b", 8, 256, 2, 13058, "none", "minimal"),
    automodel("gpt-oss 120B", "gpt_oss_120b", 64, 512, 2, 7626, "none", "minimal"),
    megatron("gpt-oss 120B", "gpt_oss_120b", "gb200-64", 1280, (1, 1, 64), 4, 16640),
    megatron("gpt-oss 120B", "gpt_oss_120b", "gb300-64", 1280, (1, 1, 64), 4, 19200),
    megatron("gpt-oss 120B", "gpt_oss_120b", "h100-64", 1280, (4, 1, 8), 1, 5824),
    megatron("Qwen3 235B-A22B", "qwen3_235b_a22b", "gb200-256", 8192, (8, 3, 32), 1, 4916),
    megatron("Qwen3 235B-A22B", "qwen3_235b_a22b", "gb300-256", 8192, (4, 12, 16), 2, 6131),
    megatron("DeepSeek-V3", "deepseek_v3", "gb200-256", 4096, (4, 4, 64), 1, 3139),
    llama_3(8192, 430), llama_3(16384, 400),
)  # fmt: skip
