"""Runs a pipeline over the mesh axis `stage`: one loop over ticks, in which each stage runs the slots of its row.

    tick    gradients of the tick before go down a stage       permute, under F
            F   embedding on the first stage, layers, head on the last, with its gradients
            results go up a stage                              permute, under BW
            BW  layers run again, their backward pass, embedding's on the first stage

Permutes are outside of all branches: a branch differs between stages, and a collective among stages in one would wait
forever. Weights of layers are gathered once per step, and their gradients accumulated whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models import Aux, Params

from ..core.partition_spec import STAGE
from ..core.scopes import end_scope, piece_scope, slot_scope
from ..parallel.weights import Weights, hoist
from .pipeline_columns import BACKWARD, FORWARD, TickRows, lower_rows
from .schedule import (
    Batch,
    Microbatch,
    ModelFunctions,
    ModelWeights,
    StackFunctions,
    Sums,
    objective,
    split_microbatches,
)


@dataclass(frozen=True)
class PipelineSchedule:
    """A `LayerSchedule` by the rows of a table. Layers lie in natural order: a stage holds those behind the stage
    before. The model has one stack."""

    rows: TickRows
    num_stages: int
    num_microbatches: int

    def run(
        self, model: ModelFunctions, weights: ModelWeights, batch: Batch, *, gradient_scale: Array | None
    ) -> tuple[Sums, Params | None]:
        rows = self.rows
        if gradient_scale is None:
            forward_only = [[[slot for slot in slots if slot[0] == FORWARD] for slots in row] for row in rows]
            rows = [row for row in forward_only if any(row)]
        columns, num_x, num_gradients = lower_rows(rows, self.num_stages, self.num_microbatches)
        (stack,) = model.stacks
        accumulators = weights.gradient_accumulators(is_last=False)
        stored = weights.bound(accumulators, None, is_last=False)
        gathered, reduce_layers = _gathered_once(stored.piece(stack.name), accumulators[stack.name])
        parts = split_microbatches(batch, self.num_microbatches)
        device = _Device(self, model, stack, stored, gathered, accumulators, parts, gradient_scale)
        carry = device.begin(num_x, num_gradients)
        carry, _ = jax.lax.scan(device.tick, carry, {name: jnp.asarray(c) for name, c in columns.by_name.items()})
        sums = Sums(*jax.lax.psum((carry["loss"], carry["auxiliary"]), STAGE))
        if gradient_scale is None:
            return sums, None
        ends = jax.lax.psum(carry["of_ends"], STAGE)
        return sums, weights.reduce({**ends, stack.name: reduce_layers(carry["of_layers"])})


def _gathered_once(stacked: Weights, accumulators: Any) -> tuple[Weights, Callable[[Any], Any]]:
    """Returns the weights of all layers of this stage, gathered, and a function that reduces their gradients."""
    layouts = jax.tree.map(lambda one: replace(one, use="hoisted") if one.gathered else one, stacked.layouts)

    def at_once(accumulators: Any) -> tuple[Any, Weights]:
        whole = hoist(replace(stacked, accumulators=accumulators, layouts=layouts))
        found["layouts"], found["reduction"] = whole.layouts, whole.reduction
        return whole.accumulators, whole.working

    found: dict[str, Any] = {}
    of_whole, pull_back, working = jax.vjp(at_once, accumulators, has_aux=True)
    return Weights(of_whole, None, working, found["layouts"], found["reduction"]), lambda g: pull_back(g)[0]


@dataclass(frozen=True)
class _Device:
    """One stage's part of the loop over ticks."""

    schedule: PipelineSchedule
    model: ModelFunctions
    stack: StackFunctions
    stored: Weights
    layers: Weights
    accumulators: Any
    parts: Batch
    scale: Array | None

    @property
    def num_layers(self) -> int:
        return self.stack.num_layers // self.schedule.num_stages

    def microbatch(self, index: Array) -> Microbatch:
        return self.model.prepare(_at(self.parts, index))

    def begin(self, num_x: int, num_gradients: int) -> dict[str, Any]:
        """Returns the carry of the first tick; buffers have a slot more, for what nobody reads."""
        microbatch = jax.eval_shape(self.microbatch, jnp.array(0))
        x, _ = jax.eval_shape(lambda m: self.model.embed(self.stored.piece("embed"), m), microbatch)
        _, of_layers = jax.eval_shape(partial(self._forward_layers), microbatch, x)
        output = jax.eval_shape(lambda m, x: self._head(*self._ends(), x, m)[1], microbatch, x)
        zeros = partial(jax.tree.map, lambda a: jnp.zeros(a.shape, a.dtype))
        rings = jax.tree.map(lambda a: jnp.zeros((num_x + 1, *a.shape), a.dtype), x)
        auxiliary = jax.tree.map(lambda a: jnp.zeros((self.stack.num_layers, *a.shape[1:]), a.dtype), of_layers[1])
        carry: dict[str, Any] = {
            "x": rings,
            "loss": zeros(output.loss),
            "auxiliary": {self.stack.name: auxiliary, "head": zeros(output.aux)},
        }
        if self.scale is not None:
            carry |= {
                "gradient": jax.tree.map(lambda a: jnp.zeros((num_gradients + 1, *a.shape), a.dtype), x),
                "dx": zeros(x),
                "of_layers": zeros(self.layers.accumulators),
                "of_ends": zeros({piece: self.accumulators[piece] for piece in ("embed", "head")}),
            }
        return carry

    def tick(self, carry: dict[str, Any], row: dict[str, Array]) -> tuple[dict[str, Any], None]:
        stage = jax.lax.axis_index(STAGE)
        own = {name: column[stage] for name, column in row.items()}
        carry, down = dict(carry), None
        if self.scale is not None:
            down = _permuted(carry["dx"], self._pairs(-1))
        with jax.named_scope(slot_scope(FORWARD)):
            keys = [key for key in carry if key not in ("dx", "of_layers")]
            made, y = _either(
                own["forward"], self._forward, self._no_forward, {key: carry[key] for key in keys}, own, stage
            )
        carry |= made
        up = _permuted(y, self._pairs(1))
        if self.scale is not None:
            carry["gradient"] = _put(carry["gradient"], down, own["gradient_arrives_at"])
            with jax.named_scope(slot_scope(BACKWARD)):
                state = {key: carry[key] for key in ("of_layers", "of_ends")}
                read = (carry["x"], carry["gradient"], own, stage)
                made, carry["dx"] = _either(own["backward"], self._backward, self._no_backward, state, *read)
            carry |= made
        carry["x"] = _put(carry["x"], up, own["x_arrives_at"])
        return carry, None

    def _pairs(self, direction: int) -> list[tuple[int, int]]:
        num = self.schedule.num_stages
        return [(s, s + direction) for s in range(num) if 0 <= s + direction < num]

    def _no_forward(self, state: Any, *_: Any) -> tuple[Any, Any]:
        return state, jax.tree.map(lambda ring: jnp.zeros_like(ring[0]), state["x"])

    def _no_backward(self, state: Any, x: Any, *_: Any) -> tuple[Any, Any]:
        return state, jax.tree.map(lambda ring: jnp.zeros_like(ring[0]), x)

    def _forward(self, state: dict[str, Any], own: dict[str, Array], stage: Array) -> tuple[dict[str, Any], Any]:
        state, microbatch = dict(state), self.microbatch(own["forward_microbatch"])
        is_first, is_last = stage == 0, stage == self.schedule.num_stages - 1

        def embedded() -> Any:
            with jax.named_scope(end_scope("first")):
                return self.model.embed(self.stored.piece("embed"), microbatch)[0]

        x = _either(is_first, embedded, lambda: _at(state["x"], own["x_of_forward"]))
        state["x"] = _put(state["x"], x, own["x_of_forward"])
        y, (_, aux) = self._forward_layers(microbatch, x, stage)
        auxiliary = dict(state["auxiliary"])
        auxiliary[self.stack.name] = jax.tree.map(
            lambda total, a: _added_at(total, a, stage * self.num_layers), auxiliary[self.stack.name], aux
        )
        state["auxiliary"] = auxiliary
        return _either(is_last, self._last, lambda s, *_: s, state, y, microbatch, own["gradient_of_head"]), y

    def _last(self, state: dict[str, Any], y: Any, microbatch: Microbatch, slot: Array) -> dict[str, Any]:
        """Runs the head, and its backward pass at once."""
        state = dict(state)
        with jax.named_scope(end_scope("last")):
            if self.scale is None:
                _, output = self._head(*self._ends(), y, microbatch)
            else:

                def run(head: Any, embed: Any, x: Any) -> tuple[Array, Any]:
                    return self._head(head, embed, x, microbatch)

                _, pull_back, output = jax.vjp(run, *self._ends(), y, has_aux=True)
                head, embed, dy = pull_back(self.scale)
                state["of_ends"] = jax.tree.map(jnp.add, state["of_ends"], {"embed": embed, "head": head})
                state["gradient"] = _put(state["gradient"], dy, slot)
        auxiliary = {**state["auxiliary"], "head": jax.tree.map(jnp.add, state["auxiliary"]["head"], output.aux)}
        return state | {"loss": state["loss"] + output.loss, "auxiliary": auxiliary}

    def _ends(self) -> tuple[Any, Any]:
        return self.accumulators["head"], self.accumulators["embed"]

    def _head(self, head: Any, embed: Any, x: Any, microbatch: Microbatch) -> tuple[Array, Any]:
        tied = replace(self.stored.piece("embed"), accumulators=embed).gathered()
        output = self.model.head(replace(self.stored.piece("head"), accumulators=head), tied, x, microbatch)
        return objective(output, {"head": output.aux}), output

    def _layer(self, accumulators: Any, working: Any, microbatch: Microbatch, index: Array, x: Any) -> tuple[Any, Aux]:
        own = replace(self.layers, accumulators=accumulators, working=working)
        return self.stack.layer(own.gathered(), microbatch.layers, index, x)

    def _forward_layers(self, microbatch: Microbatch, x: Any, stage: Array | int = 0) -> tuple[Any, tuple[Any, Aux]]:
        """Returns the result of this stage's layers, and for each its input and its auxiliary outputs."""

        def one(x: Any, of_layer: Any) -> tuple[Any, Any]:
            accumulators, working, index = of_layer
            y, aux = self._layer(accumulators, working, microbatch, index, x)
            return y, (x, aux)

        with jax.named_scope(piece_scope(self.stack.name)):
            return jax.lax.scan(one, x, (self.layers.accumulators, self.layers.working, self._indices(stage)))

    def _indices(self, stage: Array | int) -> Array:
        return stage * self.num_layers + jnp.arange(self.num_layers)

    def _backward(
        self, state: dict[str, Any], xs: Any, gradients: Any, own: dict[str, Array], stage: Array
    ) -> tuple[dict[str, Any], Any]:
        microbatch, state = self.microbatch(own["backward_microbatch"]), dict(state)
        _, (inputs, _) = self._forward_layers(microbatch, _at(xs, own["x_of_backward"]), stage)

        def one(carry: Any, of_layer: Any) -> tuple[Any, None]:
            dy, total = carry
            at, working, index, x = of_layer
            zeros = _at(self.layers.accumulators, at)

            def run(accumulators: Any, x: Any) -> tuple[Any, Aux]:
                return self._layer(accumulators, working, microbatch, index, x)

            (_, aux), pull_back = jax.vjp(run, zeros, x)
            dw, dx = pull_back((dy, _cotangent(aux, self.scale)))
            total = jax.tree.map(lambda t, g: t.at[at].add(g), total, dw)
            return (dx, total), None

        with jax.named_scope(piece_scope(self.stack.name)):
            of_layers = (jnp.arange(self.num_layers), self.layers.working, self._indices(stage), inputs)
            start = (_at(gradients, own["gradient_of_backward"]), state["of_layers"])
            (dx, state["of_layers"]), _ = jax.lax.scan(one, start, of_layers, reverse=True)

        def first(of_ends: Any) -> Any:
            with jax.named_scope(end_scope("first")):
                piece = self.stored.piece("embed")

                def run(embed: Any) -> Any:
                    return self.model.embed(replace(piece, accumulators=embed), microbatch)[0]

                (embed,) = jax.vjp(run, self.accumulators["embed"])[1](dx)
            return {**of_ends, "embed": jax.tree.map(jnp.add, of_ends["embed"], embed)}

        state["of_ends"] = _either(stage == 0, first, lambda of_ends: of_ends, state["of_ends"])
        return state, dx


