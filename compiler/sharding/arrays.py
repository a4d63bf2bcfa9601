"""The arrays of a program before they are laid out: parameters, trained and frozen, and the activations that the model
names; and the sites of its operations. A declaration names the matrices that it adapts by patterns of their paths.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from meshloom.models import Context, LogicalAxes, Model, Params, is_counted, is_logical_axes, split_aux
from meshloom.models.adapter import Matrix, adapt, find_matrices, is_adapter
from meshloom.models.config import AdapterConfig
from meshloom.models.contract import ADAPTED_WEIGHT

from ..core.errors import Problem, raise_if_any, use_one_of
from ..core.trees import leaves_by_path
from ..core.user_code import blamed_on_user
from ..formats.block import BlockFormat
from ..formats.element import element_formats
from ..formats.layout import encoded_shard_bytes
from ..spec.step_spec import StepSpec
from .base_formats import base_formats
from .model_check import check_aux, check_embedded, check_model, check_of_head, check_output, check_totals

WHERE = "adapter.targets"
_LENGTH = 8  # of the sequence that the model is traced with, in tokens


def adapted_model(model: Model, adapter: AdapterConfig) -> Model:
    """Returns the model with adapters beside the matrices that the declaration names. Raises ConfigError for a pattern
    that names none, for dropout of the input of experts, and for a model that counts what its rules read: a checkpoint
    of adapters does not hold the counts."""
    for stack in model.stacks:
        if counted := [path for path in stack.rules if is_counted(f"{stack.name}/{path}")]:
            what = f"'{stack.name}/{counted[0]}' counts a batch for the next step, and adapters are saved without it"
            fix = "train all weights, by adapter=none, or set model.load_balancing_counts=microbatch"
            raise_if_any([Problem("adapter.kind", what, fix)])
    matrices = find_matrices(model, length=min(_LENGTH, model.max_length or _LENGTH))
    targets = _by_default(model, matrices) if adapter.targets is None else _named(model, matrices, adapter.targets)
    experts = [path for path, matrix in targets.items() if matrix.is_of_experts]
    if experts and adapter.dropout:
        what = f"the input of '{experts[0]}' cannot be dropped: experts multiply with it and its adapter at once"
        raise_if_any([Problem("adapter.dropout", what, f"set adapter.dropout=0, or leave experts out of {WHERE}")])
    return replace(adapt(model, adapter, targets), matrices=matrices)


def _by_default(model: Model, matrices: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """Returns the matrices of layers, but routers and experts."""
    stacks = {stack.name for stack in model.stacks}
    chosen = {
        path: matrix
        for path, matrix in matrices.items()
        if path.split("/")[0] in stacks and path not in model.float32 and not matrix.is_of_experts
    }
    if not chosen:
        fix = "let the model multiply by context.matmul (docs/extend.md)"
        fix = f"name matrices of other pieces: {use_one_of('', matrices)}" if matrices else fix
        raise_if_any([Problem(WHERE, "no matmul of a layer reads a parameter", fix)])
    return chosen


def _named(model: Model, matrices: Mapping[str, Matrix], patterns: tuple[str, ...]) -> dict[str, Matrix]:
    """Returns the matrices that patterns name; a pattern passes over what no matmul reads, as norms beside them."""
    raise_if_any(_wrong(model, matrices, patterns))
    return {path: each for path, each in matrices.items() if any(fnmatchcase(path, pattern) for pattern in patterns)}


def _wrong(model: Model, matrices: Mapping[str, Matrix], patterns: tuple[str, ...]) -> Iterator[Problem]:
    paths = tuple(leaves_by_path(model.abstract()))
    tied = {f"embed/{name}" for name in model.tied.values()}
    for index, pattern in enumerate(patterns):
        matching = [path for path in paths if fnmatchcase(path, pattern)]
        if any(path in matrices for path in matching):
            continue
        what = f"no parameter matches '{pattern}'"
        if matching:
            others = f" (and {len(matching) - 1} more)" if len(matching) > 1 else ""
            why = "the embedding and the head share it" if matching[0] in tied else "no matmul reads it"
            what = f"'{pattern}' matches '{matching[0]}'{others}, which cannot be adapted: {why}"
        yield Problem(f"{WHERE}[{index}]", what, use_one_of(pattern, matrices))


EXPERTS = "experts"  # the logical axis of expert weights: they stay on their devices, and tokens are sent to them
VOCAB = "vocab"  # the logical axis
UpdatedBy = Literal["optimizer", "rule", "nothing"]  # nothing: it is frozen
PAIR_METRICS = ("pair_accuracy", "pair_margin", "chosen_log_prob", "rejected_log_prob")  # of the head (step/forward.py)
LAYER_INPUT = "layer_input"  # the compiler's name for a layer's input; a remat policy may use it
# What operations mark themselves, by their kind: the rows that experts receive, and these times their first matrices.
MARKED_WITHIN = {"experts": (EXPERT_INPUT := "expert_input", EXPERT_GATE := "expert_gate", EXPERT_UP := "expert_up")}


@dataclass(frozen=True)
class Array:
    """An array of the program before it is laid out. path: its place in the tree, or its name. updated_by: what changes
    a parameter. compute_dtype: the type in which a parameter is gathered and used. is_tied: it is the embedding's
    table, and the head multiplies with it. format: of a parameter that is stored in few bits with scales; dtype is the
    type of its elements."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    logical_axes: LogicalAxes
    updated_by: UpdatedBy = "optimizer"
    compute_dtype: str = ""
    is_tied: bool = False
    format: BlockFormat | None = None

    @property
    def is_trained(self) -> bool:
        """Returns True for a parameter that has a gradient."""
        return self.updated_by == "optimizer"

    @property
    def num_bytes(self) -> int:
        if self.format is not None:
            return self.format.num_bytes(self.shape)
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def bytes_of_shard(self, shards: Sequence[int]) -> int:
        """Returns the bytes of one of the parts that devices have. shards: how many split each dimension."""
        if self.format is None:
            return self.num_bytes // math.prod(shards)
        return encoded_shard_bytes(self.format, self.shape, shards)


