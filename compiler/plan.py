"""The plan of a run: everything that is decided before a compiler is called."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic

import jax
import optax
from jax.sharding import PartitionSpec

from meshloom.models import Model, Params
from meshloom.models.adapter import only_adapters

from .core.errors import Problem
from .core.format import counted
from .core.known import each_known, or_unknown
from .core.partition_spec import axes_of
from .core.trees import leaves_by_path, like, nested_dict, pick
from .figures import NO_PEAK_RATE, StepWork
from .formats.block import SCALES
from .jaxpr.flops import ModelFlops, count_model_flops
from .optim.moments import moment_of, owner_of
from .parallel.delayed import CLIPPED, MAGNITUDES
from .parallel.operation import OpPlan, ParallelOp
from .parallel.pipeline_plan import PipelinePlan, StageGather, warnings_of_pipeline
from .sharding.arrays import EXPERTS, Array, Arrays
from .sharding.batch import BatchPlan
from .sharding.roles import AxisRoles
from .sharding.rules import ArrayPlan, DimensionPlan
from .sharding.sharding import ShardingPlan, accumulated_layouts, gathered_bytes
from .sharding.state import State, bytes_per_device
from .spec.plan_spec import AnyPlanSpec, PlanSpec
from .target.accuracy import ProgramKind, program_kinds
from .target.compiler_options import Options, describe_presets, inert_presets
from .target.mesh import MeshPlan
from .target.target import TargetPlan


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per device of the arrays that are planned one by one. What lives beside them: estimate.py."""

    parameters: int
    adapters: int  # the part of the parameters that adapters are
    master: int  # float32 weights that are updated, where the parameters are stored in another type
    optimizer: int
    scalars: int  # of the state: counts of steps, the loss scale, magnitudes of earlier steps
    gradients: int  # accumulated over microbatches
    working_parameters: int  # the copy in the compute type, where that is another type
    prefetched_weights: int  # of the layers that overlap.layers.prefetch gathers ahead, whole, beside the layer's own
    batch: int
    on_host: int = 0  # moments in the memory of the host, which no other figure here counts

    @property
    def by_role(self) -> dict[str, int]:
        """Returns the bytes of the parameters; where there are adapters, those of the base and of the adapters."""
        if not self.adapters:
            return {"parameters": self.parameters}
        return {"base": self.parameters - self.adapters, "adapters": self.adapters}

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of the state, which a step takes and returns."""
        return self.parameters + self.master + self.optimizer + self.scalars


@dataclass(frozen=True)
class Plan(Generic[AnyPlanSpec]):
    """Everything that is decided before a compiler is called. abstract, specs: the state (state.py) as trees of
    ShapeDtypeStruct and of PartitionSpec."""

    spec: AnyPlanSpec
    target: TargetPlan
    mesh: MeshPlan
    batch: BatchPlan
    model: Model
    arrays: Arrays
    optimizer: optax.GradientTransformation
    sharding: ShardingPlan
    optimizer_state: tuple[ArrayPlan, ...]  # every leaf that is no scalar, and the master weights
    abstract: dict[str, Any]
    specs: dict[str, Any]
    on_host: frozenset[str]  # paths of the arrays of the state that lie in the memory of the host
    ops: tuple[ParallelOp, ...]  # that run by a strategy, in the order in which they are planned
    operations: tuple[OpPlan, ...]  # how each operation of the model runs over the mesh
    pipeline: PipelinePlan | None  # over the stages of the mesh; None without stages
    gather: StageGather | None  # of the weights of a stage's layers; None without stages
    weights: Params  # of WeightPlan, as a tree like the parameters
    memory: MemoryPlan
    preset_options: Options  # of overlap.flag_presets, for the target's compiler, and those that it fails without

    def operations_of(self, kind: str) -> tuple[OpPlan, ...]:
        """Returns the plans of one operation, for each of its sites."""
        return tuple(each for each in self.operations if each.op.kind == kind)

    def operation(self, kind: str) -> OpPlan:
        """Returns the plan of an operation that all sites run alike: that of the first."""
        first, *others = self.operations_of(kind)
        if any(each.chosen != first.chosen for each in others):
            raise ValueError(f"sites of '{kind}' run by different strategies: ask for operations_of('{kind}')")
        return first

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """Returns the names of the losses and statistics of layers and head, such as layers/z_loss: metrics of each
        step. STACK/clipped counts the operands of a layer with numbers above those that their scales come from."""
        return (*self.arrays.auxiliary, *(f"{stack}/{CLIPPED}" for stack in self.abstract.get(MAGNITUDES, {})))

    @property
    def roles(self) -> AxisRoles:
        """Returns what each mesh axis splits."""
        return self.sharding.roles

    @property
    def work(self) -> StepWork:
        """Returns the work of a step, which turns its seconds into rates."""
        peak = or_unknown(self.target.peak_flops_per_second, NO_PEAK_RATE)
        return StepWork(
            tokens_per_step=self.spec.tokens_per_step,
            model_flops=or_unknown(self.model_flops.per_step, self.model_flops.why_unknown),
            num_chips=self.target.num_chips,
            peak_flops_per_second=each_known(peak, lambda of_one: of_one * self.target.num_devices),
            saved_seconds=saved_by_types(
                self.operations, self.sharding, self.spec.tokens_per_step, self.target, self.model.num_active_experts
            ),
        )

    @property
    def kinds(self) -> tuple[ProgramKind, ...]:
        """Returns the kinds of program that it is, by whose runs a prediction gets its range."""
        has_experts = self.model.num_active_experts is not None
        return program_kinds(self.target, self.mesh.sizes, self.spec.sequence_length, has_experts=has_experts)

    @cached_property
    def model_flops(self) -> ModelFlops:
        """Returns the FLOPs of a step, remat excluded. Counting traces the model, so it is done for those who ask."""
        return count_model_flops(self.model, self.spec, self.ops, self.sharding.frozen)

    @property
    def model_flops_per_step(self) -> int | None:
        """Returns the FLOPs of a step; None where `model_flops.unknown` says why."""
        return self.model_flops.per_step

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(plan.array.shape) for plan in self.sharding.parameters)

    @property
    def num_trained_parameters(self) -> int:
        return sum(math.prod(plan.array.shape) for plan in self.sharding.parameters if plan.array.is_trained)

    @property
    def adapter(self) -> str | None:
        """Returns the adapters as text: 'lora of rank 16 beside 7 matrices, 155,648 parameters'; None if there are
        none. The matrices of all layers of a stack count as one."""
        if (adapter := self.spec.adapter) is None:
            return None
        beside = counted(len(self.model.adapters), "matrix", "matrices")
        return f"{adapter.kind} of rank {adapter.rank} beside {beside}, {self.num_trained_parameters:,} parameters"

    @property
    def num_active_parameters(self) -> int:
        """Returns the number of parameters that a token meets: of a dimension `experts` its own entries."""
        num_experts = self.model.num_active_experts
        return sum(num_active(plan.array, num_experts) for plan in self.sharding.parameters)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Returns warnings about what runs as it is declared, and may not be meant."""
        spec = self.spec
        return (
            *self.sharding.warnings,
            *self.mesh.placement.warnings(),
            *warnings_of_pipeline(spec.pipeline, self.mesh),
            *inert_presets(spec.overlap.flag_presets, self.target),
            *spec.schedule.warnings(spec.optimizer.learning_rate, spec.num_steps),
        )

    @property
    def flag_presets(self) -> str | None:
        """Returns a line about the presets of XLA options that it is compiled with; None if there are none."""
        return describe_presets(self.spec.overlap, self.target, has_experts=self.arrays.has_experts)


