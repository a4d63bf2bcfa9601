"""Cuts a declaration down to one that simulated devices run in seconds, and that has the same kind of program.

    80 layers of 64 heads, mesh fsdp 64 x tensor 4, 8,192 tokens
    -> 3 layers of 4 heads, fsdp 2 x tensor 2, 32 tokens

Each mesh axis of several devices becomes one of two. Layers, widths, experts, vocabulary and length become as small as
what splits them allows. All else stays: the rules of sharding, the strategies that the plan chose for the declared
target, the schedule, remat, packing, precision, adapters, tied weights, the kinds of layers. What cannot stay, such as
a kernel of a TPU on a processor, is named.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, cast

from pydantic import ValidationError

from meshloom.models.config import ModelConfig
from meshloom.models.record import Record

from ..core.errors import ConfigError, Problem
from ..driver import plan_run
from ..plan import Plan
from ..spec.overlap_spec import StrategyChoice
from ..spec.plan_spec import AnyPlanSpec, PlanSpec
from ..spec.step_spec import MoeSpec, PrecisionSpec
from ..spec.target_spec import CpuTarget

FLOAT32 = PrecisionSpec(
    parameters="float32", master=None, compute="float32", gradients="float32", gradient_reduction="float32",
    frozen=None, loss_scale=None,
)  # fmt: skip
_LENGTH = 32  # tokens of a sequence
_WIDTH = 32  # of the residual stream, and of other dimensions that are split
HEAD_DIM = 8
_VOCAB = 128
WIDE_STDDEV = 0.2  # of initial weights: the products of narrow matrices would vanish beside the residual stream
_MOST_STAGES = 4  # of a table of the user's own, whose stages cannot be cut
_LARGE = 64  # a whole number of a model that has a name of its own is cut from here on
DROPS, DRAWN = "what is dropped depends on the mesh", "random values are drawn by each device for its own tokens"


class KeyCut(Record):
    """A key that the small program has another value of. why: the reason for the value."""

    key: str
    declared: str
    value: str
    why: str


@dataclass(frozen=True)
class Shrunk(Generic[AnyPlanSpec]):
    """A small declaration like another one. cuts: of its keys. replaced: strategies that a processor does not run, and
    what runs instead. plan: of the small declaration."""

    spec: AnyPlanSpec
    plan: Plan[AnyPlanSpec]
    cuts: tuple[KeyCut, ...]
    replaced: tuple[str, ...]


@dataclass(frozen=True)
class _Sizes:
    """What the cuts of a model depend on: how many devices split it. axes: the mesh axes of two. parts: of the layers,
    one after the other, in a pipeline; 1 without one."""

    axes: tuple[str, ...]
    parts: int
    length: int

    def shards(self, *names: str) -> int:
        return 2 ** len(set(names) & set(self.axes))

    @property
    def batch(self) -> int:
        """Returns the most devices that may split a batch."""
        return self.shards("replica", "data", "fsdp", "expert")


def shrink(declared: Plan[AnyPlanSpec]) -> Shrunk[AnyPlanSpec]:
    """Returns a small declaration like one that was planned. Raises ConfigError where a rule does not let it shrink,
    with the nearest declaration that does."""
    spec = declared.spec
    cuts = _mesh_cuts(declared)
    sizes = _sizes(declared, cuts)
    cuts |= _batch_cuts(declared, sizes)
    model, model_cuts = _small_model(spec.model, declared, sizes)
    cuts |= _rest(declared, sizes)
    values = {**{key: value for key, (value, _) in cuts.items()}, "model": model}
    small = _with_values(spec, values)
    small, plan, replaced = _planned(small, _strategies(declared))
    shown = {key: (value, why) for key, (value, why) in cuts.items() if key not in ("target",)}
    return Shrunk(small, plan, tuple(_cuts_of(spec, shown, model_cuts)), (*replaced, *_left_out(declared)))


_Cuts = dict[str, tuple[Any, str]]  # by key, the value and the reason


def _mesh_cuts(declared: Plan[Any]) -> _Cuts:
    spec, sizes = declared.spec, declared.mesh.sizes
    of_table = spec.pipeline.table is not None and ":" not in str(spec.pipeline.table)
    stages = sizes.get("stage", 1)
    if of_table and stages > _MOST_STAGES:
        what = f"is a table of {stages} stages, and a table cannot be cut: a check has at most {_MOST_STAGES} stages"
        near = f"pipeline.table=null pipeline.schedule={spec.pipeline.schedule}"
        fix = f"check the built-in schedule that is like it, {near}, or a table of {_MOST_STAGES} stages or fewer"
        raise ConfigError([Problem("pipeline.table", what, fix)])
    small = {axis: min(size, 2) for axis, size in sizes.items()}
    if of_table and stages > 1:
        small["stage"] = stages
    num_devices = math.prod(small.values())
    cuts: _Cuts = {
        f"mesh.{axis}": (size, "two devices have all that many have: a neighbour, a part, a sum")
        for axis, size in small.items()
    }
    cuts["target"] = (CpuTarget(kind="cpu", num_devices=num_devices), "")
    return cuts


def _sizes(declared: Plan[Any], cuts: _Cuts) -> _Sizes:
    axes = tuple(key.removeprefix("mesh.") for key, (size, _) in cuts.items() if key.startswith("mesh.") and size > 1)
    stages = cuts["mesh.stage"][0] if "mesh.stage" in cuts else 1
    chunks = declared.pipeline.table.placement.num_chunks if declared.pipeline else 1
    return _Sizes(axes, stages * chunks if stages > 1 else 1, _LENGTH)


def _batch_cuts(declared: Plan[Any], sizes: _Sizes) -> _Cuts:
    spec, microbatches = declared.spec, declared.spec.num_microbatches
    stages = declared.mesh.sizes.get("stage", 1)
    if spec.pipeline.table is not None and ":" not in str(spec.pipeline.table) and stages > 1:
        pass  # it has so many
    elif stages > 1:
        microbatches = 2 * max(1, min(2, microbatches // stages))  # of two stages: as many for each, up to twice
    else:
        microbatches = min(microbatches, 2)
    split = spec.overlap.layers.batch_split
    shards = declared.mesh.num_shards(declared.roles.sequence)
    of_device = spec.global_batch_size // (spec.num_microbatches * shards)
    few = 2 if of_device > 1 or spec.has_pairs else 1
    each = few * split if of_device >= few * split else of_device
    num_shards = math.prod(2 for axis in declared.roles.sequence if axis in sizes.axes)
    return {
        "num_microbatches": (microbatches, "the sum over microbatches has two terms or more"),
        "global_batch_size": (microbatches * num_shards * max(each, split), "so many for each device and microbatch"),
        "sequence_length": (sizes.length, "both chunks of each shard have several tokens"),
        "num_steps": (
            max(spec.num_steps, 10) if spec.num_steps < 10 else 10,
            "the schedule of the learning rate is whole",
        ),
        "schedule.num_warmup_steps": (min(spec.schedule.num_warmup_steps, 1), "the first steps move the weights"),
    }


def _rest(declared: Plan[Any], sizes: _Sizes) -> _Cuts:
    """Returns the other keys that a processor, or a comparison, needs otherwise."""
    spec = declared.spec
    cuts: _Cuts = {}
    if declared.pipeline is not None:
        cuts["pipeline.head"] = ("stages" if declared.pipeline.shares_head else "last", "as it was planned")
        if declared.gather is not None:
            cuts["pipeline.gather"] = (declared.gather.when, "as it was planned")
        if isinstance(spec.pipeline.layers, tuple):
            cuts["pipeline.layers"] = (_small_layers(spec.pipeline.layers, sizes.parts), "fewer where there were fewer")
        cuts["pipeline.max_bubble"] = (None, "it is not judged")
    cuts["overlap.flag_presets"] = ((), "they are options of the target's compiler")
    cuts["overlap.search"] = (None, "nothing is searched")
    cuts["overlap.max_exposed"] = (None, "it is not judged")
    cuts["compiler_options"] = ({}, "they are options of the target's compiler")
    cuts["device_order"] = ((), "simulated devices have no links")
    moe = spec.moe
    if declared.model.num_active_experts is not None and isinstance(moe, MoeSpec):
        if moe.max_imbalance is not None:
            cuts["moe.max_imbalance"] = (None, f"nothing is dropped: {DROPS}")
        cuts["moe.capacity_factor"] = (1000.0, f"nothing is dropped: {DROPS}")
    loss = next((each for each in declared.operations if each.op.kind == "loss"), None)
    if loss is not None and loss.chosen.num_trips > 1:
        cuts["loss.num_chunks"] = (2, "the loss has several chunks of tokens")
    elif loss is not None:
        cuts["loss.num_chunks"] = (1, "the loss has one chunk of tokens")
    return cuts


def _small_layers(layers: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Returns as many parts, with 2 layers each, and 1 where the declaration has fewest: (4, 4, 4, 3) -> (2, 1)."""
    least = min(layers)
    if least == max(layers):
        return (2,) * parts
    chosen = [1 if count == least else 2 for count in layers]
    if len(set(chosen[:parts])) == 1:  # the others are at the end
        chosen = [*chosen[: parts - 1], chosen[-1]]
    return tuple(chosen[:parts]) if len(chosen) >= parts else (2,) * parts


