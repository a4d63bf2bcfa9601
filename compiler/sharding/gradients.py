"""The layout of accumulated gradients, and checks of its declaration."""

from ..core.errors import Problem, raise_if_any
from ..spec.spec import RunSpec
from .rules import ArrayPlan
from .sharding import ShardingPlan


def accumulated_layouts(spec: RunSpec, sharding: ShardingPlan) -> tuple[ArrayPlan, ...]:
    """Returns the layout in which each parameter's gradient is accumulated. A single microbatch whose gradients are
    reduced in its backward pass accumulates none: they are computed in the layout of the update. A frozen parameter,
    which has no gradient, has the layout in which it is stored."""
    is_made_reduced = spec.overlap.layers.reduce_in_backward and spec.num_microbatches == 1
    if spec.sharding.gradients != "optimizer" and not is_made_reduced:
        return sharding.parameters
    updated = {plan.array.path: plan for plan in sharding.optimizer}
    return tuple(updated.get(plan.array.path, plan) for plan in sharding.parameters)


def check_gradients(spec: RunSpec, sharding: ShardingPlan) -> None:
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