def plan_memory(
    spec: PlanSpec, mesh: MeshPlan, batch: BatchPlan, sharding: ShardingPlan, abstract: State, specs: State,
    on_host: Collection[str],
) -> MemoryPlan:  # fmt: skip
    """Bytes per device, from the shards of every array. abstract, specs: the state. on_host: paths of what is there."""

    def size(abstract: Any, specs: Any) -> int:
        return bytes_per_device(abstract, specs, mesh)

    precision, params = spec.precision, abstract["params"]
    scalars = sum(x.dtype.itemsize for x in jax.tree.leaves(abstract) if not x.shape)
    scalars_of_optimizer = sum(x.dtype.itemsize for x in jax.tree.leaves(abstract["optimizer"]) if not x.shape)
    of_host = size(pick(abstract, on_host), specs)
    trained = pick(params, sharding.trained)
    gradients_specs = like(trained, {plan.array.path: plan.spec for plan in accumulated_layouts(spec, sharding)})
    arrays = [plan.array for plan in sharding.parameters if _is_cast(plan.array)]
    working = {x.path: jax.ShapeDtypeStruct(x.shape, x.compute_dtype) for x in arrays}
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    return MemoryPlan(
        parameters=size(params, specs["params"]),
        adapters=size(only_adapters(params), specs["params"]),
        master=size(abstract["master"], specs["master"]) if "master" in abstract else 0,
        optimizer=size(abstract["optimizer"], specs["optimizer"]) - scalars_of_optimizer - of_host,
        on_host=of_host,
        scalars=scalars + size(abstract.get(MAGNITUDES, {}), specs.get(MAGNITUDES, {})),
        gradients=size(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, precision.gradients), trained), gradients_specs
        ),
        working_parameters=size(nested_dict(working), pick(specs["params"], working, is_spec)),
        prefetched_weights=_prefetched_bytes(spec, mesh, sharding),
        batch=batch.bytes_of_device,
    )


