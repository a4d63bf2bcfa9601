"""MaxText's declarations: a yml, a command line, a script that has one."""

import math
from fractions import Fraction
from typing import Any

from ..core.errors import use_one_of
from .mesh import Devices, PeerAxes, known_devices, put_mesh, refuse_without_chips
from .parts import put_flags, put_matmuls, put_moments_on_host, put_remat, put_values
from .reading import NOTHING, PeerReading, in_full

_AXES = ("diloco", "data", "fsdp", "fsdp_transpose", "sequence", "context", "context_usp_ulysses",
         "context_autoregressive", "tensor", "tensor_sequence", "pipeline", "expert", "autoregressive")  # fmt: skip
_LACKS = ("diloco", "sequence", "context_usp_ulysses", "context_autoregressive", "autoregressive")
_CONTEXT = {"all_gather": "all_gather", "ring": "ring", "ulysses": "ulysses"}
_OPTIMIZERS = {"adamw": "adamw", "adam_pax": "adamw", "sgd": "sgd", "muon": "muon"}
_ATTENTION = {
    "autoselected": None,
    "flash": None,
    "cudnn_flash_te": None,
    "cudnn_flash_jax": None,
    "dot_product": "xla",
}

# MaxText splits what lies between the layers over the tensor axis, too
_OVER_TENSOR = (
    "sharding.activations=[{logical: [batch], mesh: [replica, data, fsdp]}, "
    "{logical: [vocab, mlp, heads, kv_heads, embed], mesh: [tensor]}, "
    "{logical: [length, sequence_parallel_length, head_dim], mesh: []}]"
)


def read_maxtext(reading: PeerReading) -> None:
    """Puts the overrides of MaxText's keys."""
    experts = _put_model(reading)
    topology = reading.text("compile_topology")
    slices = "compile_topology_num_slices" if reading.is_given("compile_topology_num_slices") else "num_slices"
    devices = known_devices(reading, topology, "compile_topology", max(reading.whole(slices), 1))
    axes = _axes(reading, devices)
    if devices is None and not (reading.target or topology):
        refuse_without_chips(reading, axes)
    _put_batch(reading, devices, axes)
    _put_remat(reading, experts)
    _put_data(reading)
    _put_layouts(reading, axes, devices)
    _put_precision(reading)
    _put_optimizer(reading, devices)
    _put_loops(reading, devices)
    flags = (*reading.given.flags, *reading.text("compile_xla_flags").split())
    put_flags(reading, flags, is_gpu=devices is not None and devices.is_gpu)


def _put_model(reading: PeerReading) -> bool:
    """Returns whether the model has experts, as its layers then have other activations."""
    name, tables = reading.text("model_name"), reading.peer.tables
    because = reading.said("model_name")
    scale = reading.whole("global_parameter_scale")
    if name == "default":
        if reading.whole("num_experts") > 1:
            reading.put("model=mixtral_8x7b", reading.said("num_experts"))
            reading.put(f"model.num_experts={reading.whole('num_experts')}", reading.said("num_experts"))
            per_token = reading.whole("num_experts_per_tok")
            reading.put(f"model.num_experts_per_token={per_token}", reading.said("num_experts_per_tok"))
        else:
            reading.put("model=llama2_7b", because)
        _put_sizes(reading, scale, every=True)
        return reading.whole("num_experts") > 1
    if name not in tables["models"]:
        if name in tables["lacks"]:
            known = ", ".join(dict.fromkeys(each.split("-")[0] for each in tables["models"] if each != "default"))
            what = f"Meshloom does not have the family of {name}"
            reading.refuse("model_name", what, f"it has {known}; or register one of your own (docs/extend.md)")
        else:
            fix = use_one_of(name, (*tables["models"], *tables["lacks"]))
            reading.refuse("model_name", f"MaxText has no model '{name}'", fix)
        return False
    option, *others = tables["models"][name]
    reading.put(f"model={option}", because)
    for other in others:
        reading.put(other, because)
    _put_sizes(reading, scale, every=False)
    return option.startswith(("mixtral", "deepseek", "gpt_oss")) or "_a" in option


