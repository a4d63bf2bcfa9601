"""Runs the forward pass of a microbatch beside the backward pass of the one before it, in one loop over layers, so that
what one sends crosses the network while the other multiplies. Both take turns (turns.py).

    microbatch 0          all layers forward, head
    microbatch 1, ...     trip t:  layer t forward, of this microbatch     layer L - 1 - t backward, of the one before
                          head, and its backward pass at once
    after the last one    its layers backward

The longest stack is fused. What comes before it (the embedding, other stacks) runs before the loop, and backward after
it; what comes after it (other stacks, the head) runs forward and backward after the loop.

What a layer saves for its backward pass lies in one buffer, with an entry for each layer: a trip reads the entry of
the microbatch before and writes its own layer's there. So every other microbatch lies in reversed order. Gradients are
accumulated in place, over microbatches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models import Aux, Params

from ..core.scopes import piece_scope
from ..parallel.weights import Weights, all_gather_weight, hoist, reduce_weight_gradient
from .layer_pass import LayerPass, layer_pass
from .pipeline_buffers import read_slot, write_slot
from .schedule import (
    Batch,
    LayerSchedule,
    Microbatch,
    ModelFunctions,
    ModelWeights,
    StackFunctions,
    Sums,
    cotangent_of,
    objective,
    split_microbatches,
)
from .turns import Turn, first_of, no_turn


@dataclass(frozen=True)
class FusedSchedule:
    """A `LayerSchedule` of at least two microbatches. evaluation: the schedule of steps without gradients. unroll:
    layers of each direction in an iteration."""

    evaluation: LayerSchedule
    num_microbatches: int
    unroll: int

    def run(
        self, model: ModelFunctions, weights: ModelWeights, batch: Batch, *, gradient_scale: Array | None
    ) -> tuple[Sums, Params | None]:
        if gradient_scale is None:
            return self.evaluation.run(model, weights, batch, gradient_scale=None)
        accumulators = weights.gradient_accumulators(is_last=False)
        bound = weights.bound(accumulators, None, is_last=False)
        parts = split_microbatches(batch, self.num_microbatches)
        gathered, totals, finish = _hoisted_once(model, bound)
        stacks = [_Stack(each, gathered[each.name], gradient_scale, self.unroll) for each in model.stacks]
        step = _Step(model, bound, stacks, parts, gradient_scale)
        state, sums = step.begin(totals | {piece: accumulators[piece] for piece in ("embed", "head")})

        def trip(carry: tuple["_State", Sums], index: Array) -> tuple[tuple["_State", Sums], None]:
            state, own = step.trip(carry[0], index)
            return (state, jax.tree.map(jnp.add, carry[1], own)), None

        (state, sums), _ = jax.lax.scan(trip, (state, sums), jnp.arange(1, self.num_microbatches))
        return sums, weights.reduce(finish(step.end(state)))


def _hoisted_once(
    model: ModelFunctions, bound: Weights
) -> tuple[dict[str, Weights], dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Returns the weights of the stacks, with those that the plan hoists gathered once per step; what accumulates their
    gradients; and a function of all gradients that reduces those of hoisted weights."""
    found: dict[str, Weights] = {}

    def at_once(accumulators: dict[str, Any]) -> tuple[Any, Any]:
        for name, each in accumulators.items():
            found[name] = hoist(replace(bound.piece(name), accumulators=each))
        whole = found.items()
        return {name: each.accumulators for name, each in whole}, {name: each.working for name, each in whole}

    stored = {stack.name: bound.accumulators[stack.name] for stack in model.stacks}
    totals, pull_back, working = jax.vjp(at_once, stored, has_aux=True)
    whole = {name: replace(each, accumulators=totals[name], working=working[name]) for name, each in found.items()}
    return whole, totals, lambda gradients: gradients | pull_back({name: gradients[name] for name in totals})[0]


