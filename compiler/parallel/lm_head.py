"""How the head multiplies with its weights: with all of them at once, or with one part of the vocabulary after another.

Whole, they are gathered before the head begins, with nothing beside it; and of the gradient, as wide as the vocabulary,
XLA may make an all-reduce. In parts the next one is gathered beside the matmul of the one before, and the gradient of
each, as wide as XLA can reduce-scatter, crosses beside the matmuls that make the others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from meshloom.models import Context, LogicalAxes, Model, Params, is_logical_axes

from ..config.spec import RunSpec
from ..core.errors import ConfigError, Problem
from ..core.format import human_seconds
from ..core.trees import leaves_by_path, like
from ..jaxpr.read_jaxpr import read_jaxpr
from ..sharding.batch import tokens_of_device
from ..sharding.gradients import accumulated_layouts
from ..sharding.rules import ArrayPlan
from ..sharding.sharding import ShardingPlan, gathered_bytes
from ..target.compiler_options import hidden_kinds
from ..target.mesh import MeshPlan
from ..target.target import TargetPlan

VOCAB = "vocab"  # the logical axis
MOST_OF_THE_VOCABULARY = 0.8  # in one part: the gather of what is left of it is not hidden
NUM_PASSES = 4  # over the head's input for each part more: its norm, and the sum of its gradients, forward and backward
ALIGNED = 8  # parts of a vocabulary that is a power of two are multiples of this share of it


@dataclass(frozen=True)
class HeadPlan:
    """part_sizes: entries of the vocabulary in each part, in the order in which they are gathered; one: whole."""

    part_sizes: tuple[int, ...]
    reason: str

    @property
    def how(self) -> str:
        """In words: what it is multiplied with, and why."""
        if len(self.part_sizes) == 1:
            return f"of the whole vocabulary: {self.reason}"
        sizes = ", ".join(f"{size:,}" for size in self.part_sizes)
        return f"in parts of {sizes} entries of the vocabulary: {self.reason}"


def plan_head(
    spec: RunSpec, model: Model, sharding: ShardingPlan, mesh: MeshPlan, target: TargetPlan, num_loss_blocks: int
) -> HeadPlan:
    """Raises ConfigError where `overlap.head=parts` cannot be."""
    whole = (spec.model.vocab_size,)
    if spec.overlap.head == "whole":
        return HeadPlan(whole, "overlap.head=whole")
    if why_not := _cannot_be_cut(spec, model, sharding):
        if spec.overlap.head == "parts":
            fix = "set overlap.head=auto, or whole"
            raise ConfigError([Problem("overlap.head", f"the vocabulary cannot be cut into parts: {why_not}", fix)])
        return HeadPlan(whole, why_not)
    axes = _gathered_over(sharding)
    max_odd_factor = target.compiler.max_odd_factor(mesh.num_shards(axes))
    (vocab_size,) = _vocab_sizes(sharding)
    parts = HeadPlan(part_sizes(vocab_size, max_odd_factor), "overlap.head=parts")
    if spec.overlap.head == "parts":
        return parts
    if not target.compiler.gathers_before_loops:
        return HeadPlan(whole, f"the compiler for {target.name} does not wait for its gather in front of the layers")
    if "all-gather" not in hidden_kinds(spec.overlap.option_sets, "weights", target):
        return HeadPlan(whole, "with these option sets no gather runs beside its matmuls")
    if num_loss_blocks > 1:
        return HeadPlan(whole, f"each of {num_loss_blocks} blocks of tokens needs all of it")
    num_bytes = sum(gathered_bytes(plan, spec, mesh) for plan in _with_vocab(sharding))
    gather, bandwidth = mesh.alone_seconds("all-gather", num_bytes, axes), target.hbm_bytes_per_second_per_device
    if gather is None or bandwidth is None:
        return replace(parts, reason="how long its gather takes is not known")
    input_bytes = tokens_of_device(spec, mesh) * num_bytes // vocab_size
    passes = NUM_PASSES * (len(parts.part_sizes) - 1) * input_bytes / bandwidth
    figures = f"{human_seconds(gather)} of gather, {human_seconds(passes)} for its input read more often"
    return replace(parts, reason=figures) if passes < gather else HeadPlan(whole, figures)


def part_sizes(vocab_size: int, max_odd_factor: int | None) -> tuple[int, ...]:
    """The vocabulary in few parts, the first one small, as nothing hides its gather. max_odd_factor: of a part o 2^k,
    the largest o with which its gradient is reduce-scattered; None: any.

    128,256 entries, max_odd_factor 26: 256, 25 x 1,024, 25 x 4,096.
    """
    step = min(vocab_size & -vocab_size, max(1, vocab_size // ALIGNED))  # as well aligned as all of it
    left, sizes = vocab_size, list[int]()
    while left:
        most = min(left, int(vocab_size * MOST_OF_THE_VOCABULARY)) // step * step
        sizes.append(
            next(size for size in range(most, 0, -step) if not max_odd_factor or _odd_part(size) <= max_odd_factor)
        )
        left -= sizes[-1]
    return tuple(reversed(sizes))


def vocab_dimensions(model: Model) -> Params:
    """Of each of the head's own parameters the dimension that is the vocabulary, as a tree like them; None: none is."""

    def place(axes: LogicalAxes) -> int | None:
        return axes.index(VOCAB) if VOCAB in axes else None

    return jax.tree.map(place, model.logical_axes()["head"], is_leaf=is_logical_axes)