def _put_sizes(reading: PeerReading, scale: int, *, every: bool) -> None:
    """Puts the sizes of the model. every: they are MaxText's, where its model has no name; else those that are
    given."""
    if scale < 1 or scale & (scale - 1):
        reading.refuse("global_parameter_scale", f"{scale} is not a power of two", "set it to 1, 2, 4, ...")
        return
    doublings, rest = divmod(int(math.log2(scale)), 3)
    wide, deep = 2 ** (doublings + (rest > 0)), 2**doublings
    sizes = {
        "embed_dim": ("base_emb_dim", 2 ** (doublings + (rest > 1))),
        "num_heads": ("base_num_query_heads", wide),
        "num_kv_heads": ("base_num_kv_heads", wide),
        "mlp_dim": ("base_moe_mlp_dim" if reading.whole("num_experts") > 1 else "base_mlp_dim", wide),
        "num_layers": ("base_num_decoder_layers", deep),
    }
    for ours, (key, factor) in sizes.items():
        if every or reading.is_given(key) or scale > 1:
            size = reading.whole(key)
            if size < 1:
                reading.refuse(key, f"is {size}, and the model has no name", f"set {key}, or model_name")
                continue
            because = reading.said(key, "global_parameter_scale") if scale > 1 else reading.said(key)
            reading.put(f"model.{ours}={size * factor}", because)
    for ours, key in (("head_dim", "head_dim"), ("vocab_size", "vocab_size"), ("rope_theta", "rope_max_timescale"),
                      ("norm_epsilon", "normalization_layer_epsilon")):  # fmt: skip
        if reading.is_given(key):
            reading.put(f"model.{ours}={in_full(reading.number(key))}", reading.said(key))
    for ours, key in (("attention_soft_cap", "attn_logits_soft_cap"), ("logit_soft_cap", "final_logits_soft_cap")):
        if reading.is_given(key):
            cap = 0 if reading.value(key) in NOTHING else reading.number(key)
            reading.put(f"model.{ours}={in_full(cap) if cap else 'null'}", reading.said(key))
    if reading.is_given("num_experts") and not every:
        reading.put(f"model.num_experts={reading.whole('num_experts')}", reading.said("num_experts"))
    if reading.is_given("num_experts_per_tok") and not every:
        per_token = reading.whole("num_experts_per_tok")
        reading.put(f"model.num_experts_per_token={per_token}", reading.said("num_experts_per_tok"))
    if reading.is_given("load_balance_loss_weight") and reading.model_value("num_experts"):
        weight = in_full(reading.number("load_balance_loss_weight"))
        reading.put(f"model.load_balancing_weight={weight}", reading.said("load_balance_loss_weight"))
    if reading.is_given("logits_via_embedding"):
        tied = "tied" if reading.flag("logits_via_embedding") else "separate"
        reading.put(f"model.embeddings={tied}", reading.said("logits_via_embedding"))
    kinds = {"silu,linear": ("gated", "silu"), "gelu,linear": ("gated", "gelu"), "relu": ("plain", "relu"),
             "gelu": ("plain", "gelu")}  # fmt: skip
    if reading.is_given("mlp_activations"):
        value = reading.value("mlp_activations")
        word = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if word not in kinds:
            reading.refuse("mlp_activations", f"Meshloom has no MLP of {word}", f"use one of {'; '.join(kinds)}")
        else:
            mlp, activation = kinds[word]
            reading.put(f"model.mlp={mlp}", reading.said("mlp_activations"))
            reading.put(f"model.mlp_activation={activation}", reading.said("mlp_activations"))
    if (rate := reading.number("dropout_rate")) and reading.flag("enable_dropout"):
        reading.put(f"model.dropout_rate={in_full(rate)}", reading.said("dropout_rate"))


def _axes(reading: PeerReading, devices: Devices | None) -> PeerAxes:
    """Returns the sizes of MaxText's mesh axes, within slices (or nodes of GPUs) and over them, with -1 filled in."""
    found: dict[str, dict[str, int]] = {}
    for level, name, sizes in (
        (
            "ici",
            "devices of a slice" if devices is None or not devices.is_gpu else "GPUs of a node",
            devices and devices.inner,
        ),
        ("dcn", "slices" if devices is None or not devices.is_gpu else "nodes", devices and devices.outer),
    ):
        keys = {axis: f"{level}_{axis}_parallelism" for axis in _AXES}
        values = {axis: reading.count(key, -1) for axis, key in keys.items()}
        free = [axis for axis, size in values.items() if size == -1]
        rest = math.prod(size for size in values.values() if size != -1)
        if len(free) > 1:
            named = " and ".join(keys[axis] for axis in free)
            reading.refuse(named, "are both -1", f"leave one of them at -1, which takes the rest of the {name}")
        elif sizes is not None and (sizes % rest if free else sizes != rest):
            what = (
                f"the {level}_* axes have {rest} times -1" if free else f"the product of the {level}_* axes is {rest}"
            )
            fix = f"correct them, or the target; {keys['fsdp' if level == 'ici' else 'data']}=-1 takes the rest"
            reading.refuse(keys[free[0]] if free else f"{level}_*_parallelism", f"{what}, of {sizes} {name}", fix)
        for axis in free:
            values[axis] = sizes // rest if sizes else 0
        found[level] = values
    for axis in _LACKS:
        for level in ("ici", "dcn"):
            if found[level][axis] != 1:
                key = f"{level}_{axis}_parallelism"
                reading.refuse(key, f"Meshloom has no axis like {axis}", f"set {key}=1 and give its devices to another")
    return PeerAxes(found["ici"], found["dcn"])


