"""Lays out every array by ordered logical axis rules, with a reason for each. Nothing is replicated silently.

rules.py lays out one array; this module lays out all of them, and checks for layouts that cannot or should not be run.
The weights of a pipeline's layers, and their optimizer state, lie over its stages in one of two ways:

    layers_over_stages    each stage holds the layers that it runs: their dimension is split
    parts_over_stages     each stage holds a part of every layer, and gets its own layers once per step: where stages
                          run different numbers of layers, and where the model has several stacks
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshloom.models import LOGICAL_AXES
from meshloom.models.adapter import is_adapter

from ..core.errors import Problem, raise_if_any, use_one_of
from ..core.partition_spec import STAGE, keep_axes
from ..spec.compiler_traits import CompilerTraits
from ..spec.plan_spec import PlanSpec
from ..spec.sharding_spec import Rule, ShardingSpec
from ..target.mesh import MeshPlan
from .arrays import EXPERTS, Array, Arrays
from .encoded_shards import check_shards
from .roles import AxisRoles
from .rules import ArrayPlan, DimensionPlan, RuleTable, UnsettledDimension, resolve

Plans = tuple[ArrayPlan, ...]


def layers_over_stages(parameters: Plans, optimizer: Plans, mesh: MeshPlan) -> tuple[Plans, Plans]:
    """Returns the layouts of parameters and of their optimizer state, with layers over the stages."""

    def split(plan: ArrayPlan) -> ArrayPlan:
        at = _layers_dimension(plan.array)
        if at is None:
            return plan
        return over_stages(plan, at, mesh, rule=None, note="each stage holds its layers")

    return tuple(map(split, parameters)), tuple(map(split, optimizer))


def parts_over_stages(parameters: Plans, optimizer: Plans, mesh: MeshPlan, roles: AxisRoles) -> tuple[Plans, Plans]:
    """Returns the layouts of parameters and of their optimizer state, with a part of each layer on each stage.

    A parameter of layers is stored as it is updated. With the stages behind the axes of tokens, what a stage gets of a
    layer are the shards of it that these axes make. A parameter without a dimension for them is whole on every stage.
    """
    updated = {plan.array.path: plan for plan in optimizer}

    def split(plan: ArrayPlan) -> ArrayPlan:
        if _layers_dimension(plan.array) is None:
            return plan
        stored = replace(updated.get(plan.array.path, plan), table=plan.table)
        at = _dimension_of_stages(stored, mesh, roles)
        if at is None:
            return stored
        rule = stored.dimensions[at].rule if stored.dimensions[at].axes else None
        return over_stages(stored, at, mesh, rule=rule, note="a part of each layer on each stage")

    return tuple(map(split, parameters)), tuple(map(split, optimizer))


def _layers_dimension(array: Array) -> int | None:
    return array.logical_axes.index("layers") if "layers" in array.logical_axes else None


def over_stages(plan: ArrayPlan, at: int, mesh: MeshPlan, *, place: int | None = None, **told: Any) -> ArrayPlan:
    """Returns a layout with a dimension split over the stages, too.

    at: the dimension. place: that of the stages among its mesh axes; None: behind all. told: other fields of its
    DimensionPlan.
    """
    d = plan.dimensions[at]
    place = len(d.axes) if place is None else place
    split = replace(d, axes=(*d.axes[:place], STAGE, *d.axes[place:]), **told)
    dimensions = (*plan.dimensions[:at], split, *plan.dimensions[at + 1 :])
    return replace(plan, dimensions=dimensions, bytes_per_device=plan.bytes_per_device // mesh.sizes[STAGE])


def _dimension_of_stages(plan: ArrayPlan, mesh: MeshPlan, roles: AxisRoles) -> int | None:
    """Returns the dimension whose shards the stages divide: one over axes of tokens, else the largest; none that XLA's
    partitioner splits."""

    def shard(d: DimensionPlan) -> int:
        return d.size // mesh.num_shards(d.axes)

    layers, num_stages = _layers_dimension(plan.array), mesh.num_shards(roles.stage)
    fits = [
        at
        for at, d in enumerate(plan.dimensions)
        if at != layers and not set(d.axes) & set(roles.partitioner) and shard(d) % num_stages == 0
    ]
    return max(fits, key=lambda at: (bool(plan.dimensions[at].axes), shard(plan.dimensions[at])), default=None)


# Presets that use an axis.
SHARDING_OF = {
    "context": "sharding=fsdp_context", "expert": "sharding=fsdp_expert", "tensor": "sharding=fsdp_tensor",
}  # fmt: skip


@dataclass(frozen=True)
class ShardingPlan:
    """Layouts by table."""

    parameters: tuple[ArrayPlan, ...]
    optimizer: tuple[ArrayPlan, ...]  # parameter-shaped optimizer state, by the path of its parameter, which is trained
    activations: tuple[ArrayPlan, ...]
    roles: AxisRoles
    warnings: tuple[Problem, ...]

    @property
    def trained(self) -> tuple[str, ...]:
        """Returns the paths of the parameters that are trained."""
        return tuple(plan.array.path for plan in self.parameters if plan.array.is_trained)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Returns the paths of the other parameters: those without a gradient."""
        return tuple(plan.array.path for plan in self.parameters if not plan.array.is_trained)

    def auto_spec(self, *logical: str | None) -> PartitionSpec:
        """Returns how an activation of these logical axes lies over the partitioner's axes, by the rules for
        activations."""
        axes = {d.logical: d.axes for plan in self.activations for d in plan.dimensions if d.logical}
        return keep_axes(
            PartitionSpec(*(axes.get(name, ()) if name else None for name in logical)), self.roles.partitioner
        )


