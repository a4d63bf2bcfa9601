"""torchtitan's declarations: a TOML file, and words that change its keys."""

from typing import Any

from ..core.errors import use_one_of
from .mesh import Devices, known_devices, put_mesh
from .parts import note_experts, put_matmuls, put_values
from .reading import PeerReading, in_full

_AXES = {"replica": "data_parallel_replicate_degree", "fsdp": "data_parallel_shard_degree",
         "context": "context_parallel_degree", "tensor": "tensor_parallel_degree", "stage": "pipeline_parallel_degree",
         "expert": "expert_parallel_degree"}  # fmt: skip
_REMAT = {"full": "full", "none": "none", "selective": "save_dots"}
_FLOAT8 = ("float8", "quantize.linear.float8")  # converters, and sections of keys
_MX = ("mx", "quantize.linear.mx")  # likewise, of blocks with a power of two
_AS_THEY_ARE = ("output", "lm_head", "router.gate", "gate")  # multiply in bfloat16 here, too
_ROTATES = {"allgather": "all_gather", "alltoall": "ring"}


def read_torchtitan(reading: PeerReading) -> None:
    """Puts the overrides of torchtitan's keys."""
    _put_model(reading)
    devices = known_devices(reading, "", "", 1)
    if devices is None and not reading.target:
        fix = "add target=NAME, such as target=h100-64"
        reading.refuse("", "a declaration of torchtitan does not name its GPUs", fix)
    sizes = _sizes(reading, devices)
    _put_batch(reading, devices, sizes)
    _put_remat(reading)
    reading.put("data=synthetic", "of the step; declare your own for a run, such as data=jsonl (docs/data.md)")
    _put_mesh(reading, devices, sizes)
    _put_precision(reading)
    _put_optimizer(reading)


def _put_model(reading: PeerReading) -> None:
    tables, flavor = reading.peer.tables, reading.text("model.flavor")
    name = f"{reading.text('model.name')} {flavor}"
    if name not in tables["models"]:
        what = f"Meshloom does not have the model {name}"
        reading.refuse("model.flavor", what, use_one_of(name, tables["models"]))
    else:
        option, *others = tables["models"][name]
        for word in (f"model={option}", *others):
            reading.put(word, reading.said("model.name", "model.flavor"))


def _sizes(reading: PeerReading, devices: Devices | None) -> dict[str, int]:
    """Returns the sizes of our mesh axes; shards take the rest."""
    keys = {axis: f"parallelism.{name}" for axis, name in _AXES.items()}
    sizes = {axis: reading.count(key, *([-1] if axis == "fsdp" else [])) for axis, key in keys.items()}
    if sizes["expert"] > 1 and devices is not None:  # its experts are over devices that also shard and split lengths
        for axis in ("context", "tensor"):
            if sizes[axis] > 1:
                what = f"Meshloom's expert axis takes devices from fsdp, and torchtitan's here from {axis}, too"
                reading.refuse(keys["expert"], what, f"set {keys[axis]}=1")
    others = sizes["replica"] * sizes["context"] * sizes["tensor"] * sizes["stage"]
    if devices is not None:
        if sizes["fsdp"] == -1:
            if devices.total % others:
                what = f"the degrees of parallelism are {others} together, and {devices.name} has {devices.total} GPUs"
                reading.refuse("parallelism", what, "correct them, or the target")
            sizes["fsdp"] = devices.total // others
        elif sizes["fsdp"] * others != devices.total:
            product = sizes["fsdp"] * others
            what = f"the degrees of parallelism are {product} together, and {devices.name} has {devices.total} GPUs"
            reading.refuse("parallelism", what, "correct them, or the target")
        if sizes["fsdp"] % sizes["expert"]:
            what = f"is {sizes['expert']}, which does not divide the {sizes['fsdp']} shards"
            reading.refuse(keys["expert"], what, "use a divisor of them")
    return sizes