def _put_batch(reading: PeerReading, devices: Devices | None, axes: PeerAxes) -> None:
    per_device, accumulated = reading.number("per_device_batch_size"), reading.whole("gradient_accumulation_steps")
    if devices is not None:
        size = Fraction(per_device).limit_denominator(10**6) * devices.total * accumulated
        because = f"{reading.said('per_device_batch_size', 'gradient_accumulation_steps')}, {devices.total} devices"
        if size.denominator != 1 or size < 1:
            what = f"{in_full(per_device)} on each of {devices.total} devices is not a whole number of sequences"
            reading.refuse("per_device_batch_size", what, f"use a multiple of {in_full(1 / devices.total)}")
        else:
            reading.put(f"global_batch_size={size}", because)
    reading.put(f"sequence_length={reading.whole('max_target_length')}", reading.said("max_target_length"))
    num_stages = axes.total("pipeline")
    if num_stages > 1 and accumulated > 1:
        what = "a pipeline has one number of microbatches here, and this is another one around it"
        reading.refuse("gradient_accumulation_steps", what, "set gradient_accumulation_steps=1")
    if num_stages > 1:
        given = reading.whole("num_pipeline_microbatches")
        reading.put(f"num_microbatches={given if given > 0 else num_stages}", reading.said("num_pipeline_microbatches"))
        reading.put("pipeline=gpipe", reading.said("ici_pipeline_parallelism", "dcn_pipeline_parallelism"))
        layers, repeats = reading.whole("num_layers_per_pipeline_stage"), reading.whole("num_pipeline_repeats")
        if repeats > 1 or (repeats < 0 and reading.is_given("num_layers_per_pipeline_stage")):
            what = f"stages take {layers} layers several times, a circular pipeline, which Meshloom does not have"
            fix = "set num_pipeline_repeats=1 and leave num_layers_per_pipeline_stage out: GPipe"
            reading.refuse("num_pipeline_repeats", what, fix)
    elif accumulated > 1:
        reading.put(f"num_microbatches={accumulated}", reading.said("gradient_accumulation_steps"))


def _put_remat(reading: PeerReading, experts: bool) -> None:
    policy, tables = reading.text("remat_policy"), reading.peer.tables
    because = reading.said("remat_policy")
    plain = {"full": "full", "none": "none", "": "none", "minimal": "save_dots", "minimal_with_context": "minimal",
             "minimal_flash": "minimal"}  # fmt: skip
    if policy in plain:
        reading.put(f"remat={plain[policy]}", because)
        return
    if policy == "custom":
        words = {"remat": None, "device": "save", "offload": "offload"}
        choices: dict[str, str | None] = {key: reading.one_of(key, words) for key in tables["activations"]}
        given = [key for key in tables["activations"] if choices[key] and reading.is_given(key)]
        because = reading.said("remat_policy", *given)
    elif policy in tables["policies"]:
        choices = {key: word for word, keys in tables["policies"][policy].items() for key in keys}
    else:
        fix = use_one_of(policy, (*plain, *tables["policies"], "custom"))
        reading.refuse("remat_policy", f"Meshloom has no policy like '{policy}'", fix)
        return
    ours: dict[str, str] = {}
    for key, choice in choices.items():
        name = tables["activations"][key][experts]
        if choice and name:
            ours[name] = choice
        elif choice and key not in ("kv_proj", "qkv_proj"):
            reading.notes.append(f"{key}={_WORDS[choice]}: layers of this model name no such activation; recomputed")
    put_remat(reading, ours, because)