class _Stack:
    """The layers of a stack, one at a time, by lists of weights and of their gradients, None for frozen ones."""

    def __init__(self, functions: StackFunctions, weights: Weights, scale: Array, unroll: int) -> None:
        self.name, self.num_layers = functions.name, functions.num_layers
        self._functions, self._weights, self._scale, self._unroll = functions, weights, scale, unroll
        self._working, self._structure = jax.tree.flatten(weights.working)
        self._layouts = jax.tree.leaves(weights.layouts)

    def forward(self, microbatch: Microbatch, x: Any) -> tuple[Any, Aux, Any]:
        """Runs all layers. Returns x, auxiliary outputs, and what the backward pass needs: each with a first dimension
        `layers`."""
        layer, shared = self._layer(microbatch)

        def trip(x: Any, t: Array) -> tuple[Any, Any]:
            (x, (aux, _)), pull_back = layer.forward(self._whole(t), shared, t, x)
            return x, (aux, pull_back)

        with jax.named_scope(piece_scope(self.name)):
            x, (aux, saved) = jax.lax.scan(trip, x, jnp.arange(self.num_layers), unroll=self._unroll)
        return x, aux, saved

    def backward(
        self, microbatch: Microbatch, saved: Any, dx: Any, totals: Any, *, is_reversed: Array | bool = False
    ) -> tuple[Any, Any]:
        """Runs the backward pass of all layers. is_reversed: whether the last layer's entry of `saved` is the first.
        Returns the gradient of x, and `totals` with the gradients of weights added."""
        layer, shared = self._layer(microbatch)
        daux = self._cotangent(layer, shared, dx)

        def trip(carry: Any, t: Array) -> tuple[Any, None]:
            index = self.num_layers - 1 - t
            pull_back = read_slot(saved, jnp.where(is_reversed, t, index))
            return self._backward(layer, shared, index, pull_back, carry, daux), None

        with jax.named_scope(piece_scope(self.name)):
            carry = (dx, self._structure.flatten_up_to(totals))
            (dx, gradients), _ = jax.lax.scan(trip, carry, jnp.arange(self.num_layers), unroll=self._unroll)
        return dx, self._structure.unflatten(gradients)

    def both(
        self,
        microbatch: Microbatch,
        x: Any,
        before: Microbatch,
        saved: Any,
        dx: Any,
        totals: Any,
        *,
        is_reversed: Array,
    ) -> tuple[Any, Aux, Any, Any, Any]:
        """Runs `forward` of a microbatch and `backward` of the one before it, layer beside layer. Returns what both
        return."""
        layer, shared = self._layer(microbatch)
        daux = self._cotangent(layer, shared, x)

        def trip(carry: Any, t: Array) -> tuple[Any, Aux]:
            x, saved, *rest = carry
            index = self.num_layers - 1 - t
            slot = jnp.where(is_reversed, t, index)
            # Read before the forward pass writes: XLA's GPU compiler would copy the whole buffer, twice in each trip.
            pull_back, x = jax.lax.optimization_barrier((read_slot(saved, slot), x))
            (x, (aux, reached)), own = layer.forward(self._whole(t), shared, t, x)
            _, waiting = self._layer(before, Turn(reached, first_of(jax.tree.leaves(x)[-1])))
            rest = self._backward(layer, waiting, index, pull_back, rest, daux)
            return (x, _entered(saved, own, slot), *rest), aux

        with jax.named_scope(piece_scope(self.name)):
            carry = (x, saved, dx, self._structure.flatten_up_to(totals))
            carry, aux = jax.lax.scan(trip, carry, jnp.arange(self.num_layers), unroll=self._unroll)
        x, saved, dx, gradients = carry
        return x, aux, saved, dx, self._structure.unflatten(gradients)

    def _layer(self, microbatch: Microbatch, turn: Turn | None = None) -> tuple[LayerPass, list[Array]]:
        """Returns the passes of a layer, and what all layers share with what they wait for, as a list."""

        def layer(params: Any, shared: Any, index: Array, x: Any) -> tuple[Any, Any]:
            x, aux, reached = self._functions.layer_in_turn(params, shared[0], index, x, shared[1])
            return x, (aux, reached)

        shared = (microbatch.layers, turn or no_turn())
        return layer_pass(self._functions, self._weights, shared, layer), jax.tree.leaves(shared)

    def _whole(self, index: Array) -> list[Array]:
        pairs = zip(self._working, self._layouts, strict=True)
        return [all_gather_weight(read_slot(w, index), layout) for w, layout in pairs]

    def _backward(
        self, layer: LayerPass, shared: list[Array], index: Array, pull_back: Any, carry: Any, daux: Aux
    ) -> tuple[Any, list[Array | None]]:
        """Runs the backward pass of one layer. carry: the gradient of its result, and gradients of all weights."""
        dx, totals = carry
        dw, dx = layer.backward(self._whole(index), shared, index, pull_back, (dx, (daux, jnp.zeros(()))))
        reduction, each = self._weights.reduction, zip(totals, dw, self._layouts, strict=True)
        return dx, [
            None if total is None
            else write_slot(total, reduce_weight_gradient(g, read_slot(total, index), layout, reduction), index)
            for total, g, layout in each
        ]  # fmt: skip

    def _cotangent(self, layer: LayerPass, shared: list[Array], x: Any) -> Aux:
        """Returns the gradients of a layer's auxiliary outputs."""
        index = jnp.array(0)
        aux, _ = jax.eval_shape(lambda x: layer.layer(self._whole(index), shared, index, x)[1], x)
        return cotangent_of(aux, self._scale)


# What the next microbatch's trip needs of this one. saved: of the fused stack. below: of the embedding and the stacks
# before it, by name. dx: the gradient of the fused stack's result. totals: accumulated gradients, by piece. The first
# two keep the structure that microbatch 0 gave them: it holds a trace, which equals no other.
_State = dict[str, Any]


