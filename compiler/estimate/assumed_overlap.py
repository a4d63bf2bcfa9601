"""The loop over layers and the flag presets that an estimate rests on where the declaration leaves them to a search."""

from dataclasses import replace

from ..core.trees import like
from ..parallel.operation import OpInputs, plan_operations
from ..parallel.weight_plan import plan_weights
from ..plan import Plan
from ..sharding.batch import sequences_of_device
from ..spec.overlap_spec import OverlapSpec
from ..target.compiler_options import assumed_weight_presets, presets_for, why_permutes_wait
from ..target.target import TargetPlan

BATCH_SPLIT = 2  # what the searches of docs/overlap_results.md chose wherever axes split matmuls


def plan_assumed(plan: Plan) -> Plan:
    """Returns the plan with the overlap that a search is taken to find; as it is, where none is declared.

    Operations and weights are planned anew, since their strategies depend on it: a split batch saves other activations
    than a whole one, and so needs other memory.
    """
    if plan.spec.overlap.search is None:
        return plan
    spec = plan.spec.model_copy(update={"overlap": assume_overlap(plan)})
    inputs = OpInputs(spec, plan.model, plan.arrays, plan.sharding, plan.mesh, plan.target)
    operations = plan_operations(plan.ops, inputs)
    weights = like(plan.abstract["params"], plan_weights(inputs, operations))
    return replace(plan, spec=spec, operations=operations, weights=weights)


def assume_overlap(plan: Plan) -> OverlapSpec:
    """Returns what the declaration says, or what a search is taken to find: the flag preset that hides most, and a
    batch split where tensor parallelism's collectives can then run beside matmuls."""
    overlap, target = plan.spec.overlap, plan.target
    if overlap.search is None:
        return overlap
    layers, presets = overlap.layers, assumed_weight_presets(overlap.flag_presets, target)
    if plan.roles.partitioner and can_split_batch(sequences_of_device(plan.spec, plan.mesh, plan.roles), target):
        layers = layers.model_copy(update={"batch_split": max(BATCH_SPLIT, layers.batch_split)})
        of_activations = [name for name, one in presets_for(target).items() if "activations" in one.tried_for]
        presets = (*presets, *of_activations[:1])
    return overlap.model_copy(update={"layers": layers, "flag_presets": presets, "search": None})


def overrides_of(assumed: OverlapSpec, declared: OverlapSpec) -> tuple[str, ...]:
    """Returns the overrides that compile it and search for nothing; none if nothing was to be searched."""
    if declared.search is None:
        return ()
    number = assumed.layers.batch_split
    split = [f"overlap.layers.batch_split={number}"] if number != declared.layers.batch_split else []
    return (*split, "overlap.search=null", f"overlap.flag_presets=[{','.join(assumed.flag_presets)}]")


def can_split_batch(num_sequences: int, target: TargetPlan) -> bool:
    """Returns True if one half of a device's sequences can compute while the activations of the other are sent.
    num_sequences: of one microbatch on a device."""
    return num_sequences % BATCH_SPLIT == 0 and why_permutes_wait(target) is None