_WORDS = {"save": "device", "offload": "offload"}


def _put_data(reading: PeerReading) -> None:
    reading.put("data=synthetic", reading.said("dataset_type"))
    if reading.text("dataset_type") != "synthetic":
        reading.notes.append("its data is not imported: declare your own, such as data=jsonl (docs/data.md)")


def _put_layouts(reading: PeerReading, axes: PeerAxes, devices: Devices | None) -> None:
    tensor, sequence = axes.total("tensor"), axes.total("tensor_sequence")
    if tensor > 1 and sequence > 1:
        what = "Meshloom has one axis of tensor parallelism"
        reading.refuse("ici_tensor_sequence_parallelism", what, "give its devices to ici_tensor_parallelism")
    put_mesh(
        reading,
        devices,
        replica=axes.outer["data"],
        data=axes.inner["data"],
        fsdp=axes.total("fsdp"),
        transposed=axes.total("fsdp_transpose"),
        context=axes.total("context"),
        expert=axes.total("expert"),
        tensor=max(tensor, sequence),
        stage=axes.total("pipeline"),
        said=lambda axis: _said_of(reading, axis),
    )
    if reading.text("custom_mesh"):
        _put_order(reading, axes)
    if tensor > 1 and axes.total("expert") == 1:
        reading.put(_OVER_TENSOR, "MaxText's activation_embed -> tensor")
    if axes.total("context") > 1:
        strategy = reading.one_of("context_parallel_strategy", _CONTEXT)
        if strategy:
            reading.put(f"parallel.context={strategy}", reading.said("context_parallel_strategy"))
        if not reading.flag("context_parallel_load_balance"):
            reading.put("token_order=contiguous", reading.said("context_parallel_load_balance"))
    capacity = reading.number("capacity_factor")
    if capacity > 0:
        if reading.flag("sparse_matmul"):
            what = "drops tokens only in its dense matmuls, and sparse_matmul is true"
            reading.refuse("capacity_factor", what, "set sparse_matmul=false, or capacity_factor=-1")
        reading.put("parallel.experts=capacity", reading.said("capacity_factor", "sparse_matmul", "megablox"))
        reading.put(f"moe.capacity_factor={in_full(capacity)}", reading.said("capacity_factor"))
    elif devices is None or not devices.is_gpu:
        _put_tiles(reading)
    strategy = reading.one_of("attention", _ATTENTION)
    if strategy:
        reading.put(f"parallel.attention={strategy}", reading.said("attention"))


def _put_tiles(reading: PeerReading) -> None:
    """Puts the rows of a tile of megablox's forward kernel, if they are given and it is the kernel that runs."""
    is_megablox = reading.flag("sparse_matmul") and reading.flag("megablox") and not reading.flag("use_tokamax_gmm")
    for key in ("wi_tile_fwd_batch_seq", "tile_batch_seq"):
        if is_megablox and reading.is_given(key):
            rows = reading.whole(key)
            if rows < 128 or rows % 128:
                reading.refuse(key, f"is {rows}", "use a multiple of 128")
            return reading.put(f"moe.tile_rows={rows}", reading.said(key, "megablox"))


def _put_order(reading: PeerReading, axes: PeerAxes) -> None:
    """Puts the order of devices that gives the smaller axis of a hybrid ring a block of chips."""
    blocks = {"hybrid_ring_64x4": (4, "2x2"), "hybrid_ring_32x8": (8, "2x4")}
    block = reading.one_of("custom_mesh", blocks)
    if block is None:
        return
    size, shape = block
    inner = [axis for axis in ("tensor", "expert", "context") if axes.inner[axis] == size]
    if len(inner) != 1:
        what = f"is for one axis of {size} devices in a slice, and the mesh has {len(inner)}"
        reading.refuse("custom_mesh", what, "leave it out, and choose device_order here")
    else:
        reading.put(f"device_order=[{inner[0]}:{shape}]", reading.said("custom_mesh"))


def _said_of(reading: PeerReading, axis: str) -> str:
    theirs = {"replica": "data", "transposed": "fsdp_transpose", "stage": "pipeline"}.get(axis, axis)
    keys = [f"{level}_{theirs}_parallelism" for level in (("dcn",) if axis == "replica" else ("ici", "dcn"))]
    if axis == "tensor":
        keys += ["ici_tensor_sequence_parallelism"]
    return reading.said(*keys)


