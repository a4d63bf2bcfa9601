"""The same plan with smaller buffers of experts: what room for any imbalance costs.

Programs have fixed shapes, so a step passes over its whole buffers, however few of their rows are filled. Buffers for
any imbalance, the default, can be several times the mean; trained routers stay near it.
"""

import json
from dataclasses import replace

from ..core.trees import like
from ..parallel.operation import OpInputs, plan_operations
from ..parallel.weight_plan import plan_weights
from ..plan import Plan
from ..schema import MAX_IMBALANCE

USUAL = 1.25  # the capacity factor that Switch Transformers settled on (arXiv:2101.03961, section 2.2)


def overrides_of_imbalance(plan: Plan) -> tuple[str, ...]:
    """Returns the overrides that declare the room for experts of this plan."""
    return (f"{MAX_IMBALANCE}={json.dumps(plan.spec.moe.max_imbalance)}",)


def plan_usual_imbalance(plan: Plan) -> Plan | None:
    """Returns the plan with room for the usual imbalance; None where the declaration does not ask for any."""
    has_room = any(each.op.has_spare_room(each) for each in plan.operations)
    if plan.spec.moe.max_imbalance is not None or not has_room:
        return None
    spec = plan.spec.model_copy(update={"moe": plan.spec.moe.model_copy(update={"max_imbalance": USUAL})})
    inputs = OpInputs(spec, plan.model, plan.arrays, plan.sharding, plan.mesh, plan.target)
    operations = plan_operations(plan.ops, inputs)
    weights = like(plan.abstract["params"], plan_weights(inputs, operations))
    return replace(plan, spec=spec, operations=operations, weights=weights)
