"""Runs a pipeline over the mesh axis `stage`: one loop over ticks, in which each stage runs the slots of its row.

    tick    gradients of the tick before go to the stages that wait for them    permutes, under F
            F   embedding on the first virtual stage, layers of a chunk, head on the last, with its gradients
            results go on                                                       permutes, under what follows
            head of all stages, if they share it (shared_head.py)               in F's tick on the last virtual stage
            R   layers run again, if that is an operation of its own
            B   gradients of the layers' inputs, embedding's on the first virtual stage; or BW, of weights too
            W   gradients of the layers' weights

Permutes are outside of all branches: a branch differs between stages, and a collective among stages in one would wait
forever. A head that stages share is in a branch that all of them take. Otherwise a collective within a branch has to be
among devices of one stage, and must not be a permute: XLA's CPU runs a permute on all devices of the program at once,
so a ring within a stage gives wrong results there.

Arrays that wait for a later operation are in buffers, written in place: (slot, ...) for inputs of chunks and gradients
of their results, (slot, layer, ...) for what layers save for their backward pass. Weights of layers are gathered once
per step, or where a layer is used, in the branch (stage_gather.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models import Aux, Params

from ..core.partition_spec import STAGE
from ..core.scopes import end_scope, piece_scope, shared_end_scope, slot_scope
from ..parallel.weights import Weights, hoist
from ..pipeline.buffers import LoweredTable, forward_only, lower_table
from ..pipeline.table import PipelineOp, PipelineTable, StagePlacement
from .pipeline_buffers import added_at, empty_buffer, read_layer, read_slot, write_layer, write_slot, zeros_of
from .pipeline_head import PipelineHead, with_whole_vocabulary
from .schedule import (
    Batch,
    Microbatch,
    ModelFunctions,
    ModelWeights,
    StackFunctions,
    Sums,
    cotangent_of,
    split_microbatches,
)
from .split_backward import LayerPasses, by_dimensions, rejoined, split_passes


@dataclass(frozen=True)
class PipelineSchedule:
    """A `LayerSchedule` by a table. The model has one stack, whose layers lie in placement order (layer_order.py)."""

    table: PipelineTable

    def run(
        self, model: ModelFunctions, weights: ModelWeights, batch: Batch, *, gradient_scale: Array | None
    ) -> tuple[Sums, Params | None]:
        table = forward_only(self.table) if gradient_scale is None else self.table
        lowered = lower_table(table)
        (stack,) = model.stacks
        accumulators = weights.gradient_accumulators(is_last=False)
        stored = weights.bound(accumulators, None, is_last=False)
        layers, reduce_layers = _hoisted(stored.piece(stack.name), accumulators[stack.name])
        parts = split_microbatches(batch, table.num_microbatches)
        head = PipelineHead(model, stored, gradient_scale, table.placement.stage(table.placement.num_virtual - 1))
        lookup = with_whole_vocabulary(stored.piece("embed"))
        device = _Device(table, lowered, model, stack, head, lookup, layers, parts, gradient_scale)
        columns = lowered.columns | (lowered.of_head if head.is_shared else {})
        carry, _ = jax.lax.scan(device.tick, device.begin(), jax.tree.map(jnp.asarray, columns))
        sums = Sums(*jax.lax.psum((carry["loss"], carry["auxiliary"]), STAGE))
        if gradient_scale is None:
            return sums, None
        of_layers = rejoined(layers.accumulators, carry["of_vectors"], carry["of_matrices"], num_before=1)
        return sums, weights.reduce({**head.total(carry), stack.name: reduce_layers(of_layers)})


def _hoisted(stacked: Weights, accumulators: Any) -> tuple[Weights, Callable[[Any], Any]]:
    """Returns the weights of all layers of this stage, with those gathered that the plan hoists, and a function that
    reduces the gradients of these."""

    def at_once(accumulators: Any) -> tuple[Any, Weights]:
        whole = hoist(replace(stacked, accumulators=accumulators))
        found["layouts"], found["reduction"] = whole.layouts, whole.reduction
        return whole.accumulators, whole.working

    found: dict[str, Any] = {}
    of_whole, pull_back, working = jax.vjp(at_once, accumulators, has_aux=True)
    return Weights(of_whole, None, working, found["layouts"], found["reduction"]), lambda g: pull_back(g)[0]


_Row = dict[str, Array]  # of a tick, the values of this stage's columns
_State = dict[str, Any]  # what the loop over ticks carries, or a part of it


@dataclass(frozen=True)
class _Device:
    """One stage's part of the loop over ticks."""

    table: PipelineTable
    lowered: LoweredTable
    model: ModelFunctions
    stack: StackFunctions
    head: PipelineHead
    lookup: Weights
    layers: Weights
    parts: Batch
    scale: Array | None

    @property
    def placement(self) -> StagePlacement:
        return self.table.placement

    @property
    def layers_per_chunk(self) -> int:
        return self.stack.num_layers // self.placement.num_virtual

    def microbatch(self, index: Array) -> Microbatch:
        return self.model.prepare(read_slot(self.parts, index))

    @cached_property
    def _shapes(self) -> tuple[Microbatch, Any, Any]:
        """A microbatch, x, and a layer's auxiliary outputs, as shapes."""
        microbatch = jax.eval_shape(self.microbatch, jnp.array(0))
        x, _ = jax.eval_shape(lambda m: self.model.embed(self.lookup, m), microbatch)
        known = jax.eval_shape(lambda m: self._known(m, jnp.array(0), jnp.array(0)), microbatch)
        _, aux = jax.eval_shape(lambda known, x: self._layer(self._no_gradients, known, x), known, x)
        return microbatch, x, aux

    @cached_property
    def passes(self) -> LayerPasses:
        """The passes of a layer."""
        microbatch, x, _ = self._shapes
        known = jax.eval_shape(lambda m: self._known(m, jnp.array(0), jnp.array(0)), microbatch)
        return split_passes(
            self._layer,
            self.stack.policy,
            self._no_gradients,
            known,
            x,
            cotangent=lambda aux: cotangent_of(aux, self.scale),
            recomputes=PipelineOp.RECOMPUTE in self.table.ops,
        )

    def begin(self) -> _State:
        """Returns the carry of the first tick. Buffers that an array is put in whether it is used or not have a slot
        more."""
        microbatch, x, of_layer = self._shapes
        of_head = self.head.begin(x, microbatch)
        of_layers = jax.tree.map(lambda a: jax.ShapeDtypeStruct((self.stack.num_layers, *a.shape), a.dtype), of_layer)
        state: _State = {
            **of_head,
            "x": empty_buffer("x", x, self.lowered.num_x + 1),
            "auxiliary": {self.stack.name: zeros_of(of_layers), **of_head["auxiliary"]},
        }
        if self.scale is None:
            return state
        vectors, matrices = by_dimensions(self.layers.accumulators, num_before=1)
        state |= {
            "gradient": empty_buffer("gradient", x, self.lowered.num_gradients + 1),
            "dx": zeros_of(x),
            "of_vectors": zeros_of(vectors),
            "of_matrices": zeros_of(matrices),
            "of_embed": zeros_of(self.lookup.accumulators),
            "saved": empty_buffer("saved", self.passes.saved, self.lowered.num_x, self.layers_per_chunk),
        }
        if PipelineOp.RECOMPUTE in self.table.ops:
            state["kept"] = empty_buffer("kept", self.passes.kept, self.lowered.num_residuals, self.layers_per_chunk)
        if PipelineOp.WEIGHT_GRADIENT in self.table.ops:
            state["cut"] = empty_buffer("cut", self.passes.cut, self.lowered.num_cuts, self.layers_per_chunk)
        return state

    def tick(self, carry: _State, row: _Row) -> tuple[_State, None]:
        stage = jax.lax.axis_index(STAGE)
        own = {name: column[stage] if column.ndim else column for name, column in row.items()}
        state, ops = dict(carry), self.table.ops
        sent_back = [] if self.scale is None else self._sent("gradient", state["dx"])
        y, dy = self._slot(PipelineOp.FORWARD, self._forward, state, own)
        sent = self._sent("x", y)
        if self.head.is_shared:
            dy = self._shared_head(y, state, own)
        if self.scale is not None:
            state["gradient"] = _received(state["gradient"], [("gradient_of_head", dy), *sent_back], own)
        if PipelineOp.RECOMPUTE in ops:
            self._slot(PipelineOp.RECOMPUTE, self._recompute, state, own)
        if PipelineOp.BACKWARD in ops:
            state["dx"] = self._slot(PipelineOp.BACKWARD, self._backward, state, own)
        if PipelineOp.INPUT_GRADIENT in ops:
            state["dx"] = self._slot(PipelineOp.INPUT_GRADIENT, self._backward, state, own)
        if PipelineOp.WEIGHT_GRADIENT in ops:
            self._slot(PipelineOp.WEIGHT_GRADIENT, self._weight_gradient, state, own)
        state["x"] = _received(state["x"], sent, own)
        return state, None

    def _slot(self, op: PipelineOp, run: Callable[[_State, _State, _Row], Any], state: _State, own: _Row) -> Any:
        """Runs a slot, if this stage has one in this tick. It changes `state`, and returns what the slot sends."""
        has_head = op == PipelineOp.FORWARD and not self.head.is_shared
        written = {key: state[key] for key in (*_WRITES[op], *(self.head.writes if has_head else ())) if key in state}
        read = {key: value for key, value in state.items() if key not in written}
        x = self._shapes[1]
        sends = {PipelineOp.FORWARD: (x, x if "gradient" in state else None)}.get(op, x if op.takes_gradient else None)
        with jax.named_scope(slot_scope(op)):
            made, sent = _either(
                own[_COLUMNS[op]],
                lambda written: run(written, read, own),
                lambda written: (written, zeros_of(sends)),
                written,
            )
        state |= made
        return sent

    def _sent(self, buffer: str, value: Any) -> list[tuple[str, Any]]:
        """Returns what arrives by each way that the placement has, with the column of where it is put."""
        num, is_ring = self.placement.num_stages, self.placement.num_chunks > 1 and not self.placement.is_v
        ways: list[tuple[str, Any]] = []
        for name, step in (("arrives_from_below", 1), ("stays", 0), ("arrives_from_above", -1)):
            if (column := f"{buffer}_{name}") in self.lowered.columns:
                pairs = [(s, (s + step) % num) for s in range(num) if is_ring or 0 <= s + step < num]
                ways.append((column, _permuted(value, pairs) if step else value))
        return ways

    def _forward(self, state: _State, read: _State, own: _Row) -> tuple[_State, Any]:
        state, microbatch = dict(state), self.microbatch(own["forward_microbatch"])

        def embedded() -> Any:
            with jax.named_scope(end_scope("first")):
                return self.model.embed(self.lookup, microbatch)[0]

        x = _either(own["forward_is_first"], embedded, lambda: read_slot(read["x"], own["x_of_forward"]))

        def one(carry: tuple[Any, Any, Any], layer: Array) -> tuple[Any, None]:
            x, saved, auxiliary = carry
            known = self._known(microbatch, own["forward_chunk"], layer)
            if self.scale is None:
                y, aux = self._layer(self._no_gradients, known, x)
            else:
                (y, aux), made = self.passes.forward(known, x)
                saved = write_layer(saved, made, own["x_of_forward"], layer)
            return (y, saved, added_at(auxiliary, aux, known[-1])), None

        auxiliary = dict(state["auxiliary"])
        start = (x, state.pop("saved", None), auxiliary[self.stack.name])
        (y, saved, auxiliary[self.stack.name]), _ = self._over_layers(one, start)
        state["auxiliary"] = auxiliary
        # What layers saved stays out of this branch, which would copy it.
        no_gradient = None if self.scale is None else zeros_of(y)
        if self.head.is_shared:
            dy = no_gradient
        else:
            state, dy = _either(
                own["forward_is_last"], self._last, lambda state, *_: (state, no_gradient), state, y, microbatch
            )
        return state | ({} if saved is None else {"saved": saved}), (y, dy)

    def _last(self, state: _State, y: Any, microbatch: Microbatch) -> tuple[_State, Any]:
        with jax.named_scope(end_scope("last")):
            return self.head.run(state, y, microbatch)

    def _shared_head(self, y: Any, state: _State, own: _Row) -> Any:
        """Runs the head on all stages for the result `y` of the last virtual stage, if that has made one in this tick.
        Changes `state`, and returns the gradient of `y`."""
        written = {key: state[key] for key in self.head.writes if key in state}
        no_gradient = None if self.scale is None else zeros_of(y)
        with jax.named_scope(slot_scope(PipelineOp.FORWARD)), jax.named_scope(shared_end_scope("last")):
            made, dy = _either(
                own["head"],
                lambda written: self.head.run(written, y, self.microbatch(own["head_microbatch"])),
                lambda written: (written, no_gradient),
                written,
            )
        state |= made
        return dy

    def _recompute(self, state: _State, read: _State, own: _Row) -> tuple[_State, None]:
        microbatch = self.microbatch(own["recompute_microbatch"])

        def one(kept: Any, layer: Array) -> tuple[Any, None]:
            known = self._known(microbatch, own["recompute_chunk"], layer)
            made = self.passes.recompute(known, read_layer(read["saved"], own["x_of_recompute"], layer))
            return write_layer(kept, made, own["residuals_of_recompute"], layer), None

        kept, _ = self._over_layers(one, state["kept"])
        return {"kept": kept}, None

    def _backward(self, state: _State, read: _State, own: _Row) -> tuple[_State, Any]:
        """Runs B, if the table has W, or BW. The cut and the gradients of weights are written layer by layer: stacked
        and then copied into their buffers, B would take twice its time."""
        microbatch, chunk = self.microbatch(own["backward_microbatch"]), own["backward_chunk"]
        state, splits = dict(state), "cut" in state
        written = "cut" if splits else "of_matrices"
        buffer, slot = ("kept", "residuals_of_backward") if "kept" in read else ("saved", "x_of_backward")

        def one(carry: tuple[Any, Any, Any], layer: Array) -> tuple[Any, None]:
            dy, total, others = carry
            known, held = self._known(microbatch, chunk, layer), read_layer(read[buffer], own[slot], layer)
            place = self._place(chunk, layer)
            if splits:
                dx, vectors, cut = self.passes.input_gradient(known, held, dy)
                others = write_layer(others, cut, own["cut_of_backward"], layer)
            else:
                dx, (vectors, matrices) = self.passes.backward(known, held, dy)
                others = added_at(others, matrices, place)
            return (dx, added_at(total, vectors, place), others), None

        start = (read_slot(read["gradient"], own["gradient_of_backward"]), state["of_vectors"], state[written])
        (dx, state["of_vectors"], state[written]), _ = self._over_layers(one, start, reverse=True)

        def first(of_embed: Any) -> Any:
            with jax.named_scope(end_scope("first")):

                def run(embed: Any) -> Any:
                    return self.model.embed(replace(self.lookup, accumulators=embed), microbatch)[0]

                (embed,) = jax.vjp(run, self.lookup.accumulators)[1](dx)
            return jax.tree.map(jnp.add, of_embed, embed)

        is_first = own["backward_is_first"]
        state["of_embed"] = _either(is_first, first, lambda of_embed: of_embed, state["of_embed"])
        return state, dx

    def _weight_gradient(self, state: _State, read: _State, own: _Row) -> tuple[_State, None]:
        microbatch, chunk = self.microbatch(own["weight_microbatch"]), own["weight_chunk"]

        def one(total: Any, layer: Array) -> tuple[Any, None]:
            known, cut = self._known(microbatch, chunk, layer), read_layer(read["cut"], own["cut_of_weight"], layer)
            return added_at(total, self.passes.weight_gradient(known, cut), self._place(chunk, layer)), None

        total, _ = self._over_layers(one, state["of_matrices"])
        return {"of_matrices": total}, None

    def _over_layers(self, one: Callable[..., Any], start: Any, *, reverse: bool = False) -> Any:
        """Runs a function once for each layer of a chunk."""
        with jax.named_scope(piece_scope(self.stack.name)):
            return jax.lax.scan(one, start, jnp.arange(self.layers_per_chunk), reverse=reverse)

    def _place(self, chunk: Array, layer: Array) -> Array:
        """Returns the place of a chunk's layer among the layers of this stage."""
        return chunk * self.layers_per_chunk + layer

    def _known(self, microbatch: Microbatch, chunk: Array, layer: Array) -> tuple[Any, Any, Array]:
        """Returns the weights of a layer, what all layers share, and the number of the layer in the model."""
        virtual = _virtual_stages(self.placement)[jax.lax.axis_index(STAGE), chunk]
        working = read_slot(self.layers.working, self._place(chunk, layer))
        return working, microbatch.layers, virtual * self.layers_per_chunk + layer

    @property
    def _no_gradients(self) -> Any:
        """Zeros of the gradients of a layer."""
        return jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), self.layers.accumulators)

    def _layer(self, accumulators: Any, known: tuple[Any, Any, Array], x: Any) -> tuple[Any, Aux]:
        working, shared, index = known
        own = replace(self.layers, accumulators=accumulators, working=working)
        return self.stack.layer(own.gathered(), shared, index, x)