def _put_precision(reading: PeerReading) -> None:
    compute, stored = reading.text("dtype"), reading.text("weight_dtype")
    options = {("bfloat16", "float32"): "bfloat16", ("bfloat16", "bfloat16"): "bfloat16_pure",
               ("float32", "float32"): "float32"}  # fmt: skip
    option = options.get((compute, stored))
    because = reading.said("dtype", "weight_dtype")
    if option is None:
        what = f"Meshloom has no run that computes in {compute} over weights in {stored} without a loss scale"
        reading.refuse("dtype", what, "use dtype=bfloat16 with weight_dtype=float32 or bfloat16, or both float32")
        return
    if option != "bfloat16":
        reading.put(f"precision={option}", because)
    _put_quantization(reading, option)
    if (
        option == "bfloat16"
    ):  # weights are cast before they are multiplied, so that XLA sums their gradients in bfloat16, too
        reading.put("precision.gradient_reduction=bfloat16", because)
    gradients = reading.text("grad_dtype")
    if gradients not in ("float32", "bfloat16"):
        reading.refuse("grad_dtype", f"Meshloom has no gradients in {gradients}", "use float32 or bfloat16")
    elif gradients == "bfloat16" and option == "bfloat16":
        reading.put("precision.gradients=bfloat16", reading.said("grad_dtype"))


def _put_quantization(reading: PeerReading, option: str) -> None:
    """Puts the types of matmuls."""
    kind, types = reading.text("quantization"), reading.peer.tables["quantization"]
    if reading.flag("use_int8_training") or reading.flag("int8_training"):
        kind = kind or "int8"
    if kind in NOTHING:
        return
    because = reading.said("quantization", "use_int8_training", "int8_training")
    if kind not in types:
        what = f"{kind}: Meshloom trains in {', '.join(types)}, and multiplies in no other type of few bits"
        reading.refuse("quantization", what, "to import the program in bfloat16, add quantization=''")
        return
    if option == "float32":
        what = f"Meshloom has {kind} in runs that compute in bfloat16"
        reading.refuse("quantization", what, "set dtype=bfloat16, or add quantization=''")
        return
    has_experts = reading.whole("num_experts") > 1
    left_out = "*/mlp/*_X*" if has_experts and kind not in reading.peer.tables["quantized_experts"] else None
    has_stages = max(map(reading.whole, ("ici_pipeline_parallelism", "dcn_pipeline_parallelism"))) > 1
    history = None if has_stages else reading.peer.tables["delayed_scaling"].get(kind)
    put_matmuls(reading, option, types[kind], because, left_out=left_out, history=history)
    if history is None and kind not in reading.peer.tables["current_scaling"]:
        reading.notes.append(
            f"{because}: here a scale comes from the largest magnitude now, and elements are the nearest; "
            "MaxText's may come from a fixed range or from steps before, and its gradients may be rounded at random"
        )


def _put_optimizer(reading: PeerReading, devices: Devices | None) -> None:
    name = reading.one_of("opt_type", _OPTIMIZERS)
    if name is None:
        return
    because = reading.said("opt_type")
    if name != "adamw":
        reading.put(f"optimizer={name}", because)
    if reading.text("opt_type") == "adam_pax":
        reading.notes.append("opt_type=adam_pax: AdamW of optax, which does the same but for rounding")
    clipping = reading.number("gradient_clipping_threshold")
    values: dict[str, tuple[Any, str]] = {
        "learning_rate": (reading.number("learning_rate"), "learning_rate"),
        "max_grad_norm": (clipping if clipping > 0 else "null", "gradient_clipping_threshold"),
    }
    if name == "sgd":
        values |= {"momentum": ("null", "opt_type")}
    else:
        values |= {key: (reading.number(f"adam_{theirs}"), f"adam_{theirs}")
                   for key, theirs in (("b1", "b1"), ("b2", "b2"), ("epsilon", "eps"))}  # fmt: skip
        values["weight_decay"] = (reading.number("adam_weight_decay"), "adam_weight_decay")
    if name == "muon":
        values["momentum"] = (reading.number("muon_beta"), "muon_beta")
        values["weight_decay"] = (reading.number("muon_weight_decay"), "muon_weight_decay")
        rms = reading.value("muon_consistent_rms")
        if rms in (None, "None"):
            what = "is null, and Meshloom's muon scales its update to a root mean square"
            reading.refuse("muon_consistent_rms", what, "set muon_consistent_rms=0.2")
        else:
            values["update_rms"] = (reading.number("muon_consistent_rms"), "muon_consistent_rms")
    put_values(reading, "optimizer", name, values)
    if name != "sgd":
        reading.put("optimizer.weight_decay_on=all", "MaxText decays norm scales and biases, too")
    mu = reading.text("mu_dtype") or reading.text("weight_dtype")
    because = reading.said("mu_dtype") if reading.text("mu_dtype") else reading.said("weight_dtype")
    if mu not in ("float32", "bfloat16"):
        reading.refuse("mu_dtype", f"moments are stored in float32 or bfloat16, not {mu}", "use one of these")
    elif reading.text("weight_dtype") == "bfloat16" and name == "adamw" and mu == "bfloat16":
        reading.put("optimizer.moment_dtype=bfloat16", because)  # second moments are of the type of the weights
    elif mu == "bfloat16" and name == "adamw":
        reading.put("optimizer.first_moment_dtype=bfloat16", because)
    elif mu == "bfloat16" and reading.text("mu_dtype"):
        reading.refuse("mu_dtype", f"only AdamW's first moments have a type of their own, not {name}'s", "leave it out")
    if reading.flag("optimizer_memory_host_offload"):
        put_moments_on_host(reading, "optimizer_memory_host_offload", name, devices)
    _put_schedule(reading)


