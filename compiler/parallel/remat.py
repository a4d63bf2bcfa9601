"""Which results of a layer's forward pass are kept for its backward pass; the others are computed again.

Models name activations (`context.activation(name, ...)`); the step marks them with their names (`marked`), so that a
policy can pick them. Attention marks its own result (ATTENTION_RESULT), and beside it the log-sum-exp that its
derivative reads: a policy that saves the activation which the model makes of it saves these two in its place, and
nothing of attention runs again.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ..core.errors import Problem, raise_if_any, use_one_of
from ..sharding.arrays import Arrays
from ..spec.step_spec import RematSpec

# Operations that move data and compute nothing. Their results are made again in the backward pass, never kept: to keep
# a gathered weight would undo its sharding, and what is derived from one by moving it is as large.
_MOVES = frozenset({
    "all_gather", "broadcast_in_dim", "name", "reshape", "sharding_constraint", "squeeze", "transpose",
})  # fmt: skip

Policy = Callable[..., Any]

ATTENTION_RESULT, ATTENTION_LSE = "attention.result", "attention.lse"


def check_remat(spec: RematSpec, arrays: Arrays) -> None:
    """Raises ConfigError for stacks that the model does not have, and names that no layer gives an activation."""
    problems = [
        Problem(f"remat.stacks.{stack}", "the model has no such stack of layers", use_one_of(stack, arrays.in_layers))
        for stack in spec.stacks
        if stack not in arrays.in_layers
    ]
    by_name = [stack for stack in arrays.in_layers if policy_of(spec, stack) in ("save_names", "offload")]
    names = list(dict.fromkeys(name for stack in by_name for name in arrays.in_layers[stack]))
    problems += [
        Problem(f"remat.names[{index}]", f"no layer names an activation '{name}'", use_one_of(name, names))
        for index, name in enumerate(spec.names)
        if by_name and name not in names
    ]
    raise_if_any(problems)


def policy_of(spec: RematSpec, stack: str) -> str:
    """Returns the policy of one stack: its own, else that of all."""
    return spec.stacks.get(stack, spec.policy)


def build_policy(spec: RematSpec, stack: str, arrays: Arrays) -> Policy:
    """Returns what `jax.checkpoint` asks about each operation of the stack's layers."""
    policies, names = jax.checkpoint_policies, list(spec.names)
    others = [name for name in names if name not in arrays.results.get("attention", ())]
    if len(others) < len(names):
        names = [*others, ATTENTION_RESULT, ATTENTION_LSE]
    match policy_of(spec, stack):
        case "none":
            return _all_but_moved
        case "save_dots":
            return policies.dots_with_no_batch_dims_saveable
        case "minimal":
            attention = policies.save_only_these_names(ATTENTION_RESULT, ATTENTION_LSE)
            return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, attention)
        case "save_names":
            return policies.save_only_these_names(*names)
        case "offload":
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=names,
                offload_src="device",
                offload_dst="pinned_host",
            )
    return policies.nothing_saveable


def marked(name: str, x: Array) -> Array:
    """Returns the activation, with the name by which a policy knows it."""
    return checkpoint_name(x, name)


def _all_but_moved(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _MOVES
