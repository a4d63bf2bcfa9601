"""Which results of a layer's forward pass are kept for its backward pass; the others are computed again.

Models name activations (`context.activation(name, ...)`); the step marks them with their names (`marked`), so that a
policy can pick them. Attention marks its own result (ATTENTION_RESULT), and beside it the log-sum-exp that its
derivative reads: a policy that saves the activation which the model makes of it saves these two in its place, and
nothing of attention runs again. Experts mark the rows that they receive, and the results of their first matrices
(`sharding.arrays.MARKED_WITHIN`), which are grouped matmuls.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from meshloom.models import Aux, AuxOfTotals, run_at_once, split_output

from ..core.errors import Problem, raise_if_any, use_one_of
from ..core.float_types import ComputeType
from ..sharding.arrays import EXPERT_GATE, EXPERT_UP, LAYER_INPUT, Arrays
from ..spec.step_spec import TAKES_NAMES, RematChoice, RematSpec
from .block_scaled import is_block_scaled

# Operations that move data and compute nothing. Their results are made again in the backward pass, never kept: to keep
# a gathered weight would undo its sharding, and what is derived from one by moving it is as large.
_MOVES = frozenset({
    "all_gather", "broadcast_in_dim", "name", "reshape", "sharding_constraint", "squeeze", "transpose",
})  # fmt: skip

# Arithmetic on single entries. In a wider type than the layer computes in, its results are made again from the narrow
# arrays that are saved: a norm of a bfloat16 array would save three of float32 beside it.
_ARITHMETIC = frozenset({
    "add", "convert_element_type", "cos", "div", "exp", "integer_pow", "log", "logistic", "max", "min", "mul", "neg",
    "rsqrt", "select_n", "sin", "sqrt", "square", "sub", "tanh",
})  # fmt: skip

Policy = Callable[..., Any]
RunLayer = Callable[[Callable[[Array], Any], Array], Any]

ATTENTION_RESULT, ATTENTION_LSE = "attention.result", "attention.lse"
GROUPED_INPUT = "group.layer_input"  # the input of a layer of a group


def check_remat(spec: RematSpec, arrays: Arrays) -> None:
    """Raises ConfigError for stacks that the model does not have, and names that no layer gives an activation."""
    problems = [
        Problem(f"remat.stacks.{stack}", "the model has no such stack of layers", use_one_of(stack, arrays.in_layers))
        for stack in spec.stacks
        if stack not in arrays.in_layers
    ]
    of_names = {f"remat.names[{index}]": name for index, name in enumerate(spec.names)}
    of_choices = {f"remat.choices.{name}": name for name in spec.choices}
    for asked, policies in ((of_names, TAKES_NAMES), (of_choices, ("by_name",))):
        by_name = [stack for stack in arrays.in_layers if policy_of(spec, stack) in policies]
        names = list(dict.fromkeys(name for stack in by_name for name in arrays.in_layers[stack]))
        problems += [
            Problem(where, f"no layer names an activation '{name}'", use_one_of(name, names))
            for where, name in asked.items()
            if by_name and name not in names
        ]
    if spec.choices.get(LAYER_INPUT) == "recompute":
        what = "the input of a layer is what its backward pass begins with, and cannot be computed again"
        problems.append(Problem(f"remat.choices.{LAYER_INPUT}", what, "choose save or offload"))
    raise_if_any(problems)


def policy_of(spec: RematSpec, stack: str) -> str:
    """Returns the policy of one stack: its own, else that of all."""
    return spec.stacks.get(stack, spec.policy)


def choices_of(spec: RematSpec, stack: str) -> Mapping[str, RematChoice]:
    """Returns the activations of a stack that the declaration names, with what becomes of each."""
    match policy_of(spec, stack):
        case "save_names" | "minimal" | "save_dots":
            return dict.fromkeys(spec.names, "save")
        case "offload":
            return dict.fromkeys(spec.names, "offload")
        case "by_name":
            return spec.choices
    return {}


def build_policy(spec: RematSpec, stack: str, arrays: Arrays, compute: ComputeType) -> Policy:
    """Returns what `jax.checkpoint` asks about each operation of the stack's layers. compute: the type in which they
    compute."""
    policies, policy = jax.checkpoint_policies, policy_of(spec, stack)
    if policy == "none":
        return partial(_is_saved, jnp.dtype(compute).itemsize)
    attention = (ATTENTION_RESULT, ATTENTION_LSE) if policy == "minimal" else ()
    experts = (EXPERT_GATE, EXPERT_UP) if policy in ("minimal", "save_dots") else ()
    choices: dict[str, str] = dict.fromkeys((GROUPED_INPUT, *attention, *experts), "save")
    for name, choice in choices_of(spec, stack).items():
        choices |= dict.fromkeys(_marks_of(name, arrays), choice)
    by_name = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[mark for mark, choice in choices.items() if choice == "save"],
        names_which_can_be_offloaded=[mark for mark, choice in choices.items() if choice == "offload"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    if policy not in ("minimal", "save_dots"):
        return by_name

    def by_name_and_dots(*operation: Any, **parameters: Any) -> Any:
        is_product = policies.dots_with_no_batch_dims_saveable(*operation, **parameters) or is_block_scaled(parameters)
        return is_product or by_name(*operation, **parameters)

    return by_name_and_dots


def _marks_of(name: str, arrays: Arrays) -> tuple[str, ...]:
    """Returns the names in the traced step of what is saved for an activation of this name."""
    if name == LAYER_INPUT:
        return LAYER_INPUT, GROUPED_INPUT
    return (ATTENTION_RESULT, ATTENTION_LSE) if name in arrays.results.get("attention", ()) else (name,)


def layer_runner(spec: RematSpec, stack: str) -> RunLayer:
    """Returns how a layer of the stack that is a group runs each of its own (`Context.run_layer`)."""
    return run_at_once if policy_of(spec, stack) == "none" else _recomputed_alone


def _recomputed_alone(layer: Callable[[Array], Any], x: Array) -> Any:
    """Runs a layer of a group. The policy saves its input, and what else it saves of any layer; the rest is computed
    again when the backward pass of this layer begins, so that one layer at a time is in memory."""
    make_aux: list[Callable[[Mapping[str, Array], Sequence[Array]], Aux]] = []

    def run(x: Array) -> tuple[Array, Any]:
        output = layer(x)
        if not isinstance(output, tuple):
            return output, None
        x, aux = split_output(output)
        totals = dict(aux.totals)
        made, shapes = jax.make_jaxpr(aux.make, return_shape=True)(totals)

        def make(totals: Mapping[str, Array], values: Sequence[Array]) -> Aux:
            leaves = jaxpr_as_fun(ClosedJaxpr(made.jaxpr, values))(*jax.tree.leaves(dict(totals)))
            return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

        make_aux.append(make)
        return x, (totals, made.consts)

    x, of_aux = jax.checkpoint(run, prevent_cse=False)(marked(GROUPED_INPUT, x))
    if of_aux is None:
        return x
    totals, values = of_aux
    return x, AuxOfTotals(totals, lambda totals: make_aux[0](totals, values))


def marked(name: str, x: Array) -> Array:
    """Returns the activation, with the name by which a policy knows it."""
    return checkpoint_name(x, name)


def _is_saved(itemsize: int, primitive: Any, *operands: Any, **parameters: Any) -> bool:
    """Returns True for operations whose results `none` saves. itemsize: the bytes of a number in the compute type."""
    if primitive.name in _ARITHMETIC:
        made = jnp.dtype(parameters.get("new_dtype", operands[-1].dtype))
        return not (jnp.issubdtype(made, jnp.floating) and made.itemsize > itemsize)
    return primitive.name not in _MOVES