def _put_schedule(reading: PeerReading) -> None:
    steps = reading.whole("steps")
    scheduled = reading.whole("learning_rate_schedule_steps")
    steps = scheduled if steps == -1 else steps
    if steps < 1:
        reading.refuse("steps", f"is {steps}", "set the number of steps")
        return
    reading.put(f"num_steps={steps}", reading.said("steps", "learning_rate_schedule_steps"))
    kind = reading.one_of("lr_schedule_type", {"cosine": "cosine", "wsd": "wsd"})
    if kind is None:
        return
    length = scheduled if scheduled > 0 else steps
    if length != steps:
        reading.notes.append(f"learning_rate_schedule_steps={length}: the schedule ends with the run, at step {steps}")
    warmup = int(reading.number("warmup_steps_fraction") * steps)
    reading.put(f"schedule.num_warmup_steps={warmup}", reading.said("warmup_steps_fraction", "steps"))
    final = reading.number("learning_rate_final_fraction")
    if kind == "wsd":
        reading.put("schedule=wsd", reading.said("lr_schedule_type"))
        decay = max(int(reading.number("wsd_decay_steps_fraction") * steps), 1)
        reading.put(f"schedule.num_decay_steps={decay}", reading.said("wsd_decay_steps_fraction", "steps"))
        if reading.text("wsd_decay_style") != "linear":
            reading.refuse("wsd_decay_style", "Meshloom's wsd falls along a line or a root", "use linear")
        reading.put(
            f"schedule.final_learning_rate_fraction={in_full(final)}", reading.said("learning_rate_final_fraction")
        )
    elif final != 0.1:
        reading.put(
            f"schedule.final_learning_rate_fraction={in_full(final)}", reading.said("learning_rate_final_fraction")
        )


def _put_loops(reading: PeerReading, devices: Devices | None) -> None:
    if (tiles := reading.whole("num_vocab_tiling")) > 1:
        reading.put(f"loss.num_chunks={tiles}", reading.said("num_vocab_tiling"))
    if weight := reading.number("z_loss_multiplier"):
        reading.put(f"loss.z_loss_weight={in_full(weight)}", reading.said("z_loss_multiplier"))
    if seed := reading.whole("init_weights_seed"):
        reading.put(f"seed={seed}", reading.said("init_weights_seed"))
    if not reading.flag("scan_layers"):
        if devices is not None and devices.is_gpu:
            reading.put(f"overlap.layers.unroll={reading.model_value('num_layers')}", reading.said("scan_layers"))
        else:
            reading.notes.append(
                "scan_layers=false: layers stay in a loop here, since XLA for TPUs cannot compile them unrolled"
            )
    hardware = reading.text("hardware")
    if hardware not in ("tpu", "gpu", "gpu_multiprocess", "cpu"):
        reading.refuse("hardware", f"there is no '{hardware}'", "use tpu, gpu, gpu_multiprocess or cpu")
    elif devices is not None and reading.is_given("hardware") and devices.is_gpu != hardware.startswith("gpu"):
        reading.refuse(
            "hardware", f"is {hardware}, and the target {devices.name} is not", f"correct {hardware}, or the target"
        )