@dataclass(frozen=True)
class Operand:
    """One operand of an operation: its global shape for a microbatch.

    activation: its name; None if it has none. parameters: the paths of the parameters that the calls of a site hand
    over here, such as layers/mlp/up_EM; empty for anything else, a weight that is computed from parameters included.
    """

    shape: tuple[int, ...]
    dtype: str
    activation: str | None
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpSite:
    """A place where a model calls `Context.operation`, as recorded while the model is traced.

    kind: "matmul". name: "mlp_output". piece: "embed", a stack, or "head". Calls of one piece, kind and name are one
    site; they have operands of the same shapes. options: keyword arguments of the first call, by name. others: those of
    further calls, where they are not the same.
    """

    kind: str
    name: str
    piece: str
    operands: tuple[Operand, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    others: tuple[tuple[tuple[str, Any], ...], ...] = ()

    @property
    def path(self) -> str:
        """Returns the name of the site among all sites of its kind: 'layers/mlp_output'."""
        return f"{self.piece}/{self.name}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Returns the paths of the parameters that the operation reads."""
        return tuple(path for operand in self.operands for path in operand.parameters)

    def joined(self, call: "OpSite") -> "OpSite":
        """Returns the site with one more call of the same piece, kind and name."""
        pairs = tuple(zip(self.operands, call.operands, strict=False))
        if len(self.operands) != len(call.operands) or any(a.shape != b.shape for a, b in pairs):
            shapes = " and ".join(str([operand.shape for operand in one.operands]) for one in (self, call))
            what = f"{self.kind} '{self.name}' is called in '{self.piece}' with operands of shapes {shapes}"
            raise ValueError(f"{what}: give the calls different names")
        operands = tuple(replace(a, parameters=_united(a.parameters, b.parameters)) for a, b in pairs)
        is_known = call.options in (self.options, *self.others)
        return replace(self, operands=operands, others=self.others if is_known else (*self.others, call.options))

    def options_of(self, name: str) -> tuple[Any, ...]:
        """Returns the keyword argument of this name of each different call."""
        return tuple(dict(options)[name] for options in (self.options, *self.others))

    def option(self, name: str) -> Any:
        """Returns the keyword argument of this name."""
        return dict(self.options)[name]


@dataclass(frozen=True)
class Arrays:
    """The arrays that rules lay out. parameters: all of them, by path; activations: the ones that the model names, and
    their gradients if laid out differently; in_layers: by stack, the names that a remat policy may use in its layers;
    results: by kind of operation, the names of the activations that it returns; sites: the operations that the model
    runs through its context; auxiliary: losses and statistics that layers and the head return (`Aux`), as STACK/NAME
    and head/NAME."""

    parameters: tuple[Array, ...]
    activations: tuple[Array, ...]
    in_layers: Mapping[str, tuple[str, ...]]
    results: Mapping[str, frozenset[str]]
    sites: tuple[OpSite, ...]
    auxiliary: tuple[str, ...]

    @property
    def has_experts(self) -> bool:
        return any(EXPERTS in each.logical_axes for each in self.parameters)


def _united(*paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for each in paths for path in each))


