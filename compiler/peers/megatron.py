"""Arguments of Megatron-LM, and of the recipes of Megatron Bridge."""

from typing import Any

from ..core.errors import use_one_of
from .mesh import Devices, known_devices
from .parts import note_experts, put_matmuls, put_moments_on_host, put_values
from .reading import NOTHING, PeerReading, in_full

_BALANCE = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")
_UNKNOWN = (None, "None", "")
_STRATEGIES = {"no_shard": "no", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "fsdp"}
_COUNTS = {"aux_loss": "microbatch", "seq_aux_loss": "microbatch", "global_aux_loss": "global", "none": "microbatch"}
_CONTEXT = {"p2p": "ring", "all_gather": "all_gather", "a2a": "ulysses"}


def read_megatron(reading: PeerReading) -> None:
    """Puts the overrides of Megatron's arguments."""
    _put_model(reading)
    gpu, count = reading.text("gpu"), reading.value("num_gpus")
    named = f"{gpu}-{count}" if gpu and count not in _UNKNOWN else ""
    devices = known_devices(reading, named, "num_gpus", 1)
    if devices is None and not reading.target and not named:
        size = f": it starts {count}" if count not in _UNKNOWN else ""
        reading.refuse("", f"nothing names the GPUs{size}", f"add target=NAME, such as target=h100-{count or 64}")
    sizes = _sizes(reading, devices)
    _put_batch(reading, devices, sizes)
    _put_remat(reading)
    reading.put("data=synthetic", "of the step; declare your own for a run, such as data=jsonl (docs/data.md)")
    if devices is not None:
        _put_mesh(reading, sizes)
    _put_precision(reading)
    _put_optimizer(reading, devices)


def _given(reading: PeerReading, key: str) -> bool:
    return reading.value(key) not in _UNKNOWN


def _needed(reading: PeerReading, key: str) -> int:
    """Returns a whole number that a declaration must give."""
    if not _given(reading, key):
        reading.refuse(key, "is not given, and has no default", f"add --{key.replace('_', '-')} N")
        return 1
    return reading.whole(key)


def _put_model(reading: PeerReading) -> None:
    tables = reading.peer.tables
    if _given(reading, "model_recipe_name"):
        name = reading.text("model_recipe_name")
        if name not in tables["models"]:
            reading.refuse("model_recipe_name", f"Meshloom does not have {name}", use_one_of(name, tables["models"]))
            return
        option, *others = tables["models"][name]
        for word in (f"model={option}", *others):
            reading.put(word, reading.said("model_recipe_name"))
        if _given(reading, "num_layers"):
            reading.put(f"model.num_layers={reading.whole('num_layers')}", reading.said("num_layers"))
        if any(map(reading.is_given, _BALANCE)):
            _put_balance(reading)
        return
    learned = reading.text("position_embedding_type") == "learned_absolute"
    experts = _given(reading, "num_experts")
    option = "mixtral_8x7b" if experts else "gpt2_124m" if learned else "llama2_7b"
    reading.put(f"model={option}", reading.said("position_embedding_type", "num_experts"))
    width, heads, layers = (_needed(reading, key) for key in ("hidden_size", "num_attention_heads", "num_layers"))
    gated, grouped = reading.flag("swiglu"), reading.flag("group_query_attention")
    hidden_key = "moe_ffn_hidden_size" if experts and _given(reading, "moe_ffn_hidden_size") else "ffn_hidden_size"
    hidden = 4 * width if not gated else int(4 * width * 2 / 3 / 64) * 64
    hidden = reading.whole(hidden_key) if _given(reading, hidden_key) else hidden
    head = reading.whole("kv_channels") if _given(reading, "kv_channels") else width // max(heads, 1)
    groups = reading.whole("num_query_groups") if grouped else heads
    for name, value, key in (
        ("embed_dim", width, "hidden_size"), ("num_layers", layers, "num_layers"),
        ("num_heads", heads, "num_attention_heads"), ("num_kv_heads", groups, "num_query_groups"),
        ("head_dim", head, "kv_channels"), ("mlp_dim", hidden, hidden_key),
    ):  # fmt: skip
        reading.put(f"model.{name}={value}", reading.said(key) if _given(reading, key) else f"hidden_size={width}")
    _put_parts(reading, learned=learned, gated=gated, experts=experts)
    _put_vocabulary(reading)