def gathered_bytes(parameter: ArrayPlan, mesh: MeshPlan, roles: AxisRoles) -> int:
    """Returns the bytes of a parameter on a device, in the type that it is used in, once gathered over the axes that
    split tokens. Experts stay where they are."""
    split = ((d.logical, axis) for d in parameter.dimensions for axis in d.axes)
    kept = tuple(axis for logical, axis in split if axis not in roles.tokens or logical == EXPERTS)
    itemsize = jnp.dtype(parameter.array.compute_dtype).itemsize
    return math.prod(parameter.array.shape) * itemsize // mesh.num_shards(kept)


def most_shards(parameters: Plans, mesh: MeshPlan, roles: AxisRoles) -> int:
    """Returns the largest number of devices over which a parameter is gathered, and its gradient scattered."""
    axes = (tuple(axis for d in plan.dimensions for axis in d.axes if axis in roles.tokens) for plan in parameters)
    return max(map(mesh.num_shards, axes), default=1)


def plan_sharding(
    rules: ShardingSpec,
    arrays: Arrays,
    mesh: MeshPlan,
    roles: AxisRoles,
    compiler: CompilerTraits,
    *,
    layers_stay: bool = True,
) -> ShardingPlan:
    """Returns the layout of every parameter, its optimizer state and every named activation. Raises ConfigError.

    layers_stay: whether the stages of a pipeline hold the layers that they run, and not a part of each layer.
    """
    problems: list[Problem] = []
    # Rules that the optimizer inherits from the parameters refuse the same dimensions: reported once.
    optimizer_problems = [] if rules.optimizer == rules.parameters else problems
    parameters = _resolve_all(arrays.parameters, "parameters", rules.parameters, mesh, compiler, problems)
    trained = [array for array in arrays.parameters if array.is_trained]
    optimizer = _resolve_all(trained, "optimizer", rules.optimizer, mesh, compiler, optimizer_problems)
    activations = _resolve_all(arrays.activations, "activations", rules.activations, mesh, compiler, problems)
    if roles.stage and layers_stay:
        parameters, optimizer = layers_over_stages(parameters, optimizer, mesh)
    elif roles.stage:
        parameters, optimizer = parts_over_stages(parameters, optimizer, mesh, roles)
    whole = _check_replicated(rules, parameters, optimizer, mesh)
    problems += whole if rules.on_replicated == "error" else []
    problems += [] if roles.stage else _check_layers_dimension(parameters)
    problems += check_shards(parameters, mesh)
    problems += _check_update_layout(parameters, optimizer, roles.tokens)
    problems += _check_batch_dimension(activations, "batch", roles.sequence)
    problems += _check_batch_dimension(activations, "length", roles.length)
    if not problems and len(activations) == len(arrays.activations):  # a batch that does not divide is not laid out
        problems += _check_idle_axes(rules, parameters, activations, mesh)
    raise_if_any(problems)
    warnings = tuple(whole) if rules.on_replicated == "warn" else ()
    return ShardingPlan(parameters, optimizer, activations, roles, warnings)