def gradient_name(name: str) -> str:
    """Returns the name of an activation's gradient, for a gradient with its own layout."""
    return f"gradient of {name}"


def vocab_dimensions(model: Model) -> Params:
    """Returns the dimension of each of the head's own parameters that is the vocabulary, as a tree like them; None for
    a parameter without one."""

    def place(axes: LogicalAxes) -> int | None:
        return axes.index(VOCAB) if VOCAB in axes else None

    return jax.tree.map(place, model.logical_axes()["head"], is_leaf=is_logical_axes)


def build_model(spec: StepSpec) -> Model:
    """Returns the model that the spec declares, with its adapters; allocates nothing. Raises ConfigError if a user's
    model cannot be built, or the adapters do not fit it."""
    family = spec.model.family
    with blamed_on_user("model.family", f"building {family}", is_theirs=":" in family):
        model = check_model(family, spec.model.build())
        return model if spec.adapter is None else adapted_model(model, spec.adapter)


def find_arrays(spec: StepSpec, model: Model) -> Arrays:
    """Returns the arrays of a run, by tracing the model once; nothing is allocated. Raises ConfigError where that fails
    in a user's model."""
    family = spec.model.family
    batch = max(1, spec.global_batch_size // spec.num_microbatches)
    length = min(spec.sequence_length, model.max_length or spec.sequence_length)  # check_length refuses a longer one
    with blamed_on_user("model.family", f"tracing {family}", is_theirs=":" in family):
        traced = _trace(model, batch, length, spec.model.vocab_size, spec.precision.compute)
    of_pairs = [f"head/{name}" for name in PAIR_METRICS if spec.has_pairs]
    return replace(traced, parameters=_parameters(model, spec), auxiliary=(*traced.auxiliary, *of_pairs))


def _parameters(model: Model, spec: StepSpec) -> tuple[Array, ...]:
    """Returns all parameters of the model by path, such as `layers/attention/query_EHD`."""
    axes = leaves_by_path(model.logical_axes(), is_leaf=is_logical_axes)
    shapes = {path: x.shape for path, x in leaves_by_path(model.abstract()).items()}
    frozen, trained_dtype = frozen_paths(spec, shapes, ruled=model.rules), spec.precision.parameters
    types = dict.fromkeys(frozen, spec.precision.frozen or (spec.precision.compute if spec.adapter else trained_dtype))
    types |= dict.fromkeys(model.float32, "float32")
    tied = {f"embed/{name}" for name in model.tied.values()}
    used = dict.fromkeys(shapes, spec.precision.compute) | dict.fromkeys(model.float32, "float32")

    def updated_by(path: str) -> UpdatedBy:
        return "nothing" if path in frozen else "rule" if path in model.rules else "optimizer"

    formats = base_formats(model, spec.adapter.base) if spec.adapter and spec.adapter.base else {}
    types |= {path: element_formats()[format.element].dtype for path, format in formats.items()}
    return tuple(
        Array(
            path, shape, types.get(path, trained_dtype), axes[path], updated_by(path), used[path], path in tied,
            formats.get(path),
        )
        for path, shape in shapes.items()
    )  # fmt: skip


@lru_cache(maxsize=32)  # a search, and a process with tests, plans many layouts of a model
def _trace(model: Model, batch: int, length: int, vocab_size: int, dtype: str) -> Arrays:
    """Traces embed, one layer of each stack and head with a recorder, at the size of one global microbatch. Returns
    the arrays without the parameters."""
    recorder, in_layers = _Recorder(dtype), dict[str, tuple[str, ...]]()
    tokens_BT = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def forward(params: Any, tokens_BT: jax.Array) -> jax.Array:
        recorder.parameters = leaves_by_path(params)
        context = Context(jnp.arange(length)[None], recorder.activation, recorder.operation)
        recorder.piece = "embed"
        x_BTE = model.embed.apply(params["embed"], tokens_BT, context)
        check_embedded(model.embed.name, x_BTE, tokens_BT.shape)
        for stack in model.stacks:
            recorder.piece, first, before = stack.name, len(recorder.marked), x_BTE
            output = stack.layer.apply(params[stack.name], before, context)
            x_BTE = recorder.without_aux(stack.layer.name, output)
            check_totals(stack, split_aux(output)[1])
            recorder.auxiliary += [f"{stack.name}/{name}" for name in stack.measures]
            check_output(stack.layer.name, x_BTE, before.shape, dtype=before.dtype.name)
            kinds = (site.kind for site in recorder.sites.values() if site.piece == stack.name)
            within = (name for kind in kinds for name in MARKED_WITHIN.get(kind, ()))
            names = (name for _, name in recorder.marked[first:])
            in_layers[stack.name] = tuple(dict.fromkeys((LAYER_INPUT, *names, *within)))
        recorder.piece = "head"
        output = model.head.apply(model.head_params(params["head"], params["embed"]), x_BTE, context)
        check_of_head(model.head.name, output)
        logits_BTV = recorder.without_aux(model.head.name, output)
        expected = (*tokens_BT.shape, vocab_size)
        check_output(model.head.name, logits_BTV, expected, is_last_more=True)
        return logits_BTV

    pieces = {"embed": model.embed, "head": model.head, **{stack.name: stack.layer for stack in model.stacks}}
    params = {name: piece.abstract_in(recorder.dtype) for name, piece in pieces.items()}
    jax.eval_shape(forward, params, tokens_BT)
    return Arrays(
        (),
        tuple(recorder.activations.values()),
        in_layers,
        {kind: frozenset(names) for kind, names in recorder.result_names.items()},
        tuple(recorder.sites.values()),
        tuple(recorder.auxiliary),
    )


@dataclass
class _Recorder:
    """Records the calls that a model makes on its context while it is traced. marked: the activations so far, with
    names. parameters: all parameters by path, as they are traced; they and activations are recognised by identity."""

    dtype: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    activations: dict[str, Array] = field(default_factory=dict)
    marked: list[tuple[jax.Array, str]] = field(default_factory=list)
    results: list[tuple[Any, str]] = field(default_factory=list)  # the results of operations, with their kinds
    result_names: dict[str, set[str]] = field(default_factory=dict)
    sites: dict[tuple[str, str, str], OpSite] = field(default_factory=dict)
    adapted: list[tuple[Any, str]] = field(default_factory=list)  # matrices with their adapters, with their paths
    auxiliary: list[str] = field(default_factory=list)
    piece: str = ""  # the piece that is being traced

    def without_aux(self, name: str, output: Any) -> Any:
        """Returns the output of the piece of this name without its auxiliary outputs."""
        output, aux = split_aux(output)
        check_aux(name, aux)
        self.auxiliary += [f"{self.piece}/{each}" for each in (*aux.losses, *aux.statistics)]
        return output

    def activation(self, name: str, x: jax.Array, *axes: str | None, gradient: LogicalAxes | None = None) -> jax.Array:
        if len(axes) != x.ndim or not all(axis is None or isinstance(axis, str) for axis in axes):
            raise ValueError(
                f"activation('{name}'): an array of shape {x.shape} needs {x.ndim} logical axes, has {axes}"
            )
        self.marked.append((x, name))
        for kind in (kind for result, kind in self.results if x is result):
            self.result_names.setdefault(kind, set()).add(name)
        self.activations[name] = Array(name, x.shape, self.dtype, axes)
        if gradient is not None:
            self.activations[gradient_name(name)] = Array(gradient_name(name), x.shape, self.dtype, gradient)
        return x

    def operation(self, kind: str, name: str, plain: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        arrays = [x[...] if isinstance(x, nnx.Variable) else x for x in operands if x is not None]
        recorded = tuple(
            Operand(tuple(x.shape), str(x.dtype), self._name_of(x), self._parameters_of(x)) for x in arrays
        )
        call = OpSite(kind, name, self.piece, recorded, tuple(sorted(options.items())))
        key = (self.piece, kind, name)
        self.sites[key] = self.sites[key].joined(call) if key in self.sites else call
        result = plain(*operands, **options)
        self.results.append((result, kind))
        if kind == ADAPTED_WEIGHT:
            self.adapted += [(result, path) for path in recorded[0].parameters]
        return result

    def _name_of(self, x: jax.Array) -> str | None:
        return next((name for array, name in self.marked if array is x), None)

    def _parameters_of(self, x: jax.Array) -> tuple[str, ...]:
        own = tuple(path for path, array in self.parameters.items() if array is x)[:1]
        return own or tuple(path for array, path in self.adapted if array is x)[:1]


def frozen_paths(spec: StepSpec, paths: Iterable[str], *, ruled: Collection[str] = ()) -> frozenset[str]:
    """Returns the paths of the parameters that `frozen_parameters` names, and with adapters of all others. ruled: those
    that rules update. What a rule counts is not frozen.

    Raises ConfigError for a pattern that matches no parameter, where no parameter is left to train, and for
    `precision.frozen` without frozen parameters."""
    paths = tuple(paths)
    weights = tuple(path for path in paths if not is_counted(path))
    frozen = frozenset(path for path in weights if any(fnmatchcase(path, each) for each in spec.frozen_parameters))
    frozen |= {path for path in paths if spec.adapter is not None and not is_adapter(path)}
    problems = [
        Problem(f"frozen_parameters[{index}]", f"no parameter matches '{pattern}'", use_one_of(pattern, weights))
        for index, pattern in enumerate(spec.frozen_parameters)
        if not any(fnmatchcase(path, pattern) for path in weights)
    ]
    if frozen.union(ruled).issuperset(paths):
        fix = "leave out a pattern, so that something is trained"
        problems.append(Problem("frozen_parameters", f"all {len(frozen)} parameters of the model are frozen", fix))
    if spec.precision.frozen is not None and not frozen:
        fix = "set precision.frozen=null, or name parameters: frozen_parameters=[embed/*]"
        problems.append(Problem("precision.frozen", "no parameter is frozen", fix))
    raise_if_any(problems)
    return frozen