def _odd_part(size: int) -> int:
    return size // (size & -size)


def _cannot_be_cut(spec: RunSpec, model: Model, sharding: ShardingPlan) -> str | None:
    """Why its parameters cannot be used in parts; None where they can."""
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
    return None if is_cut_alike(spec, model) else "its logits are not each made of their own entries of the parameters"


def _of_head(layouts: tuple[ArrayPlan, ...]) -> Iterator[ArrayPlan]:
    return (plan for plan in layouts if plan.array.path.split("/")[0] == "head")


def _vocab_sizes(sharding: ShardingPlan) -> set[int]:
    """As the parameters have it: a model may fill its vocabulary up."""
    return {d.size for plan in _of_head(sharding.parameters) for d in plan.dimensions if d.logical == VOCAB}


def _gathered_over(sharding: ShardingPlan) -> tuple[str, ...]:
    """Mesh axes over which the parameters with a vocabulary are gathered."""
    axes = (axis for plan in _with_vocab(sharding) for d in plan.dimensions for axis in d.axes)
    return tuple(dict.fromkeys(axis for axis in axes if axis in sharding.batch_axes))


def _with_vocab(sharding: ShardingPlan) -> tuple[ArrayPlan, ...]:
    return tuple(plan for plan in _of_head(sharding.parameters) if VOCAB in plan.array.logical_axes)


def is_cut_alike(spec: RunSpec, model: Model) -> bool:
    """True where a part of the parameters' vocabulary makes that part of the logits, and nothing else has a part in it:
    split over two devices along the vocabulary, they exchange nothing, and each has half of the logits."""
    num_devices, length, compute = 2, 2, jnp.dtype(spec.precision.compute)
    places = leaves_by_path(vocab_dimensions(model), is_leaf=lambda node: node is None)
    every = leaves_by_path(model.head.abstract)
    layouts = {p: tuple((VOCAB,) if d == places.get(p) else () for d in range(x.ndim)) for p, x in every.items()}

    def smaller(path: str) -> jax.ShapeDtypeStruct:
        sizes = zip(every[path].shape, layouts[path], strict=True)
        return jax.ShapeDtypeStruct(tuple(num_devices if axes else size for size, axes in sizes), compute)

    def logits(head: Params, embed: Params, tokens_BT: jax.Array) -> jax.Array:
        context = Context(jnp.arange(length)[None], lambda name, x, *_, **__: x)
        return model.head.apply(head, model.embed.apply(embed, tokens_BT, context), context)

    head, tokens_BT = like(model.head.abstract, {path: smaller(path) for path in every}), jnp.zeros((1, length), int)
    try:
        traced = jax.make_jaxpr(logits)(head, model.embed.abstract, tokens_BT).jaxpr
    except Exception:  # whatever a user's head raises that takes no vocabulary but its own
        return False
    others = [((),) * x.aval.ndim for x in traced.invars[len(layouts) :]]
    program = read_jaxpr(traced, [*layouts.values(), *others], {VOCAB: num_devices})
    (made,) = traced.outvars
    is_split = program.sizes[program.outputs[0]] * num_devices == made.aval.size * made.aval.dtype.itemsize
    return is_split and not any(operation.collective for operation in program.operations)