@dataclass(frozen=True)
class _Step:
    """The pieces of a model in the order in which a trip runs them."""

    model: ModelFunctions
    weights: Weights
    stacks: list[_Stack]
    parts: Batch
    scale: Array

    @property
    def fused(self) -> _Stack:
        return max(self.stacks, key=lambda stack: stack.num_layers)

    @property
    def below(self) -> list[_Stack]:
        return self.stacks[: self.stacks.index(self.fused)]

    @property
    def above(self) -> list[_Stack]:
        return self.stacks[self.stacks.index(self.fused) + 1 :]

    def begin(self, totals: dict[str, Any]) -> tuple[_State, Sums]:
        """Runs microbatch 0 up to the fused stack's gradient. Returns the first state, and its sums."""
        microbatch = self._microbatch(jnp.array(0))
        x, tied, below, aux = self._ascend(microbatch)
        x, aux[self.fused.name], saved = self.fused.forward(microbatch, x)
        dx, totals, sums = self._turn(microbatch, tied, x, totals, aux)
        return {"saved": saved, "below": below, "dx": dx, "totals": totals}, sums

    def trip(self, state: _State, index: Array) -> tuple[_State, Sums]:
        """Runs microbatch `index` up to the same place, and the rest of the one before it."""
        microbatch, before, totals = self._microbatch(index), self._microbatch(index - 1), dict(state["totals"])
        name, is_reversed = self.fused.name, index % 2 == 0  # microbatch 0, read by trip 1, lies in natural order
        x, tied, below, aux = self._ascend(microbatch)
        x, aux[name], saved, dx, totals[name] = self.fused.both(
            microbatch, x, before, state["saved"], state["dx"], totals[name], is_reversed=is_reversed
        )
        totals = self._descend(before, state["below"], dx, totals)
        dx, totals, sums = self._turn(microbatch, tied, x, totals, aux)
        below = jax.tree.unflatten(jax.tree.structure(state["below"]), jax.tree.leaves(below))
        return {"saved": saved, "below": below, "dx": dx, "totals": totals}, sums

    def end(self, state: _State) -> dict[str, Any]:
        """Runs the rest of the last microbatch. Returns the gradients of all weights."""
        last = jax.tree.leaves(self.parts)[0].shape[0] - 1
        microbatch, totals, name = self._microbatch(jnp.array(last)), dict(state["totals"]), self.fused.name
        dx, totals[name] = self.fused.backward(
            microbatch, state["saved"], state["dx"], totals[name], is_reversed=last % 2 == 1
        )
        return self._descend(microbatch, state["below"], dx, totals)

    def _microbatch(self, index: Array) -> Microbatch:
        return self.model.prepare(read_slot(self.parts, index))

    def _ascend(self, microbatch: Microbatch) -> tuple[Any, Any, dict[str, Any], dict[str, Aux]]:
        """Runs what comes before the fused stack. Returns x, the weights that the head shares, what the backward pass
        needs, and auxiliary outputs."""
        saved, aux, piece = dict[str, Any](), dict[str, Aux](), self.weights.piece("embed")

        def run(accumulators: Any) -> tuple[Any, Any]:
            return self.model.embed(replace(piece, accumulators=accumulators), microbatch)

        x, saved["embed"], tied = jax.vjp(run, piece.accumulators, has_aux=True)
        for stack in self.below:
            x, aux[stack.name], saved[stack.name] = stack.forward(microbatch, x)
        return x, tied, saved, aux

    def _descend(
        self, microbatch: Microbatch, saved: dict[str, Any], dx: Any, totals: dict[str, Any]
    ) -> dict[str, Any]:
        """Runs the backward pass of the same pieces, and returns the totals."""
        totals = dict(totals)
        for stack in reversed(self.below):
            dx, totals[stack.name] = stack.backward(microbatch, saved[stack.name], dx, totals[stack.name])
        (own,) = saved["embed"](dx)
        return totals | {"embed": jax.tree.map(jnp.add, totals["embed"], own)}

    def _turn(
        self, microbatch: Microbatch, tied: Any, x: Any, totals: dict[str, Any], aux: dict[str, Aux]
    ) -> tuple[Any, dict[str, Any], Sums]:
        """Runs what comes after the fused stack, forward and backward. aux: auxiliary outputs of the stacks so far.
        Returns the gradient of x, the totals, and sums over the microbatch."""
        saved, totals, aux = dict[str, Any](), dict(totals), dict(aux)
        for stack in self.above:
            x, aux[stack.name], saved[stack.name] = stack.forward(microbatch, x)
        embed, head = self.weights.piece("embed"), self.weights.piece("head")

        def run(of_embed: Any, of_head: Any, x: Any) -> tuple[Array, Any]:
            shared = replace(embed, accumulators=of_embed).gathered_before(tied)
            output = self.model.head(replace(head, accumulators=of_head), shared, x, microbatch)
            return objective(output, {"head": output.aux}), output

        _, pull_back, output = jax.vjp(run, embed.accumulators, head.accumulators, x, has_aux=True)
        of_embed, of_head, dx = pull_back(self.scale)
        own = {"embed": of_embed, "head": of_head}
        totals |= {piece: jax.tree.map(jnp.add, totals[piece], gradient) for piece, gradient in own.items()}
        for stack in reversed(self.above):
            dx, totals[stack.name] = stack.backward(microbatch, saved[stack.name], dx, totals[stack.name])
        return dx, totals, Sums(output.loss, aux | {"head": output.aux})


def _entered(tree: Any, entry: Any, index: Array) -> Any:
    """Returns a tree with an entry replaced."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(write_slot(leaves, jax.tree.leaves(entry), index))
