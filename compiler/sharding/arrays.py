"""The arrays of a program before they are laid out: parameters, and the activations that the model names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshloom.models import Context, LogicalAxes, Model, is_logical_axes
from meshloom.models.contract import look_up, project

from ..config.spec import RunSpec
from ..config.user_code import blamed_on_user
from ..core.errors import Problem, raise_if_any
from ..core.trees import leaves_by_path
from .model_check import check_embedded, check_model, check_output

LAYER_INPUT = "layer_input"  # the compiler's name for what a layer is handed; a remat policy may use it


@dataclass(frozen=True)
class Array:
    """An array of the program before it is laid out. `path`: its place in the tree, or its name."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    logical_axes: LogicalAxes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Projected:
    """A matmul that the model makes by its context. name: of the activation that it makes; of: of the one that it is
    made of, None where that has no name. depth: entries that are contracted; width: of the result's last dimension."""

    name: str
    of: str | None
    depth: int
    width: int


@dataclass(frozen=True)
class Arrays:
    """What rules are about. parameters: all of them, by path; activations: those that the model names, and gradients of
    them that are laid out otherwise; in_layers: what a remat policy may name in the layers of each stack, by stack;
    looked_up: the embedding's parameters of which rows are looked up; projected: matmuls in layers."""

    parameters: tuple[Array, ...]
    activations: tuple[Array, ...]
    in_layers: Mapping[str, tuple[str, ...]]
    looked_up: tuple[str, ...]
    projected: tuple[Projected, ...]


def gradient_of(name: str) -> str:
    """The name of an activation's gradient, where its layout is another."""
    return f"gradient of {name}"


def build_model(spec: RunSpec) -> Model:
    """The model that the spec declares; allocates nothing. Raises ConfigError where a user's model cannot be built."""
    family = spec.model.family
    with blamed_on_user("model.family", f"building {family}", is_theirs=":" in family):
        return check_model(family, spec.model.build())


def find_arrays(spec: RunSpec, model: Model) -> Arrays:
    """The arrays of a run, by tracing the model once; nothing is allocated. Raises ConfigError where that fails in a
    user's model."""
    family = spec.model.family
    with blamed_on_user("model.family", f"tracing {family}", is_theirs=":" in family):
        recorder = _Recorder(spec.precision.compute, tuple(model.embed.abstract))
        in_layers = _trace(model, spec, recorder)
    raise_if_any(recorder.problems())
    return Arrays(
        _parameters(model, spec.precision.parameters),
        tuple(recorder.activations.values()),
        in_layers,
        tuple(dict.fromkeys(recorder.looked_up)),
        tuple(recorder.projected.values()),
    )


def _parameters(model: Model, dtype: str) -> tuple[Array, ...]:
    """All parameters of the model by path, such as `layers/attention/query_EHD`."""
    axes = leaves_by_path(model.logical_axes(), is_leaf=is_logical_axes)
    return tuple(Array(path, x.shape, dtype, axes[path]) for path, x in leaves_by_path(model.abstract()).items())


def _trace(model: Model, spec: RunSpec, recorder: "_Recorder") -> dict[str, tuple[str, ...]]:
    """Run embed, one layer of each stack and head, at the size of one global microbatch, past the recorder. Gives the
    names of activations by stack."""
    in_layers: dict[str, tuple[str, ...]] = {}
    batch = max(1, spec.global_batch_size // spec.num_microbatches)
    length = min(spec.sequence_length, model.max_length or spec.sequence_length)  # check_length refuses a longer one
    tokens_BT = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def forward(params: Any, tokens_BT: jax.Array) -> jax.Array:
        context = Context(jnp.arange(length)[None], recorder.activation)
        x_BTE = model.embed.apply(params["embed"], tokens_BT, replace(context, look_up=recorder.look_up))
        check_embedded(model.embed.name, x_BTE, tokens_BT.shape)
        for stack in model.stacks:
            first = len(recorder.marked)
            before = x_BTE
            x_BTE = stack.layer.apply(params[stack.name], before, replace(context, project=recorder.project))
            check_output(stack.layer.name, x_BTE, before.shape, dtype=before.dtype.name)
            in_layers[stack.name] = tuple(dict.fromkeys((LAYER_INPUT, *(name for _, name in recorder.marked[first:]))))
        logits_BTV = model.head.apply(model.head_params(params["head"], params["embed"]), x_BTE, context)
        expected = (*tokens_BT.shape, spec.model.vocab_size)
        check_output(model.head.name, logits_BTV, expected, is_last_more=True)
        return logits_BTV

    pieces = {"embed": model.embed, "head": model.head, **{stack.name: stack.layer for stack in model.stacks}}
    params = {
        name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(recorder.dtype)), piece.abstract)
        for name, piece in pieces.items()
    }
    jax.eval_shape(forward, params, tokens_BT)
    return in_layers


@dataclass
class _Recorder:
    """What a model says by its context while it is traced. marked: each activation in turn, with its name."""

    dtype: str
    tables: tuple[str, ...]  # parameters of the embedding
    activations: dict[str, Array] = field(default_factory=dict)
    marked: list[tuple[jax.Array, str]] = field(default_factory=list)
    looked_up: list[str] = field(default_factory=list)
    projected: dict[str, Projected] = field(default_factory=dict)

    def activation(self, name: str, x: jax.Array, *axes: str | None, gradient: LogicalAxes | None = None) -> jax.Array:
        if len(axes) != x.ndim or not all(axis is None or isinstance(axis, str) for axis in axes):
            raise ValueError(
                f"activation('{name}'): an array of shape {x.shape} needs {x.ndim} logical axes, has {axes}"
            )
        self.marked.append((x, name))
        self.activations[name] = Array(name, x.shape, self.dtype, axes)
        if gradient is not None:
            self.activations[gradient_of(name)] = Array(gradient_of(name), x.shape, self.dtype, gradient)
        return x

    def look_up(self, name: str, table: jax.Array, ids: jax.Array) -> jax.Array:
        if name not in self.tables:
            known = ", ".join(self.tables)
            raise ValueError(f"look_up('{name}'): the embedding has no such parameter, it has {known}")
        self.looked_up.append(name)
        return look_up(name, table, ids)

    def project(self, name: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        if x.shape[2:] != weight.shape[:-1]:
            raise ValueError(f"project('{name}'): {x.shape} and {weight.shape} are not (B, T, *K) and (*K, E)")
        of = next((other for array, other in self.marked if array is x), None)
        self.projected[name] = Projected(name, of, depth=math.prod(x.shape[2:]), width=weight.shape[-1])
        return project(name, x, weight)

    def problems(self) -> list[Problem]:
        """Matmuls whose results have no name."""
        unnamed = [name for name in self.projected if name not in self.activations]
        what, fix = "'{}' is projected, and no activation", "name it: context.activation('{}', ...)"
        return [Problem("model.family", what.format(name), fix.format(name)) for name in unnamed]