def _put_parts(reading: PeerReading, *, learned: bool, gated: bool, experts: bool) -> None:
    """Puts what a layer is made of."""
    mlp = "gated" if gated else "plain"
    activation = "silu" if gated else "relu_squared" if reading.flag("squared_relu") else "gelu"
    if activation == "relu_squared":
        reading.refuse("squared_relu", "Meshloom has no squared ReLU", "leave it out, for GELU")
    if experts and not gated:
        reading.refuse("swiglu", "experts of Meshloom have gated MLPs", "add --swiglu")
    if not experts:
        reading.put(f"model.mlp={mlp}", reading.said("swiglu"))
        reading.put(f"model.mlp_activation={activation}", reading.said("swiglu"))
    norm = reading.one_of("normalization", {"LayerNorm": "layer", "RMSNorm": "rms"})
    if norm:
        reading.put(f"model.norm={norm}", reading.said("normalization"))
        reading.put(f"model.norm_epsilon={in_full(reading.number('norm_epsilon'))}", reading.said("norm_epsilon"))
    biases = "none" if reading.flag("disable_bias_linear") else "all"
    if biases == "none" and reading.flag("add_qkv_bias"):
        biases = "qkv"
    reading.put(f"model.biases={biases}", reading.said("disable_bias_linear", "add_qkv_bias"))
    tied = "separate" if reading.flag("untie_embeddings_and_output_weights") else "tied"
    reading.put(f"model.embeddings={tied}", reading.said("untie_embeddings_and_output_weights"))
    if learned:
        positions = _needed(reading, "max_position_embeddings")
        reading.put(f"model.num_positions={positions}", reading.said("max_position_embeddings"))
    elif reading.text("position_embedding_type") != "rope":
        what = f"Meshloom has no positions of the kind {reading.text('position_embedding_type')} here"
        reading.refuse("position_embedding_type", what, "use rope or learned_absolute")
    else:
        reading.put(f"model.rope_theta={in_full(reading.number('rotary_base'))}", reading.said("rotary_base"))
    if reading.flag("qk_layernorm"):
        reading.put("model.qk_norm=rms", reading.said("qk_layernorm"))
    if experts:
        reading.put(f"model.num_experts={reading.whole('num_experts')}", reading.said("num_experts"))
        per_token = reading.whole("moe_router_topk")
        reading.put(f"model.num_experts_per_token={per_token}", reading.said("moe_router_topk"))
        _put_router(reading)
        _put_balance(reading)
    if reading.is_given("init_method_std"):
        deviation = in_full(reading.number("init_method_std"))
        reading.put(f"model.initializer_stddev={deviation}", reading.said("init_method_std"))
    dropped = reading.number("hidden_dropout")
    reading.put(f"model.dropout_rate={in_full(dropped)}", reading.said("hidden_dropout"))
    if reading.number("attention_dropout"):
        reading.notes.append("attention_dropout: attention weights are not dropped here; residuals and embeddings are")


def _put_router(reading: PeerReading) -> None:
    """Puts how tokens choose their experts, where the declaration says it."""
    scores, biased = "moe_router_score_function", "moe_router_enable_expert_bias"
    if reading.is_given(scores):
        kind = reading.one_of(scores, {"softmax": "softmax", "sigmoid": "sigmoid"})
        reading.put(f"model.router_scores={kind}", reading.said(scores))
    if reading.is_given("moe_router_pre_softmax") and reading.text(scores) == "softmax":
        weights = "scores" if reading.flag("moe_router_pre_softmax") else "normalized"
        reading.put(f"model.router_weights={weights}", reading.said("moe_router_pre_softmax"))
    if _given(reading, "moe_router_topk_scaling_factor"):
        scale = in_full(reading.number("moe_router_topk_scaling_factor"))
        reading.put(f"model.router_scale={scale}", reading.said("moe_router_topk_scaling_factor"))
    for ours, key in (
        ("num_expert_groups", "moe_router_num_groups"),
        ("num_groups_per_token", "moe_router_group_topk"),
    ):
        if _given(reading, key):
            reading.put(f"model.{ours}={reading.whole(key)}", reading.said(key))
    if reading.flag(biased):
        rate = in_full(reading.number("moe_router_bias_update_rate"))
        reading.put(f"model.router_bias_update_rate={rate}", reading.said("moe_router_bias_update_rate", biased))


