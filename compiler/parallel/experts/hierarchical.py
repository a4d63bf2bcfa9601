"""An exchange of tokens in two steps: over the nodes, and within them.

    over the nodes   each token once to each node that has one of its experts, to the device there that has the same
                     place in its node (its rail); or all tokens to all nodes, where a layer waits less for that
    within a node    each token once to each device that has one of its experts

Results come back the same way. They are added up within the node first, so one sum for each node crosses its network.

T tokens are those of the devices on one rail that came to this node.
"""

import jax.numpy as jnp
from jax import Array

from ...core.traffic import AxisGroups
from .dispatch import AS_THEY_ARE, Experts, RunExperts, dispatch_deduplicated, once_to_each, to_all
from .transfer import RowTypes


def over_nodes(experts: Experts, num_nodes: int) -> Experts:
    """Returns the experts as the devices of a rail see them: each has all of its node's."""
    near = experts.num_devices // num_nodes
    return Experts(experts.num_experts, experts.axes, num_nodes, AxisGroups(num_nodes, near))


def within_node(experts: Experts, num_nodes: int) -> Experts:
    """Returns the experts of one node, split over its devices."""
    near = experts.num_devices // num_nodes
    return Experts(experts.num_experts // num_nodes, experts.axes, near, AxisGroups(near, 1))


def dispatch_hierarchical(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, num_nodes: int, rows: int,
    tokens_to_node: int | None, tokens: int, types: RowTypes = AS_THEY_ARE,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns what the experts of all devices make of this device's tokens. rows: the rows that a device takes of the
    tokens that it receives. tokens_to_node: those that it sends to each node; None: it sends all to all. tokens: those
    that it sends to each device of its node."""
    nodes, inside = over_nodes(experts, num_nodes), within_node(experts, num_nodes)
    if tokens_to_node is None:
        arrived = to_all(x_NE, weights_NK, ids_NK, nodes, types)
    else:
        arrived = once_to_each(x_NE, weights_NK, ids_NK, nodes, tokens_to_node, types, is_ragged=False)
    # A choice of another node's expert has the number after the last one here, so it goes nowhere.
    y_TE, num_dropped = dispatch_deduplicated(
        arrived.x_TE, arrived.weights_TK, arrived.local_TK, run,
        experts=inside, rows=rows, tokens=tokens, is_ragged=False, types=types,
    )  # fmt: skip
    return arrived.back(y_TE), num_dropped + arrived.num_missed.astype(jnp.float32)