def _put_batch(reading: PeerReading, devices: Devices | None, sizes: dict[str, int]) -> None:
    local, total = reading.whole("training.local_batch_size"), reading.whole("training.global_batch_size")
    reading.put(f"sequence_length={reading.whole('training.seq_len')}", reading.said("training.seq_len"))
    if devices is None:
        return
    ranks = sizes["replica"] * sizes["fsdp"]
    step = local * ranks
    total = step if total == -1 else total
    if step < 1 or total % step:
        what = f"is {total}, no multiple of {local} on each of {ranks} data-parallel ranks"
        reading.refuse("training.global_batch_size", what, f"use a multiple of {max(step, 1)}")
        return
    because = f"{reading.said('training.local_batch_size', 'training.global_batch_size')}, {ranks} ranks of data"
    reading.put(f"global_batch_size={total}", because)
    accumulated, parts = total // step, 1
    if sizes["stage"] > 1:
        microbatch = reading.whole("parallelism.pipeline_parallel_microbatch_size")
        if microbatch < 1 or local % microbatch:
            what = f"is {microbatch}, which does not divide the local batch of {local}"
            reading.refuse("parallelism.pipeline_parallel_microbatch_size", what, "use a divisor")
            return
        parts = local // microbatch
        if accumulated > 1:
            what = "a pipeline has one number of microbatches here, and this batch needs another around it"
            reading.refuse("training.global_batch_size", what, f"use {step}, or a larger training.local_batch_size")
    if accumulated * parts > 1:
        keys = (
            "training.local_batch_size",
            "training.global_batch_size",
            "parallelism.pipeline_parallel_microbatch_size",
        )
        reading.put(f"num_microbatches={accumulated * parts}", reading.said(*keys))


def _put_remat(reading: PeerReading) -> None:
    mode, option = reading.text("activation_checkpoint.mode"), reading.text("activation_checkpoint.selective_ac_option")
    ours = reading.one_of("activation_checkpoint.mode", _REMAT)
    if ours is None:
        return
    if mode == "selective" and option != "op":
        what = f"recomputes one layer in {option}, and Meshloom has one policy for all layers of a stack"
        fix = "use selective_ac_option=op, or mode=full"
        reading.refuse("activation_checkpoint.selective_ac_option", what, fix)
    keys = ("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option")
    reading.put(f"remat={ours}", reading.said(*keys) if mode == "selective" else reading.said(keys[0]))


def _put_mesh(reading: PeerReading, devices: Devices | None, sizes: dict[str, int]) -> None:
    expert = sizes["expert"]
    put_mesh(
        reading,
        devices,
        replica=sizes["replica"],
        fsdp=sizes["fsdp"] // max(expert, 1),
        context=sizes["context"],
        expert=expert,
        tensor=sizes["tensor"],
        stage=sizes["stage"],
        said=lambda axis: reading.said(f"parallelism.{_AXES[axis]}"),
    )
    if reading.flag("parallelism.enable_async_tensor_parallel") and sizes["tensor"] > 1:
        reading.put("parallel.matmul=collective_matmul", reading.said("parallelism.enable_async_tensor_parallel"))
    if sizes["context"] > 1:
        rotated = reading.one_of("parallelism.context_parallel_rotate_method", _ROTATES)
        if rotated:
            reading.put(f"parallel.context={rotated}", reading.said("parallelism.context_parallel_rotate_method"))
        if reading.text("parallelism.context_parallel_load_balancer") != "headtail":
            reading.put("token_order=contiguous", reading.said("parallelism.context_parallel_load_balancer"))
    if expert > 1 and reading.whole("parallelism.expert_tensor_parallel_degree") > 1:
        what = "experts have no tensor parallelism of their own"
        reading.refuse("parallelism.expert_tensor_parallel_degree", what, "set it to 1")
    if sizes["stage"] > 1:
        _put_pipeline(reading)
    if reading.text("parallelism.fsdp_reshard_after_forward") == "never" and sizes["fsdp"] > 1:
        what = "never: weights that stay gathered after the forward pass"
        reading.refuse("parallelism.fsdp_reshard_after_forward", what, "use default, or always")
    elif reading.text("parallelism.fsdp_reshard_after_forward") not in ("default", "always", "never"):
        reading.refuse("parallelism.fsdp_reshard_after_forward", "is not known", "use default or always")