def check_rules(rules: ShardingSpec, arrays: Arrays) -> None:
    """Raises ConfigError for rules of unknown logical axes, and rules that would split something but match no dimension
    of any array. Needs no mesh."""
    parameters, activations = _names(arrays.parameters), _names(arrays.activations)
    tables: list[tuple[RuleTable, tuple[Rule, ...], set[str]]] = [
        ("parameters", rules.parameters, parameters),
        ("activations", rules.activations, activations),
    ]
    if rules.optimizer != rules.parameters:
        tables.insert(1, ("optimizer", rules.optimizer, parameters))
    every_name = parameters | activations | set(LOGICAL_AXES)
    problems: list[Problem] = []
    for table, table_rules, names in tables:
        for index, rule in enumerate(table_rules):
            key = f"sharding.{table}[{index}]"
            unknown = [name for name in (*rule.logical, *rule.alternatives) if name not in every_name]
            problems += [
                Problem(key, f"there is no logical axis '{name}'", use_one_of(name, sorted(names))) for name in unknown
            ]
            if not unknown and rule.mesh and not names & set(rule.logical):
                what = f"matches nothing: no array has a dimension {' or '.join(rule.logical)}"
                problems.append(Problem(key, what, f"remove it, or name one of {', '.join(sorted(names))}"))
    raise_if_any(problems)


def _resolve_all(
    arrays: Sequence[Array],
    table: RuleTable,
    rules: Sequence[Rule],
    mesh: MeshPlan,
    compiler: CompilerTraits,
    problems: list[Problem],
) -> tuple[ArrayPlan, ...]:
    plans: list[ArrayPlan] = []
    refusals: dict[tuple[Any, ...], list[UnsettledDimension]] = defaultdict(list)
    for array in arrays:
        result = resolve(array, table, rules, mesh, compiler)
        if isinstance(result, ArrayPlan):
            plans.append(result)
            continue
        for refusal in result:
            refusals[refusal.kind].append(refusal)
    for alike in refusals.values():
        if not (table == "activations" and alike[0].logical == "batch" and alike[0].rule is not None):
            problems.append(alike[0].problem(mesh, len({r.array.path for r in alike}) - 1))
    return tuple(plans)  # a batch that does not divide is reported once, by compiler/sharding/batch.py


def _check_layers_dimension(plans: Iterable[ArrayPlan]) -> list[Problem]:
    sharded = [plan.array.path for plan in plans if _is_layers_dimension_sharded(plan)]
    if not sharded:
        return []
    others = f" (and {len(sharded) - 1} more)" if len(sharded) > 1 else ""
    what = f"'{sharded[0]}'{others}: the layers of a stack run one after the other and cannot be sharded"
    return [Problem("sharding.parameters", what, "give 'layers' a rule with mesh: [], and shard another dimension")]


def _check_update_layout(
    parameters: Sequence[ArrayPlan], optimizer: Sequence[ArrayPlan], batch: tuple[str, ...]
) -> list[Problem]:
    """Returns problems of optimizer state that is not split like its parameter or further: the gradient is
    reduce-scattered to it and the updated shards are gathered. XLA handles axes that do not split the batch."""
    by_path = {plan.array.path: plan for plan in parameters}
    for plan in optimizer:
        stored = by_path.get(plan.array.path)
        for d, own in zip(stored.dimensions if stored else (), plan.dimensions, strict=False):
            first, then = (tuple(axis for axis in x.axes if axis in batch) for x in (d, own))
            if then[: len(first)] != first:
                what = f"'{plan.array.path}' has its {d.logical} over {', '.join(d.axes)} as a parameter, and "
                what += f"{'over ' + ', '.join(own.axes) if own.axes else 'whole'} in the optimizer's state"
                axes = ", ".join(dict.fromkeys([*d.axes, *own.axes]))
                fix = f"begin with the parameter's mesh axes: {{logical: [{d.logical}], mesh: [{axes}]}}"
                return [Problem("sharding.optimizer", what, fix)]
    return []


def _check_batch_dimension(activations: Iterable[ArrayPlan], logical: str, split: tuple[str, ...]) -> list[Problem]:
    """Returns problems of activations that are not split over the axes of the first rules for batch and length."""
    for plan in activations:
        for dimension in plan.dimensions:
            if dimension.logical == logical and dimension.axes != split:
                what = (
                    f"'{plan.array.path}' has its {logical} {', '.join(dimension.axes) or 'whole'} ({dimension.note})"
                )
                what += f", and the step splits the {logical} over {', '.join(split)}"
                return [Problem("sharding.activations", what, f"put the rule for {logical} first")]
    return []