def _put_balance(reading: PeerReading) -> None:
    """Puts the auxiliary losses of routers."""
    kind, kind_key, weight_key = reading.text(_BALANCE[0]), *_BALANCE[:2]
    counts = reading.one_of(kind_key, _COUNTS)
    weight = 0.0 if kind == "none" else reading.number(weight_key)
    reading.put(f"model.load_balancing_weight={in_full(weight)}", reading.said(weight_key, kind_key))
    if counts == "global" and weight:
        reading.put("model.load_balancing_counts=global", reading.said(kind_key))
        what = "here a loss has the counts of the whole global batch before, and there of the microbatches so far"
        reading.notes.append(f"{kind_key}: {what}")
    elif kind == "seq_aux_loss" and weight:
        reading.notes.append(f"{kind_key}: the loss counts the tokens of a microbatch here, and of a sequence there")
    penalty = reading.number("moe_z_loss_coeff") if _given(reading, "moe_z_loss_coeff") else 0.0
    reading.put(f"model.router_z_loss_weight={in_full(penalty)}", reading.said("moe_z_loss_coeff"))


def _put_vocabulary(reading: PeerReading) -> None:
    known = reading.peer.tables["vocabularies"]
    size = reading.whole("vocab_size") if _given(reading, "vocab_size") else None
    if size is None:
        size = known.get(reading.text("tokenizer_type"))
    if size is None and reading.is_given("vocab_file"):
        size = known["GPT2BPETokenizer"]
    if size is None:
        reading.refuse("vocab_size", "is not given, and only its tokenizer knows it", "add --vocab-size N")
        return
    step = reading.count("make_vocab_size_divisible_by") * reading.count("tensor_model_parallel_size")
    padded = -(-size // step) * step
    because = f"{reading.said('vocab_size', 'tokenizer_type')}, a multiple of {step}"
    reading.put(f"model.vocab_size={padded}", because)


def _sizes(reading: PeerReading, devices: Devices | None) -> dict[str, int]:
    """Returns the sizes of Megatron's groups. data: of devices with other tokens, experts' devices among them."""
    keys = {"tensor": "tensor_model_parallel_size", "stage": "pipeline_model_parallel_size",
            "context": "context_parallel_size", "expert": "expert_model_parallel_size"}  # fmt: skip
    sizes = {axis: reading.count(key) for axis, key in keys.items()}
    others = sizes["tensor"] * sizes["stage"] * sizes["context"]
    sizes["data"] = 0
    if devices is not None:
        if devices.total % others:
            what = f"tensor, pipeline and context parallelism are {others} together, and there are {devices.total} GPUs"
            reading.refuse("tensor_model_parallel_size", what, "correct them, or the target")
            return sizes
        sizes["data"] = devices.total // others
        if sizes["data"] % sizes["expert"]:
            what = f"is {sizes['expert']}, and Meshloom's expert axis takes devices from the {sizes['data']} of data"
            reading.refuse("expert_model_parallel_size", what, "use a divisor of them")
    if _given(reading, "expert_tensor_parallel_size"):
        given = reading.whole("expert_tensor_parallel_size")
        if given != sizes["tensor"]:
            what = f"is {given}, and other layers have {sizes['tensor']}: experts have the same here"
            reading.refuse("expert_tensor_parallel_size", what, "leave it out")
    return sizes


def _put_batch(reading: PeerReading, devices: Devices | None, sizes: dict[str, int]) -> None:
    length = reading.value("seq_length")
    if length in _UNKNOWN and _given(reading, "model_recipe_name"):
        family = reading.text("model_recipe_name").split("_")[0]
        length = reading.peer.tables["sequence_lengths"].get(family)
        if length:
            reading.put(f"sequence_length={length}", f"model_recipe_name={reading.text('model_recipe_name')}")
    if length in _UNKNOWN:
        _needed(reading, "seq_length")
    elif reading.is_given("seq_length"):
        reading.put(f"sequence_length={reading.whole('seq_length')}", reading.said("seq_length"))
    micro = _needed(reading, "micro_batch_size")
    if devices is None or not sizes["data"]:
        return
    step = micro * sizes["data"]
    total = reading.whole("global_batch_size") if _given(reading, "global_batch_size") else step
    if step < 1 or total % step:
        what = f"is {total}, no multiple of {micro} sequences on each of {sizes['data']} data-parallel devices"
        reading.refuse("global_batch_size", what, f"use a multiple of {max(step, 1)}")
        return
    reading.put(f"global_batch_size={total}", reading.said("global_batch_size", "micro_batch_size"))
    if total // step > 1:
        because = f"{reading.said('micro_batch_size')}, {sizes['data']} data-parallel devices"
        reading.put(f"num_microbatches={total // step}", because)


def _put_remat(reading: PeerReading) -> None:
    granularity = reading.text("recompute_granularity")
    granularity = "" if granularity == "None" else granularity
    if granularity == "full":
        method = reading.text("recompute_method")
        each = reading.whole("recompute_num_layers") if _given(reading, "recompute_num_layers") else 1
        if method == "block" or each != 1:
            what = f"{method} of {each} layers: Meshloom has one policy for all layers of a stack"
            reading.refuse("recompute_method", what, "use uniform of 1 layer, or leave recompute_granularity out")
        reading.put("remat=full", reading.said("recompute_granularity", "recompute_method", "recompute_num_layers"))
        return
    if granularity not in ("", "selective"):
        reading.refuse("recompute_granularity", f"there is no '{granularity}'", "use full or selective")
        return
    modules = reading.value("recompute_modules")
    modules = modules if isinstance(modules, list) else str(modules or "").split()
    others = [name for name in modules if name not in ("core_attn", "None")]
    if others:
        what = f"{', '.join(others)}: Megatron recomputes these parts of a layer"
        fix = "leave it out, and choose remat=by_name with remat.choices here"
        reading.refuse("recompute_modules", what, fix)
    reading.put("remat=none", reading.said("recompute_granularity", "recompute_activations", "recompute_modules"))
    if granularity or reading.flag("recompute_activations"):
        reading.notes.append("selective recomputation of attention: its kernels recompute by themselves here")


def _put_mesh(reading: PeerReading, sizes: dict[str, int]) -> None:
    data, expert, context, tensor, stage = (sizes[axis] for axis in ("data", "expert", "context", "tensor", "stage"))
    strategy = reading.one_of("data_parallel_sharding_strategy", _STRATEGIES)
    because = reading.said("data_parallel_sharding_strategy")
    if strategy == "no" and reading.flag("use_distributed_optimizer"):
        strategy, because = "zero1", reading.said("use_distributed_optimizer")
    if strategy == "no" and reading.is_given("model_recipe_name"):
        strategy, because = "zero1", "recipes of Megatron Bridge have use_distributed_optimizer"
    if strategy == "fsdp":
        options = {"fsdp_expert": expert > 1, "fsdp_context": context > 1, "fsdp_tensor": tensor > 1, "fsdp": True}
        reading.put(f"sharding={next(option for option, fits in options.items() if fits)}", because)
    else:
        reading.put(
            f"sharding={'zero2' if strategy == 'zero2' else 'zero1' if strategy == 'zero1' else 'ddp'}", because
        )
        axes = [
            axis
            for axis, size in (("data", 2), ("context", context), ("expert", expert), ("tensor", tensor))
            if size > 1
        ]
        reading.put(f"sharding.mesh_axes=[replica,{','.join(axes)}]", "the groups of devices")
        whole = "parameters are whole on each device, but for tensor and expert parallelism"
        reading.put(
            "sharding.parameters=[{logical: [experts], mesh: [expert]}, "
            "{logical: [vocab, mlp, heads, kv_heads], mesh: [tensor]}, "
            "{logical: [embed, layers, head_dim], mesh: []}]",
            whole,
        )
        if strategy in ("zero1", "zero2"):
            split = [axis for axis in axes if axis in ("data", "context", "expert")]
            rules = [("embed", split)]
            if expert > 1:  # of experts, which lie along expert already, `embed` takes the other axes
                rules = [("experts", ["expert"]), *rules, ("embed", [axis for axis in split if axis != "expert"])]
            shown = ", ".join(f"{{logical: [{name}], mesh: [{', '.join(each)}]}}" for name, each in rules)
            reading.put(f"sharding.optimizer=[{shown}]", because)
        reading.put("sharding.on_replicated=allow", whole)
    keys = {"stage": "pipeline_model_parallel_size", "context": "context_parallel_size",
            "expert": "expert_model_parallel_size", "tensor": "tensor_model_parallel_size"}  # fmt: skip
    for axis, key in keys.items():
        if (size := sizes[axis]) > 1:
            reading.put(f"mesh.{axis}={size}", reading.said(key))
    if strategy != "fsdp" and context * expert * tensor * stage == 1 and data < 2:
        reading.put("mesh.data=1", "one device of data")
    if tensor > 1 and not reading.flag("sequence_parallel") and not reading.is_given("model_recipe_name"):
        note = "sequence_parallel=false: what lies between the layers is split over their length all the same"
        reading.notes.append(note)
    if tensor > 1 and reading.flag("tp_comm_overlap"):
        reading.put("parallel.matmul=collective_matmul", reading.said("tp_comm_overlap"))
    if context > 1:
        way = reading.one_of("cp_comm_type", _CONTEXT)
        if way == "ring" and stage > 1:
            reading.notes.append("cp_comm_type=p2p: no ring runs inside of stages here; the plan chooses another way")
        elif way:
            reading.put(f"parallel.context={way}", reading.said("cp_comm_type"))
    if _given(reading, "moe_expert_capacity_factor"):
        reading.put("parallel.experts=capacity", reading.said("moe_expert_capacity_factor"))
        factor = reading.number("moe_expert_capacity_factor")
        reading.put(f"moe.capacity_factor={in_full(factor)}", reading.said("moe_expert_capacity_factor"))
    if stage > 1:
        _put_pipeline(reading, stage)


def _put_pipeline(reading: PeerReading, stage: int) -> None:
    chunks = 1
    if _given(reading, "virtual_pipeline_model_parallel_size"):
        chunks = reading.whole("virtual_pipeline_model_parallel_size")
    elif _given(reading, "num_layers_per_virtual_pipeline_stage"):
        layers, each = reading.model_value("num_layers"), reading.count("num_layers_per_virtual_pipeline_stage")
        if layers % (stage * each):
            what = f"is {each}, which does not divide the {layers} layers of {stage} stages"
            reading.refuse("num_layers_per_virtual_pipeline_stage", what, "use a divisor")
        else:
            chunks = layers // stage // each
    if chunks > 1:
        keys = ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
        reading.put("pipeline=interleaved_1f1b", reading.said(*keys))
        if chunks != 2:
            reading.put(f"pipeline.num_chunks={chunks}", reading.said(*keys))


def _put_precision(reading: PeerReading) -> None:
    compute = reading.text("compute_dtype")
    scales = reading.peer.tables["compute_dtypes"].get(compute)
    if compute not in _UNKNOWN and scales is None:
        what = f"Meshloom has no {compute}: it trains in bfloat16, float16, float32 and float8 with scales for tensors"
        reading.refuse("compute_dtype", what, "to import the program without it, add --compute_dtype bf16")
        return
    if reading.flag("fp16") or compute == "fp16":
        reading.put("precision=float16", reading.said("fp16", "compute_dtype"))
        option = "float16"
    elif reading.flag("bf16") or scales == "bf16" or (not compute and _given(reading, "model_recipe_name")):
        option = "bfloat16_params"
        reading.put(f"precision={option}", reading.said("bf16", "compute_dtype"))
        if not reading.flag("grad_reduce_in_bf16"):
            because = "Megatron sums gradients of bf16 in float32, but with grad_reduce_in_bf16"
            reading.put("precision.gradients=float32", because)
            reading.put("precision.gradient_reduction=float32", because)
    else:
        option = "float32"
        reading.put("precision=float32", "neither bf16 nor fp16 is given")
    _put_fp8(reading, option, "hybrid" if compute.startswith("fp8") else "")


_BLOCKWISE = (
    "scales are powers of two, as without NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1; with it the type is fp8_blockwise"
)


def _put_fp8(reading: PeerReading, option: str, form: str) -> None:
    """Puts the types of matmuls. form: those that compute_dtype names."""
    key = next((key for key in ("fp8_format", "fp8") if _given(reading, key)), "compute_dtype")
    form = reading.text(key) if key != "compute_dtype" else form
    if form in NOTHING:
        return
    formats = reading.peer.tables["fp8_formats"]
    types = reading.one_of(key, formats) if key != "compute_dtype" else formats[form]
    recipe = reading.text("fp8_recipe")
    is_gathered = reading.flag("fp8_param_gather")
    in_blocks = reading.peer.tables["fp8_block_recipes"]
    if has_blocks := recipe in in_blocks and form == "e4m3":
        types = in_blocks[recipe]
    elif recipe not in ("", "None", "delayed", "tensorwise"):
        what = f"{recipe}: float8 with a scale for each tensor, and mxfp8 and blockwise in e4m3, can be imported"
        reading.refuse("fp8_recipe", what, "use --fp8-recipe tensorwise, or leave fp8 out")
        return
    if option != "bfloat16_params":
        reading.refuse(key, "Meshloom has float8 in runs that compute in bfloat16", "add --bf16, or leave fp8 out")
    elif types:
        because = reading.said(key, "fp8_recipe")
        history = None if has_blocks else _history(reading, because)
        put_matmuls(reading, option, types, because, gathered=is_gathered and not has_blocks, history=history)
        note_experts(reading, because)
        if recipe == "blockwise":
            reading.notes.append(f"{because}: {_BLOCKWISE}")
        if has_blocks and is_gathered:
            reading.notes.append("fp8_param_gather: weights are gathered in bfloat16 here")


def _history(reading: PeerReading, because: str) -> int | None:
    """Returns how many steps the scales of tensors come from; None: from the magnitudes now."""
    tables, compute = reading.peer.tables, reading.text("compute_dtype")
    if {reading.text("fp8_recipe"), compute} & {*tables["current_scaling"]}:
        return None
    if reading.count("pipeline_model_parallel_size") > 1:
        what = "a scale comes from the largest magnitude now, and not from earlier steps, as stages hand on none"
        reading.notes.append(f"{because}: {what}")
        return None
    of_bridge = compute in tables["delayed_scaling"] and not reading.is_given("fp8_amax_history_len")
    length = tables["delayed_scaling"][compute] if of_bridge else reading.count("fp8_amax_history_len")
    kinds = {"max": length, "most_recent": length if of_bridge else 1}
    if margin := reading.number("fp8_margin"):
        reading.notes.append(f"fp8_margin={in_full(margin)}: scales have no margin here")
    return reading.one_of("fp8_amax_compute_algo", kinds)


def _put_optimizer(reading: PeerReading, devices: Devices | None) -> None:
    if reading.text("optimizer") != "adam":
        what = f"there is no '{reading.text('optimizer')}' that can be imported"
        reading.refuse("optimizer", what, "use adam, or leave it out and choose optimizer= here")
        return
    keys = {"b1": "adam_beta1", "b2": "adam_beta2", "epsilon": "adam_eps", "weight_decay": "weight_decay"}
    values: dict[str, tuple[Any, str]] = {ours: (reading.number(theirs), theirs) for ours, theirs in keys.items()}
    clip = reading.number("clip_grad")
    values["max_grad_norm"] = (clip if clip > 0 else "null", "clip_grad")
    if _given(reading, "lr"):
        values["learning_rate"] = (reading.number("lr"), "lr")
    if not _given(reading, "model_recipe_name"):
        put_values(reading, "optimizer", "adamw", values)
    elif _given(reading, "lr"):
        put_values(reading, "optimizer", "adamw", {"learning_rate": values["learning_rate"]})
    types = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    first = reading.one_of("exp_avg_dtype", types | {"fp8": "float8"})  # with a scale for each block here
    second = reading.one_of("exp_avg_sq_dtype", types)
    if second == "bfloat16":
        reading.put("optimizer.moment_dtype=bfloat16", reading.said("exp_avg_sq_dtype"))
    if first and first != second:
        reading.put(f"optimizer.first_moment_dtype={first}", reading.said("exp_avg_dtype"))
    _put_moments(reading, devices)
    steps = None
    if _given(reading, "train_iters"):
        steps = reading.whole("train_iters")
    elif _given(reading, "train_samples") and _given(reading, "global_batch_size"):
        steps = reading.whole("train_samples") // max(reading.whole("global_batch_size"), 1)
    if steps:
        reading.put(f"num_steps={steps}", reading.said("train_iters", "train_samples"))
        _put_schedule(reading, steps)
    for key, other in (("lr_decay_iters", "train_iters"), ("lr_decay_samples", "train_samples")):
        if _given(reading, key) and reading.whole(key) != (reading.whole(other) if _given(reading, other) else 0):
            said = f"{key}={reading.whole(key):,}"
            reading.notes.append(f"{said}: the learning rate falls up to the last step here")
    if reading.is_given("seed"):
        reading.put(f"seed={reading.whole('seed')}", reading.said("seed"))


def _put_moments(reading: PeerReading, devices: Devices | None) -> None:
    """Puts where the moments lie."""
    share = reading.number("optimizer_offload_fraction")
    if not reading.flag("optimizer_cpu_offload") or not share:
        return
    put_moments_on_host(reading, "optimizer_cpu_offload", "adamw", devices)
    if share != 1:
        reading.notes.append(f"optimizer_offload_fraction={in_full(share)}: all layers have their moments on the host")


def _put_schedule(reading: PeerReading, steps: int) -> None:
    kinds = {"linear": "linear", "cosine": "cosine", "constant": "constant", "WSD": None, "inverse-square-root": None}
    kind = kinds.get(reading.text("lr_decay_style"))
    if _given(reading, "model_recipe_name"):
        return
    if kind is None:
        what = f"{reading.text('lr_decay_style')} cannot be imported"
        reading.refuse("lr_decay_style", what, "use cosine, linear or constant, and choose schedule= here")
        return
    reading.put(f"schedule={kind}", reading.said("lr_decay_style"))
    warmup = reading.whole("lr_warmup_iters")
    if _given(reading, "lr_warmup_samples") and _given(reading, "global_batch_size"):
        warmup = reading.whole("lr_warmup_samples") // max(reading.whole("global_batch_size"), 1)
    if _given(reading, "lr_warmup_fraction"):
        warmup = int(reading.number("lr_warmup_fraction") * steps)
    reading.put(
        f"schedule.num_warmup_steps={warmup}",
        reading.said("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_samples"),
    )
    if kind != "constant" and _given(reading, "lr") and reading.number("lr"):
        share = reading.number("min_lr") / reading.number("lr")
        reading.put(f"schedule.final_learning_rate_fraction={share:.3g}", reading.said("min_lr"))