def _small_model(model: ModelConfig, declared: Plan[Any], sizes: _Sizes) -> tuple[ModelConfig, _Cuts]:
    """Returns the model with smaller numbers, and the cuts. Numbers of a user's class that have names of their own are
    cut if the model can still be built."""
    known = _known_cuts(model, declared, sizes)
    cuts = {key: cut for key, cut in known.items() if hasattr(model, key) and getattr(model, key) is not None}
    small = _rebuilt(model, cuts)
    for key, value in model:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if key in known or not is_number or value <= _LARGE:
            continue
        smaller = _WIDTH if value % _WIDTH == 0 else value % _WIDTH or 1
        more = {**cuts, key: (smaller, "a number of the model's own")}
        try:
            _rebuilt(model, more).build().abstract()
        except Exception:  # the model is the user's, and says so in its own way
            continue
        cuts = more
    return (small if cuts == known else _rebuilt(model, cuts)), cuts


def _rebuilt(model: ModelConfig, cuts: _Cuts) -> ModelConfig:
    values = model.model_dump() | {key: value for key, (value, _) in cuts.items()}
    try:
        return type(model).model_validate(values)
    except ValidationError as error:
        (first, *_) = error.errors()
        where = ".".join(["model", *map(str, first["loc"])])
        what = f"the small model of the check is not valid: {first['msg']}"
        fix = "declare model.num_layers, widths and heads for which smaller ones exist (docs/check.md)"
        raise ConfigError([Problem(where, what, fix)]) from error


