"""The step that is estimated, traced as operations on values: the plan's, with open choices of the declaration made.

overlap    where the declaration has a search, the loop over layers and the flag presets that it is expected to find
imbalance  smaller buffers of experts, to show what room for any imbalance costs: programs have fixed shapes, so a step
           passes over whole buffers, however few of their rows are filled. Buffers for any imbalance, the default, can
           be several times the mean; trained routers stay near it

The traced function is the one that is compiled later (train_step.py), so an estimate describes the program that runs.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import replace

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshloom.models import Stack

from ..core.trees import leaves_by_path, like
from ..jaxpr.program import Program
from ..jaxpr.read_jaxpr import layout_of, read_jaxpr
from ..parallel.choose import plan_operations
from ..parallel.operation import OpInputs
from ..parallel.weight_plan import plan_weights
from ..plan import Plan
from ..schema import MAX_IMBALANCE
from ..sharding.arrays import Arrays
from ..sharding.state import HOST_KIND, State
from ..spec.cost_model import cost_model
from ..spec.overlap_spec import OverlapSpec
from ..spec.plan_spec import PlanSpec
from ..step.train_step import build_train_step
from ..step.turns import takes_turns
from ..target.compiler_options import assumed_weight_presets, default_presets, exposed_with_parts, presets_for
from ..target.mesh import MeshPlan
from ..target.target import TargetPlan

BATCH_SPLIT = 2  # the choice of the searches of docs/results/overlap.md chose wherever axes split matmuls


def read_step(plan: Plan) -> Program:
    """Returns the program of the plan's train step, which it traces. Inputs: the leaves of the state, then those of the
    batch."""
    shapes = plan.batch.shapes
    batch = {name: shape for name, (shape, _) in shapes.items()}
    # Shards of whole tiles and others are to be the same operations: tune compares the traces of meshes.
    weights = jax.tree.map(lambda each: replace(each, tile_rows=1), plan.weights)
    step = build_train_step(replace(plan, weights=weights))
    with jax.sharding.use_abstract_mesh(plan.mesh.abstract()):
        traced = jax.make_jaxpr(step)(_in_memories(plan.abstract, plan.on_host, plan.mesh), batch)
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    specs = jax.tree.leaves(plan.specs, is_leaf=is_spec)
    specs += [spec for _, spec in shapes.values()]
    layouts = [layout_of(spec, len(x.aval.shape)) for spec, x in zip(specs, traced.jaxpr.invars, strict=True)]
    joins_sums = not plan.target.compiler.all_reduces_each_matmul
    program = read_jaxpr(
        traced.jaxpr,
        layouts,
        plan.mesh.sizes,
        joins_sums=joins_sums,
        ops=plan.ops,
        platform=plan.target.platform,
        consts=traced.consts,
    )
    return replace(program, donates=not plan.spec.keeps_state)


def _in_memories(abstract: State, on_host: Collection[str], mesh: MeshPlan) -> State:
    """Returns the abstract state with the memory of what lies on the host. How arrays are split is said elsewhere."""
    host = NamedSharding(mesh.abstract(), PartitionSpec(), memory_kind=HOST_KIND)
    leaves = leaves_by_path(abstract)
    there = {path: x for path, x in leaves.items() if path in on_host}
    moved = {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host) for path, x in there.items()}
    return like(abstract, leaves | moved)


def plan_assumed(plan: Plan) -> Plan:
    """Returns the plan with the overlap that a search is expected to find, or the plan itself where it declares no
    search.

    Operations and weights are planned again, since their strategies depend on the overlap: a split batch saves other
    activations than a whole one, and so needs other memory.
    """
    if plan.spec.overlap.search is None:
        return plan
    return _planned_anew(plan, plan.spec.model_copy(update={"overlap": assume_overlap(plan)}))


def assume_overlap(plan: Plan) -> OverlapSpec:
    """Returns the declared overlap, or the one that a search is expected to find: the flag preset that hides most, and
    a batch split, with its default presets, where collectives of tensor parallelism can then run beside matmuls."""
    overlap, target = plan.spec.overlap, plan.target
    if overlap.search is None:
        return overlap
    layers, presets = overlap.layers, assumed_weight_presets(plan.spec, target)
    is_even = can_split_batch(plan.batch.sequences_of_device, target)
    hides = is_even and exposed_of_parts(plan.model.stacks, plan.arrays, target) is not None
    if plan.roles.partitioner and hides:
        layers = layers.model_copy(update={"batch_split": max(BATCH_SPLIT, layers.batch_split)})
        of_activations = [name for name, one in presets_for(target).items() if "activations" in one.tried_for]
        defaults = default_presets(target, has_experts=plan.arrays.has_experts, num_parts=layers.batch_split)
        presets = tuple(dict.fromkeys((*presets, *of_activations[:1], *defaults)))
    return overlap.model_copy(update={"layers": layers, "flag_presets": presets, "search": None})


def exposed_of_parts(stacks: Iterable[Stack], arrays: Arrays, target: TargetPlan, *, at_once: int = 1) -> float | None:
    """Returns the share of tensor parallelism's collectives that a step waits for with a split batch; None if nothing
    of one part runs beside the other. at_once: how many collectives may be on their way."""
    in_turns = all(takes_turns(stack, arrays, target) for stack in stacks)
    return exposed_with_parts(target, in_turns=in_turns, at_once=at_once)


def overrides_of(assumed: OverlapSpec, declared: OverlapSpec) -> tuple[str, ...]:
    """Returns the overrides that compile the assumed overlap without a search; none where no search was declared."""
    if declared.search is None:
        return ()
    number = assumed.layers.batch_split
    split = [f"overlap.layers.batch_split={number}"] if number != declared.layers.batch_split else []
    return (*split, "overlap.search=null", f"overlap.flag_presets=[{','.join(assumed.flag_presets)}]")


def can_split_batch(num_sequences: int, target: TargetPlan) -> bool:
    """Returns True if one half of a device's sequences can compute while the activations of the other are sent.
    num_sequences: the sequences of one microbatch on a device."""
    return num_sequences % BATCH_SPLIT == 0 and exposed_with_parts(target) is not None


def overrides_of_imbalance(max_imbalance: float | None) -> tuple[str, ...]:
    """Returns the overrides that declare this room for experts."""
    return (f"{MAX_IMBALANCE}={json.dumps(max_imbalance)}",)


def plan_usual_imbalance(plan: Plan) -> Plan | None:
    """Returns the plan with room for the usual imbalance of experts; None where the declared one has no room for any
    imbalance."""
    has_room = any(each.chosen.has_spare_room for each in plan.operations)
    if plan.spec.moe.max_imbalance is not None or not has_room:
        return None
    usual = {"max_imbalance": cost_model().usual_imbalance}
    spec = plan.spec.model_copy(update={"moe": plan.spec.moe.model_copy(update=usual)})
    return _planned_anew(plan, spec)


def _planned_anew(plan: Plan, spec: PlanSpec) -> Plan:
    """Returns the plan with another declaration, under which all arrays are laid out as before."""
    inputs = OpInputs(spec, plan.model, plan.arrays, plan.sharding, plan.mesh, plan.batch, plan.target)
    operations = plan_operations(plan.ops, inputs)
    weights = like(plan.model.abstract(), plan_weights(inputs, operations, plan.gather))
    return replace(plan, spec=spec, operations=operations, weights=weights)