_COLUMNS = {
    PipelineOp.FORWARD: "forward",
    PipelineOp.RECOMPUTE: "recompute",
    PipelineOp.INPUT_GRADIENT: "backward",
    PipelineOp.BACKWARD: "backward",
    PipelineOp.WEIGHT_GRADIENT: "weight",
}
# What each changes of the carry, and no more: XLA brings all of it into the layout of the branch, and back.
_WRITES: dict[PipelineOp, Sequence[str]] = {
    PipelineOp.FORWARD: ("auxiliary", "saved"),
    PipelineOp.RECOMPUTE: ("kept",),
    PipelineOp.INPUT_GRADIENT: ("cut", "of_vectors", "of_embed"),
    PipelineOp.BACKWARD: ("of_matrices", "of_vectors", "of_embed"),
    PipelineOp.WEIGHT_GRADIENT: ("of_matrices",),
}


def _virtual_stages(placement: StagePlacement) -> Array:
    """Returns the virtual stage of each stage and chunk."""
    chunks = range(placement.num_chunks)
    return jnp.array([[placement.virtual(s, chunk) for chunk in chunks] for s in range(placement.num_stages)])


def _either(is_on: Array, run: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any) -> Any:
    """Returns what one of two branches gives. A barrier ends each: XLA fails where the partitioner's layouts of what
    two branches return are declared and differ (jaxlib 0.10.2: `Inconsistent conditional sharding`)."""

    def ended(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: jax.lax.optimization_barrier(branch(*operands))

    return jax.lax.cond(is_on, ended(run), ended(otherwise), *operands)


def _permuted(tree: Any, pairs: list[tuple[int, int]]) -> Any:
    return jax.tree.map(lambda x: jax.lax.ppermute(x, STAGE, pairs), tree)


def _received(buffer: Any, arrived: list[tuple[str, Any]], own: _Row) -> Any:
    for column, value in arrived:
        buffer = write_slot(buffer, value, own[column])
    return buffer