def _put_pipeline(reading: PeerReading) -> None:
    chosen = reading.one_of("parallelism.pipeline_parallel_schedule", reading.peer.tables["schedules"])
    if chosen is None:
        return
    option, chunks = chosen
    because = reading.said("parallelism.pipeline_parallel_schedule")
    if option != "1f1b":
        reading.put(f"pipeline={option}", because)
    layers = reading.value("parallelism.pipeline_parallel_layers_per_stage")
    if layers is not None and chunks:
        stages, total = reading.whole("parallelism.pipeline_parallel_degree"), reading.model_value("num_layers")
        each = stages * reading.whole("parallelism.pipeline_parallel_layers_per_stage")
        if total and each and (count := max(1, -(-total // each))) != chunks:
            because = reading.said("parallelism.pipeline_parallel_layers_per_stage")
            reading.put(f"pipeline.num_chunks={count}", because)


def _put_precision(reading: PeerReading) -> None:
    stored, compute = reading.text("training.dtype"), reading.text("training.mixed_precision_param")
    options = {("float32", "bfloat16"): "bfloat16", ("float32", "float32"): "float32",
               ("bfloat16", "bfloat16"): "bfloat16_pure"}  # fmt: skip
    option = options.get((stored, compute))
    if option is None:
        what = f"Meshloom has no parameters in {stored} that are computed with in {compute}"
        reading.refuse("training.dtype", what, "use float32 with mixed_precision_param bfloat16 or float32")
        return
    if option != "bfloat16":
        reading.put(f"precision={option}", reading.said("training.dtype", "training.mixed_precision_param"))
    _put_converters(reading, option)
    reduced = reading.text("training.mixed_precision_reduce")
    if reduced not in ("float32", "bfloat16"):
        reading.refuse("training.mixed_precision_reduce", f"is {reduced}", "use float32 or bfloat16")
    elif option == "bfloat16" and reduced == "bfloat16":
        reading.put("precision.gradient_reduction=bfloat16", reading.said("training.mixed_precision_reduce"))
    elif option == "bfloat16_pure" and reduced == "float32":
        reading.put("precision.gradient_reduction=float32", reading.said("training.mixed_precision_reduce"))


def _put_converters(reading: PeerReading, option: str) -> None:
    """Puts the types of matmuls. option: of `precision` for all else."""
    converters = reading.value("model.converters") or []
    for converter in converters if isinstance(converters, list) else [converters]:
        if converter in _FLOAT8 and option != "float32":
            _put_float8(reading, option, _FLOAT8, "tensorwise")
            continue
        if converter in _MX and option != "float32":
            _put_float8(reading, option, _MX, "mxfp8_cublas")
            continue
        what = f"{converter}: Meshloom multiplies layers in float8 in runs that compute in bfloat16, and no experts"
        reading.refuse("model.converters", what, "to import the program without it, add --model.converters=")


def _put_float8(reading: PeerReading, option: str, sections: tuple[str, ...], default: str) -> None:
    """Puts the types of a converter's recipe. sections: of its keys. default: the recipe, where none is given."""
    because = reading.said("model.converters")
    keys = {name: [f"{section}.{name}" for section in sections if reading.is_given(f"{section}.{name}")]
            for name in ("recipe_name", "emulate", "enable_fsdp_float8_all_gather", "filter_fqns")}  # fmt: skip
    recipe = next((reading.text(key) for key in keys["recipe_name"]), "") or default
    recipes = reading.peer.tables["float8_recipes" if sections == _FLOAT8 else "mx_recipes"]
    types = recipes.get(recipe)
    if types is None:
        what, fix = f"the recipe {recipe} cannot be imported", f"use {' or '.join(recipes)}, or add --model.converters="
        reading.refuse(keys["recipe_name"][0], what, fix)
        return
    said = " ".join((because, *(reading.said(key) for key in keys["recipe_name"])))
    gathered = [key for key in keys["enable_fsdp_float8_all_gather"] if reading.flag(key)]
    filtered = [name for key in keys["filter_fqns"] for name in _names(reading.value(key))]
    has_head = sections == _FLOAT8 and not {"output", "lm_head"} & {*filtered}
    has_head = has_head and reading.model_value("embeddings") != "tied"
    because = " ".join((said, *map(reading.said, gathered)))
    put_matmuls(reading, option, types, because, gathered=bool(gathered), has_head=has_head)
    note_experts(reading, said)
    for key in keys["emulate"]:
        if reading.flag(key):
            reading.put("precision.emulate=true", reading.said(key))
    if others := [name for name in filtered if name not in _AS_THEY_ARE]:
        reading.notes.append(f"{keys['filter_fqns'][0]}: {', '.join(others)} multiply in float8 here, too")


def _names(value: Any) -> list[str]:
    """Returns the names of modules in a list, or in words between commas."""
    return [str(name) for name in (value if isinstance(value, list) else str(value or "").split(",")) if name]


def _put_optimizer(reading: PeerReading) -> None:
    if reading.text("optimizer.name") not in ("AdamW", "Adam"):
        reading.refuse("optimizer.name", f"there is no '{reading.text('optimizer.name')}' that we know", "use AdamW")
    norm = reading.number("training.max_norm")
    values = {ours: (reading.number(f"optimizer.{theirs}"), f"optimizer.{theirs}")
              for ours, theirs in (("learning_rate", "lr"), ("b1", "beta1"), ("b2", "beta2"), ("epsilon", "eps"),
                                   ("weight_decay", "weight_decay"))}  # fmt: skip
    values["max_grad_norm"] = (norm, "training.max_norm")
    if reading.text("optimizer.name") == "Adam":
        values["weight_decay"] = (0.0, "optimizer.name")
    put_values(reading, "optimizer", "adamw", values)
    reading.put("optimizer.weight_decay_on=all", "torchtitan decays norm scales and biases, too")
    steps = reading.whole("training.steps")
    reading.put(f"num_steps={steps}", reading.said("training.steps"))
    warmup, ratio = reading.whole("lr_scheduler.warmup_steps"), reading.value("lr_scheduler.decay_ratio")
    kind, least = reading.text("lr_scheduler.decay_type"), reading.number("lr_scheduler.min_lr_factor")
    reading.put(f"schedule.num_warmup_steps={warmup}", reading.said("lr_scheduler.warmup_steps"))
    decay = steps - warmup if ratio is None else round(steps * reading.number("lr_scheduler.decay_ratio"))
    keys = ("lr_scheduler.decay_type", "lr_scheduler.decay_ratio")
    if kind not in ("linear", "sqrt", "cosine"):
        reading.refuse("lr_scheduler.decay_type", f"there is no '{kind}'", "use linear, sqrt or cosine")
    elif decay >= steps - warmup and kind != "sqrt":
        reading.put(f"schedule={kind}", reading.said(*keys))
        ours = {"linear": 0.0, "cosine": 0.1}[kind]
        if least != ours:
            reading.put(
                f"schedule.final_learning_rate_fraction={in_full(least)}", reading.said("lr_scheduler.min_lr_factor")
            )
    elif kind == "cosine":
        what = "a cosine that begins after a stable part, which Meshloom does not have"
        reading.refuse("lr_scheduler.decay_type", what, "use linear or sqrt, or leave decay_ratio out")
    else:
        reading.put("schedule=wsd", reading.said(*keys))
        reading.put(
            f"schedule.num_decay_steps={max(min(decay, steps - warmup), 1)}", reading.said("lr_scheduler.decay_ratio")
        )
        if kind == "sqrt":
            reading.put("schedule.decay_shape=sqrt", reading.said("lr_scheduler.decay_type"))
        if least:
            reading.put(
                f"schedule.final_learning_rate_fraction={in_full(least)}", reading.said("lr_scheduler.min_lr_factor")
            )
    if reading.value("debug.seed") is not None:
        reading.put(f"seed={reading.whole('debug.seed')}", reading.said("debug.seed"))