def _either(is_on: Array, run: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any) -> Any:
    """Returns what one of two branches gives. A barrier ends each: XLA fails where the partitioner's layouts of what
    two branches return are declared and differ (jaxlib 0.10.2: `Inconsistent conditional sharding`)."""

    def ended(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: jax.lax.optimization_barrier(branch(*operands))

    return jax.lax.cond(is_on, ended(run), ended(otherwise), *operands)


def _cotangent(aux: Aux, scale: Any) -> Aux:
    return Aux(
        jax.tree.map(lambda loss: jnp.broadcast_to(scale, loss.shape).astype(loss.dtype), aux.losses),
        *jax.tree.map(jnp.zeros_like, (aux.statistics, aux.totals)),
    )


def _permuted(tree: Any, pairs: list[tuple[int, int]]) -> Any:
    return jax.tree.map(lambda x: jax.lax.ppermute(x, STAGE, pairs), tree)


def _at(tree: Any, index: Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def _put(tree: Any, value: Any, index: Array) -> Any:
    return jax.tree.map(lambda x, v: jax.lax.dynamic_update_index_in_dim(x, v.astype(x.dtype), index, 0), tree, value)


def _added_at(total: Array, value: Array, first: Array) -> Array:
    before = jax.lax.dynamic_slice_in_dim(total, first, len(value))
    return jax.lax.dynamic_update_slice_in_dim(total, before + value, first, 0)