def _check_idle_axes(
    rules: ShardingSpec, parameters: Iterable[ArrayPlan], activations: Iterable[ArrayPlan], mesh: MeshPlan
) -> list[Problem]:
    """Returns problems of mesh axes that split no activation: their devices would all compute the same."""
    computing, storing = _axes_in_use(activations), _axes_in_use(parameters)
    problems = []
    for axis, size in mesh.sizes.items():
        if size == 1 or axis == STAGE or axis in computing:
            continue
        if axis in storing:
            what = f"parameters are split over {axis} and no activation is: its {size} devices would do the same work"
            problems.append(Problem("sharding.activations", what, f"add {axis} to the rule for batch"))
        else:
            what = f"no rule splits anything over {axis}: its {size} devices would all do the same work"
            choose = SHARDING_OF.get(axis, "a sharding that uses it")
            fix = f"set mesh.{axis}=1, or choose {choose}"
            if rules.mesh_axes is not None and axis not in rules.mesh_axes:
                fix = f"set mesh.{axis}=1, choose {choose}, or add {axis} to sharding.mesh_axes for rules of your own"
            problems.append(Problem(f"mesh.{axis}", what, fix))
    return problems


def _check_replicated(
    rules: ShardingSpec, parameters: Sequence[ArrayPlan], optimizer: Sequence[ArrayPlan], mesh: MeshPlan
) -> list[Problem]:
    """Returns one problem for each table of rules with large replicated arrays, about the largest. One of an adapter's
    two matrices has no dimension `embed`, which rules split; whole, it is a small share of what it adapts."""
    if mesh.num_devices == 1:
        return []
    limit, problems = rules.replicated_bytes_threshold, []
    tables = [("parameters", parameters), ("optimizer", optimizer if rules.optimizer != rules.parameters else ())]
    for table, plans in tables:
        large = [p for p in plans if p.array.num_bytes > limit and not is_adapter(p.array.path)]
        whole = [p for p in large if not any(d.axes for d in p.dimensions)]
        if whole:
            largest = max(whole, key=lambda plan: plan.array.num_bytes)
            others = f" (and {len(whole) - 1} more)" if len(whole) > 1 else ""
            what = f"'{largest.array.path}'{others} is whole on every device, with {largest.array.num_bytes:,} bytes"
            what += f", more than replicated_bytes_threshold={limit:,}"
            names = [d.logical for d in largest.dimensions if d.logical not in (None, "layers")]
            fix = f"add a rule that splits {' or '.join(map(str, names))}"
            problems.append(Problem(f"sharding.{table}", what, f"{fix}, or set sharding.on_replicated=allow"))
    return problems


def _axes_in_use(plans: Iterable[ArrayPlan]) -> set[str]:
    return {axis for plan in plans for dimension in plan.dimensions for axis in dimension.axes}


def _is_layers_dimension_sharded(plan: ArrayPlan) -> bool:
    return any(dimension.logical == "layers" and dimension.axes for dimension in plan.dimensions)


def _names(arrays: Iterable[Array]) -> set[str]:
    return {name for array in arrays for name in array.logical_axes if name}


def accumulated_layouts(spec: PlanSpec, sharding: ShardingPlan) -> tuple[ArrayPlan, ...]:
    """Returns the layout in which each parameter's gradient is accumulated. A single microbatch whose gradients are
    reduced in its backward pass accumulates none: they are computed in the layout of the update. A frozen parameter,
    which has no gradient, has the layout in which it is stored."""
    is_made_reduced = spec.overlap.layers.reduce_in_backward and spec.num_microbatches == 1
    if spec.sharding.gradients != "optimizer" and not is_made_reduced:
        return sharding.parameters
    updated = {plan.array.path: plan for plan in sharding.optimizer}
    return tuple(updated.get(plan.array.path, plan) for plan in sharding.parameters)


def check_gradients(spec: PlanSpec, sharding: ShardingPlan) -> None:
    """Raises ConfigError if gradients are reduced layer by layer while the update splits layers over devices."""
    chosen = {
        "sharding.gradients": ("optimizer", "parameters", spec.sharding.gradients == "optimizer"),
        "overlap.layers.reduce_in_backward": ("true", "false", spec.overlap.layers.reduce_in_backward),
    }
    split = [
        (plan, d)
        for plan in sharding.optimizer
        for d in plan.dimensions
        if d.logical == "layers" and set(d.axes) & set(sharding.roles.tokens)
    ]
    for plan, d in split[:1]:
        where = f"sharding.optimizer[{d.rule}] splits the layers of '{plan.array.path}' over {', '.join(d.axes)}"
        problems = [
            Problem(
                key,
                f"{value} reduces gradients layer by layer, and {where}",
                f"set {key}={other}, or split another dimension",
            )
            for key, (value, other, is_chosen) in chosen.items()
            if is_chosen
        ]
        raise_if_any(problems)
