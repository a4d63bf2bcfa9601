"""The head's matmul: with the whole vocabulary at once, or with one chunk of it after another.

Whole, its weights are gathered before the head begins, with nothing beside it; and for the gradient, as wide as the
vocabulary, XLA may make an all-reduce. In chunks the next one is gathered beside the matmul of the one before, and the
gradient of each, as wide as XLA can reduce-scatter, is reduced beside the matmuls that make the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from meshloom.models import Context, Model, Params, is_logical_axes

from ..core.format import human_seconds
from ..core.partition_spec import Axes
from ..core.traffic import Traffic
from ..core.trees import leaves_by_path, like
from ..jaxpr.read_jaxpr import read_jaxpr
from ..sharding.arrays import VOCAB, OpSite
from ..sharding.rules import ArrayPlan
from ..sharding.sharding import ShardingPlan, accumulated_layouts, gathered_bytes
from ..spec.compiler_traits import odd_part
from ..spec.cost_model import cost_model
from ..spec.plan_spec import PlanSpec
from ..target.compiler_options import hidden_kinds
from .operation import Cost, OpInputs, OpPlan, ParallelOp, Refusal, Strategy, WeightUse, moved, refused

WHOLE, VOCAB_CHUNKS = "whole", "vocab_chunks"
ALIGNED = 8  # parts of a vocabulary that is a power of two are multiples of this share of it


class LmHeadOp(ParallelOp):
    kind = "lm_head"
    title = "head"
    names = (WHOLE, VOCAB_CHUNKS)
    fallback = WHOLE
    after = ("loss",)

    def sites(self, inputs: OpInputs) -> Sequence[OpSite]:
        return (OpSite(self.kind, "head", "head"),)

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        spec, model, sharding, mesh = inputs.spec, inputs.model, inputs.sharding, inputs.mesh
        gathers = [(plan, gathered_bytes(plan, mesh, sharding.roles)) for plan in _with_vocab(sharding)]
        num_bytes, axes = sum(size for _, size in gathers), _gathered_over(sharding)
        whole = Strategy(
            WHOLE,
            "of the whole vocabulary",
            (spec.model.vocab_size,),
            _moved([size for _, size in gathers], axes, mesh.num_shards(axes)) if axes else (),
            reason="in one matmul",
        )
        if refusal := _cannot_be_cut(spec, model, sharding):
            return Strategy(VOCAB_CHUNKS, "", refusal=Refusal(refusal)), whole
        (vocab_size,) = _vocab_sizes(sharding)
        sizes = chunk_sizes(vocab_size, inputs.target.compiler.max_odd_factor(mesh.num_shards(axes)))
        shown = ", ".join(f"{size:,}" for size in sizes)
        chunks = Strategy(
            VOCAB_CHUNKS,
            f"in chunks of {shown} entries of the vocabulary",
            sizes,
            _moved([num_bytes * size // vocab_size for size in sizes], axes, mesh.num_shards(axes)),
            refusal=refused(_objection(inputs), is_hard=False),
            weights="chunked",
        )
        # The gather of the whole head, which nothing hides; for chunks, the added passes over the head's input.
        gather = mesh.alone_seconds("all-gather", num_bytes, axes)
        bandwidth = inputs.target.hbm_bytes_per_second_per_device
        if gather is None or bandwidth is None:
            return replace(chunks, reason="how long the head's gather takes is not known"), whole
        input_bytes = inputs.batch.tokens_of_device * num_bytes // vocab_size
        passes = cost_model().head_chunk_passes * (len(sizes) - 1) * input_bytes / bandwidth
        figures = f"{human_seconds(gather)} of gather, {human_seconds(passes)} for its input read more often"
        return (
            replace(chunks, cost=Cost(passes, "seconds"), reason=figures),
            replace(whole, cost=Cost(gather, "seconds"), reason=figures),
        )

    def weight_use(self, plan: OpPlan, weight: ArrayPlan) -> WeightUse | None:
        is_of_vocabulary = weight.array.path.startswith("head/") and VOCAB in weight.array.logical_axes
        return plan.chosen.weights if is_of_vocabulary else None


def _moved(sizes: Sequence[int], axes: Axes, group_size: int) -> tuple[Traffic, ...]:
    """Returns a gather forward and a reduce-scatter backward of each of these sizes in bytes."""
    gathers = (moved("all-gather", axes, group_size, size, 1, "forward") for size in sizes)
    return (*gathers, *(moved("reduce-scatter", axes, group_size, size, 1, "backward") for size in sizes))


def _objection(inputs: OpInputs) -> str | None:
    """Returns why chunks would hide nothing here; None where they may."""
    target = inputs.target
    if not target.compiler.gathers_before_loops:
        return f"the compiler for {target.name} does not wait for the head's gather before the layers"
    if "all-gather" not in hidden_kinds(inputs.spec.overlap.flag_presets, inputs.spec, target):
        return "with these XLA options no gather runs beside the head's matmuls"
    ((loss,),) = inputs.after
    if loss.chosen.parameters > 1:
        return f"each of {loss.chosen.parameters} chunks of tokens needs the whole vocabulary"
    return None


def chunk_sizes(vocab_size: int, max_odd_factor: int | None) -> tuple[int, ...]:
    """Returns the vocabulary in few chunks, the first one small: nothing hides its gather. max_odd_factor: the
    largest o of a chunk o 2^k with which its gradient is reduce-scattered; None: any.

    128,256 entries, max_odd_factor 26: 256, 25 x 1,024, 25 x 4,096.
    """
    step = min(vocab_size & -vocab_size, max(1, vocab_size // ALIGNED))  # as well aligned as all of it
    left, sizes = vocab_size, list[int]()
    while left:
        most = min(left, int(vocab_size * cost_model().head_largest_part)) // step * step
        sizes.append(
            next(size for size in range(most, 0, -step) if not max_odd_factor or odd_part(size) <= max_odd_factor)
        )
        left -= sizes[-1]
    return tuple(reversed(sizes))


def _cannot_be_cut(spec: PlanSpec, model: Model, sharding: ShardingPlan) -> str | None:
    """Returns why its parameters cannot be used in parts; None where they can."""
    if VOCAB in jax.tree.leaves([axes for name, axes in model.head.logical_axes.items() if name in model.tied]):
        return "the embedding has the same weights"
    layouts = (*sharding.parameters, *accumulated_layouts(spec, sharding), *sharding.optimizer)
    of_vocab = [d for plan in _of_head(layouts) for d in plan.dimensions if d.logical == VOCAB]
    if not of_vocab:
        return "it has no parameter with a dimension 'vocab'"
    if len(_vocab_sizes(sharding)) > 1:
        return "its parameters have vocabularies of different sizes"
    if axes := dict.fromkeys(axis for d in of_vocab for axis in d.axes):
        return f"the vocabulary is split over {' and '.join(axes)}"
    if not _gathered_over(sharding):
        return "its weights are whole on every device"
    return cut_refusal(spec, model)


def _of_head(layouts: tuple[ArrayPlan, ...]) -> Iterator[ArrayPlan]:
    return (plan for plan in layouts if plan.array.path.split("/")[0] == "head")


def _vocab_sizes(sharding: ShardingPlan) -> set[int]:
    """Returns the sizes that the parameters have for the vocabulary, which a model may fill up."""
    return {d.size for plan in _of_head(sharding.parameters) for d in plan.dimensions if d.logical == VOCAB}


def _gathered_over(sharding: ShardingPlan) -> tuple[str, ...]:
    """Returns the mesh axes over which the parameters with a vocabulary are gathered."""
    axes = (axis for plan in _with_vocab(sharding) for d in plan.dimensions for axis in d.axes)
    return tuple(dict.fromkeys(axis for axis in axes if axis in sharding.roles.tokens))


def _with_vocab(sharding: ShardingPlan) -> tuple[ArrayPlan, ...]:
    return tuple(plan for plan in _of_head(sharding.parameters) if VOCAB in plan.array.logical_axes)


def cut_refusal(spec: PlanSpec, model: Model) -> str | None:
    """Returns why a part of the parameters' vocabulary does not make that part of the logits alone; None where it does.

    Split over two devices along the vocabulary, they exchange nothing, and each has half of the logits.
    """
    num_devices, length = 2, 2
    axes_of_head = leaves_by_path(model.head.logical_axes, is_leaf=is_logical_axes)
    places = {path: axes.index(VOCAB) for path, axes in axes_of_head.items() if VOCAB in axes}
    every = leaves_by_path(model.head.abstract_in(spec.precision.compute))
    layouts = {p: tuple((VOCAB,) if d == places.get(p) else () for d in range(x.ndim)) for p, x in every.items()}

    def smaller(path: str) -> jax.ShapeDtypeStruct:
        sizes = zip(every[path].shape, layouts[path], strict=True)
        return jax.ShapeDtypeStruct(tuple(num_devices if axes else size for size, axes in sizes), every[path].dtype)

    def logits(head: Params, embed: Params, tokens_BT: jax.Array) -> jax.Array:
        context = Context(jnp.arange(length)[None], lambda name, x, *_, **__: x)
        return model.head.apply(head, model.embed.apply(embed, tokens_BT, context), context)

    head = like(model.head.abstract, {path: smaller(path) for path in every})
    tokens_BT = jax.ShapeDtypeStruct((1, length), jnp.int32)
    try:
        traced = jax.make_jaxpr(logits)(head, model.embed.abstract, tokens_BT).jaxpr
    except Exception as error:
        if ":" not in spec.model.family:
            raise  # our own heads take any vocabulary
        said = next(iter(str(error).splitlines()), "")
        return f"it does not take a part of the vocabulary ({type(error).__name__}: {said})"
    alone = "its logits are not each made of their own entries of the parameters"
    if len(traced.outvars) > 1:
        return alone  # auxiliary outputs are made of whole logits
    others = [((),) * x.aval.ndim for x in traced.invars[len(layouts) :]]
    program = read_jaxpr(traced, [*layouts.values(), *others], {VOCAB: num_devices})
    (made,) = traced.outvars
    is_split = program.sizes[program.outputs[0]] * num_devices == made.aval.size * made.aval.dtype.itemsize
    return None if is_split and not any(operation.collective for operation in program.operations) else alone