def _known_cuts(model: Any, declared: Plan[Any], sizes: _Sizes) -> _Cuts:
    """Returns the numbers of our models, and of others with fields of the same names."""
    get = lambda key, default=None: getattr(model, key, default)  # noqa: E731
    why = "the least that the mesh splits"
    cuts: _Cuts = {}
    vocab_shards = declared.mesh.num_shards(tuple(declared.mesh.sizes))
    vocab = _VOCAB if model.vocab_size % min(vocab_shards, 8) == 0 else _VOCAB + model.vocab_size % 8
    cuts["vocab_size"] = (min(model.vocab_size, vocab), "a batch has some of all tokens")
    cuts["embed_dim"] = (max(_WIDTH, 4 * sizes.shards("fsdp", "context", "expert", "data", "tensor")), why)
    cuts["mlp_dim"] = (2 * _WIDTH, why)
    cuts["dense_mlp_dim"] = (3 * _WIDTH, why)
    if get("num_heads") and get("num_kv_heads"):
        cuts |= _heads(model, declared, sizes)
    cuts["head_dim"] = (HEAD_DIM, "pairs of dimensions are turned")
    if latent := get("latent_attention"):
        small = {"query_dim": latent.query_dim and _WIDTH, "kv_dim": _WIDTH // 2, "rope_head_dim": 4}
        cuts["latent_attention"] = (latent.model_copy(update={**small, "value_head_dim": HEAD_DIM}), why)
    if get("num_positions"):
        cuts["num_positions"] = (sizes.length, "as many as the sequence has tokens")
    if get("attention_windows"):
        cuts["attention_windows"] = (_windows(model.attention_windows, declared.spec.sequence_length, sizes.length),
                                     "of the length as before")  # fmt: skip
    if get("num_experts"):
        cuts |= _experts(model, declared)
    if get("num_layers"):
        cuts["num_layers"] = _layers(model, declared, sizes)
    for key in ("dropout_rate", "router_jitter"):
        if get(key):
            cuts[key] = (0.0, DRAWN)
    if get("initializer_stddev"):
        cuts["initializer_stddev"] = (WIDE_STDDEV, "the products of narrow matrices would vanish")
    return {key: (value, why) for key, (value, why) in cuts.items()}


def _heads(model: Any, declared: Plan[Any], sizes: _Sizes) -> _Cuts:
    """Returns heads that as many devices split. Fewer heads of keys than devices stay fewer."""
    shards, declared_shards = (
        sizes.shards("tensor", "context"),
        declared.mesh.num_shards(tuple(axis for axis in ("tensor", "context") if axis in declared.mesh.sizes)),
    )
    is_split = model.num_kv_heads % declared_shards == 0
    kv_heads = max(shards, min(2, model.num_kv_heads)) if is_split else 1 if model.num_kv_heads == 1 else 2
    kv_heads = 1 if model.num_kv_heads == 1 else kv_heads
    groups = min(2, model.num_heads // model.num_kv_heads)
    heads = max(kv_heads * groups, shards * (2 if model.num_heads >= 2 * declared_shards else 1))
    if model.num_heads == model.num_kv_heads:
        kv_heads = heads
    why = f"a multiple of the {shards} devices that may split heads" if shards > 1 else "a few"
    return {"num_heads": (heads, why), "num_kv_heads": (kv_heads, "groups of heads as before, of two or fewer")}


def _windows(windows: Sequence[int | None], declared: int, length: int) -> tuple[int | None, ...]:
    """Returns windows that hide a part of the sequence exactly if the declared ones do."""

    def small(window: int | None) -> int | None:
        if window is None:
            return None
        return length if window >= declared else min(length - 1, max(length // 4, window * length // declared))

    return tuple(map(small, windows))


def _experts(model: Any, declared: Plan[Any]) -> _Cuts:
    del declared
    each = min(2, model.num_experts_per_token)
    groups = min(2, getattr(model, "num_expert_groups", 1))
    experts = 4 if groups == 1 else 8
    cuts: _Cuts = {
        "num_experts": (min(model.num_experts, experts), "a multiple of the two devices that split experts"),
        "num_experts_per_token": (each, "a token has several experts if it had several"),
    }
    if hasattr(model, "num_expert_groups"):
        chosen = groups if model.num_groups_per_token == model.num_expert_groups else 1
        cuts |= {"num_expert_groups": (groups, "a few"), "num_groups_per_token": (chosen, "not all, if it was not all")}
    if getattr(model, "num_shared_experts", 0):
        cuts["num_shared_experts"] = (1, "one, if there were some")
    if getattr(model, "num_dense_layers", 0):
        cuts["num_dense_layers"] = (1, "one, if there were some")
    return cuts


def _layers(model: Any, declared: Plan[Any], sizes: _Sizes) -> tuple[int, str]:
    """Returns a number of layers with a whole period of their kinds, of which each part of a pipeline has some."""
    spec, period = declared.spec, len(getattr(model, "attention_windows", None) or (None,))
    dense = 1 if getattr(model, "num_dense_layers", 0) else 0
    if isinstance(spec.pipeline.layers, tuple) and sizes.parts > 1:
        count = sum(_small_layers(spec.pipeline.layers, sizes.parts))
        return count, "as the small pipeline.layers"
    if sizes.parts > 1:
        step = math.lcm(sizes.parts, period)
        is_even = model.num_layers % declared.pipeline.table.placement.num_virtual == 0 if declared.pipeline else True
        count = step * (2 if step < 4 else 1)
        return count + (0 if is_even or period > 1 else 1), "some for each part of the pipeline"
    rest = model.num_layers % period
    loop = spec.overlap.layers
    least = max(3, loop.prefetch + 2, loop.unroll + 1) if period == 1 else period + rest
    count = max(least, dense + 2, period)
    count = -(-count // period) * period + rest if period > 1 else count
    return min(
        count, model.num_layers
    ), "one period of the kinds of layers" if period > 1 else "a first, a middle, a last"


def _with_values(spec: AnyPlanSpec, values: Mapping[str, Any]) -> AnyPlanSpec:
    """Returns the spec with other values, by keys such as mesh.fsdp."""
    nested: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for key, value in values.items():
        outer, _, inner = key.partition(".")
        if inner:
            nested.setdefault(outer, {})[inner] = value
        else:
            top[outer] = value
    for outer, changed in nested.items():
        top[outer] = getattr(spec, outer).model_copy(update=changed)
    return spec.model_copy(update=top)


def _strategies(declared: Plan[Any]) -> dict[str, StrategyChoice]:
    """Returns the strategies that the plan of the declared target chose, by operation and path of the site."""
    named = dict[str, dict[str, str]]()
    for each in declared.operations:
        if each.op.is_declared:
            named.setdefault(each.op.kind, {})[each.site.path] = each.chosen.name
    return cast("dict[str, StrategyChoice]", named)


def _planned(
    spec: AnyPlanSpec, wanted: Mapping[str, StrategyChoice]
) -> tuple[AnyPlanSpec, Plan[AnyPlanSpec], tuple[str, ...]]:
    """Plans the small declaration with the strategies of the declared one. Those that cannot run on a processor are
    left out, and named."""
    parallel = {kind: dict(cast("dict[str, str]", choices)) for kind, choices in wanted.items()}
    why: dict[tuple[str, str], str] = {}
    for _ in range(20):
        small = spec.model_copy(update={"parallel": {kind: choices for kind, choices in parallel.items() if choices}})
        try:
            plan = plan_run(small)
        except ConfigError as error:
            refused = [(p, p.where.split(".", 2)) for p in error.problems if p.where.startswith("parallel.")]
            if not refused:
                raise _cannot_shrink(error) from error
            for problem, (_, kind, path) in refused:
                parallel[kind].pop(path)
                why[kind, path] = problem.what
            continue
        return small, plan, tuple(_replaced(plan, wanted, why))
    raise AssertionError("each turn leaves out a strategy")


def _cannot_shrink(error: ConfigError) -> ConfigError:
    """Returns the error of a small declaration that cannot be planned: which rule does not let it shrink."""
    return ConfigError(
        [
            replace(
                p, what=f"the declaration cannot be cut for a check: {p.what}", fix=f"{p.fix}; of the small declaration"
            )
            for p in error.problems
        ]
    )


def _replaced(
    plan: Plan[Any], wanted: Mapping[str, StrategyChoice], why: Mapping[tuple[str, str], str]
) -> Iterator[str]:
    found = {(each.op.kind, each.site.path): each.chosen.name for each in plan.operations}
    said = dict[str, None]()
    for kind, choices in wanted.items():
        for path, name in cast("dict[str, str]", choices).items():
            runs = found.get((kind, path))
            if runs is not None and runs != name:
                reason = why.get((kind, path), "it cannot run there").split(": ", 1)[-1]
                said[f"{kind} {path}: {runs} instead of {name}: {reason}"] = None
    yield from said


def _left_out(declared: Plan[Any]) -> Iterator[str]:
    if presets := [name for name in declared.spec.overlap.flag_presets if name != "auto"]:
        yield f"compiler options of {', '.join(presets)}: they change the schedule, not what is computed"


def _cuts_of(spec: PlanSpec, cuts: _Cuts, model_cuts: _Cuts) -> Iterator[KeyCut]:
    for key, (value, why) in {**{f"model.{key}": cut for key, cut in model_cuts.items()}, **cuts}.items():
        before: Any = spec
        for part in key.split("."):
            before = getattr(before, part, None)
        if before != value:
            yield KeyCut(key=key, declared=_shown(before), value=_shown(value), why=why)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Record):
        return "{" + ", ".join(f"{key}: {_shown(one)}" for key, one in value) + "}"
    return str(value)


def in_float32(spec: AnyPlanSpec) -> AnyPlanSpec:
    """Returns the declaration in float32, in which faults are not hidden by rounding."""
    return spec.model_copy(update={"precision": FLOAT32})


def on_one_device(spec: AnyPlanSpec) -> AnyPlanSpec:
    """Returns the declaration on one device, without stages."""
    return on_mesh(spec, **{axis: 1 for axis, _ in spec.mesh})


def on_mesh(spec: AnyPlanSpec, **sizes: int) -> AnyPlanSpec:
    """Returns the declaration with other sizes of mesh axes, and as many devices."""
    mesh = spec.mesh.model_copy(update=sizes)
    num_devices = math.prod(size or 1 for _, size in mesh)
    target = CpuTarget(kind="cpu", num_devices=num_devices)
    return spec.model_copy(update={"mesh": mesh, "target": target})