def _is_cast(array: Array) -> bool:
    """Returns True for a parameter that a step copies to another type. What is encoded is decoded where it is used."""
    return array.format is None and array.dtype != array.compute_dtype


def _prefetched_bytes(spec: PlanSpec, mesh: MeshPlan, sharding: ShardingPlan) -> int:
    """Returns the bytes of the largest stack, as stacks run one after the other. What no axis of the tokens splits
    is not gathered."""
    sizes = dict[str, int]()
    for plan in sharding.parameters:
        gathered = [axis for d in plan.dimensions if d.logical != EXPERTS for axis in d.axes]
        is_gathered = any(axis in sharding.roles.tokens for axis in gathered)
        if plan.dimensions[0].logical == "layers" and is_gathered:
            stack, num_layers = plan.array.path.split("/")[0], plan.array.shape[0]
            ahead = min(spec.overlap.layers.prefetch, num_layers)
            sizes[stack] = sizes.get(stack, 0) + ahead * gathered_bytes(plan, mesh, sharding.roles) // num_layers
    return max(sizes.values(), default=0)


def plan_state_arrays(
    abstract: State, specs: State, parameters: tuple[ArrayPlan, ...], mesh: MeshPlan
) -> tuple[ArrayPlan, ...]:
    """Returns a row for each array of the optimizer's state, and each master weight. One that is shaped as a parameter
    lies as that parameter's state was planned; any other where the optimizer's own computation puts it."""
    abstract = {key: abstract[key] for key in ("master", "optimizer") if key in abstract}
    layouts = leaves_by_path(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    by_path = {plan.array.path: plan for plan in parameters}
    rows = []
    for path, x in leaves_by_path(abstract).items():
        if not x.shape:
            continue
        (_, part), owner_path = moment_of(path), owner_of(path, by_path)
        owner = by_path[owner_path] if owner_path else None
        if owner and owner.array.shape == x.shape and owner.spec == layouts[path]:
            dimensions, table = owner.dimensions, owner.table
        elif owner and part == SCALES:
            dimensions, table = _dimensions_of_scales(owner, x.shape), owner.table
        else:
            entries = (*layouts[path], *[None] * (len(x.shape) - len(layouts[path])))
            table = None
            dimensions = tuple(
                DimensionPlan(None, size, axes_of(entry), None, "by the optimizer's own computation")
                for size, entry in zip(x.shape, entries, strict=True)
            )
        array = Array(path, x.shape, str(x.dtype), tuple(d.logical for d in dimensions))
        shards = mesh.num_shards(tuple(axis for d in dimensions for axis in d.axes))
        rows.append(ArrayPlan(array, table, dimensions, array.num_bytes // shards))
    return tuple(rows)


def _dimensions_of_scales(owner: ArrayPlan, shape: tuple[int, ...]) -> tuple[DimensionPlan, ...]:
    """Returns the dimensions of the scales of a moment that is encoded in blocks along its last dimension."""
    *before, last = owner.dimensions
    blocks = replace(last, size=shape[-1], note=f"a scale for each {last.size // shape[-1]}")
    return (*before, blocks)


def num_active(array: Array, num_experts: int | None) -> int:
    """Returns the entries of a parameter that a token meets. num_experts: that it has of a dimension of experts; None:
    all."""
    sizes = zip(array.logical_axes, array.shape, strict=True)
    return math.prod(num_experts if name == EXPERTS and num_experts else size for name, size in sizes)


def saved_by_types(
    operations: tuple[OpPlan, ...], sharding: ShardingPlan, tokens_per_step: int, target: TargetPlan,
    num_experts: int | None,
) -> float:  # fmt: skip
    """Returns by how many seconds of a step matmuls in types of few bits take less on all devices than at the peak of
    the compute type, at most: each product forward, and both backward where gradients are in few bits and weights
    trained. num_experts: that a token has; None: there are none."""
    peak, weights = target.peak_flops_per_second, {each.array.path: each.array for each in sharding.parameters}
    saved = 0.0
    for plan in operations:
        arithmetic = plan.precision.arithmetic if plan.precision else None
        if arithmetic is None or arithmetic.emulated or peak is None:
            continue
        arrays = [weights[path] for path in dict.fromkeys(plan.site.parameters) if path in weights]
        faster = target.peak_of(arithmetic.forward.arithmetic) or peak
        for array in arrays:
            products = 1 + (arithmetic.gradients is not None) * (1 + array.is_trained)
            flops = 2.0 * num_active(array, num_experts) * tokens_per_step * products
            saved += flops * (1 / peak - 1 / faster) / target.num_devices
    return saved
