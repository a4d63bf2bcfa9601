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
of their results, (slot, layer, ...) for what the layers of a stack save for their backward pass. Weights of layers are
gathered once per step, or where a layer is used, in the branch (parallel/pipeline_plan.py).

Chunks may differ in their layers (pipeline/stage_layers.py). Each then has room for as many layers of a stack as the
largest has, and a slot is a switch with a branch for each kind of chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models import Aux, Params

from ..core.partition_spec import STAGE
from ..core.scopes import end_scope, piece_scope, shared_end_scope, slot_scope
from ..parallel.weights import Weights, hoist
from ..pipeline.buffers import COLUMN_OF, LoweredTable, forward_only, lower_table
from ..pipeline.stage_layers import Counts, StageLayers
from ..pipeline.table import PipelineOp, PipelineTable, StagePlacement
from .pipeline_head import PipelineHead, with_whole_vocabulary
from .pipeline_state import (
    SlotBranches,
    added_at,
    either,
    empty_buffer,
    read_layer,
    read_slot,
    write_layer,
    write_slot,
    zeros_of,
)
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
    """A `LayerSchedule` by a table. layers: of each virtual stage; the weights that it is handed are those of this
    stage's, by stack (`StageLayers.rows`). branches: how a slot runs, or not."""

    table: PipelineTable
    layers: StageLayers
    branches: SlotBranches

    def run(
        self, model: ModelFunctions, weights: ModelWeights, batch: Batch, *, gradient_scale: Array | None
    ) -> tuple[Sums, Params | None]:
        table = forward_only(self.table) if gradient_scale is None else self.table
        lowered = lower_table(table, self.layers.kind_of)
        accumulators = weights.gradient_accumulators(is_last=False)
        stored = weights.bound(accumulators, None, is_last=False)
        gathered = {name: _hoisted(stored.piece(name), accumulators[name]) for name in self.layers.stacks}
        of_stacks = {name: of_stack for name, (of_stack, _) in gathered.items()}
        parts = split_microbatches(batch, table.num_microbatches)
        head = PipelineHead(model, stored, gradient_scale, table.placement.stage(table.placement.num_virtual - 1))
        lookup = with_whole_vocabulary(stored.piece("embed"))
        device = _Device(
            table, lowered, self.layers, self.branches, model, head, lookup, of_stacks, parts, gradient_scale
        )
        columns = lowered.columns | (lowered.of_head if head.is_shared else {})
        carry, _ = jax.lax.scan(device.tick, device.begin(), jax.tree.map(jnp.asarray, columns))
        sums = Sums(*jax.lax.psum((carry["loss"], carry["auxiliary"]), STAGE))
        if gradient_scale is None:
            return sums, None
        gradients = head.total(carry)
        for name, (of_stack, reduce_layers) in gathered.items():
            whole = rejoined(of_stack.accumulators, carry["of_vectors"][name], carry["of_matrices"][name], num_before=1)
            gradients[name] = reduce_layers(whole)
        return sums, weights.reduce(gradients)


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
    """One stage's part of the loop over ticks. of_stacks: the weights of the stage's layers, by stack."""

    table: PipelineTable
    lowered: LoweredTable
    layers: StageLayers
    branches: SlotBranches
    model: ModelFunctions
    head: PipelineHead
    lookup: Weights
    of_stacks: dict[str, Weights]
    parts: Batch
    scale: Array | None

    @property
    def placement(self) -> StagePlacement:
        return self.table.placement

    def microbatch(self, index: Array) -> Microbatch:
        return self.model.prepare(read_slot(self.parts, index), {})

    @cached_property
    def _shapes(self) -> tuple[Microbatch, Any]:
        """A microbatch, and x, as shapes."""
        microbatch = jax.eval_shape(self.microbatch, jnp.array(0))
        x, _ = jax.eval_shape(lambda m: self.model.embed(self.lookup, m), microbatch)
        return microbatch, x

    def _known_shapes(self, stack: StackFunctions) -> Any:
        return jax.eval_shape(lambda m: self._known(stack, m, jnp.array(0), jnp.array(0)), self._shapes[0])

    def _aux_shapes(self, stack: StackFunctions) -> Any:
        """Returns the auxiliary outputs of all layers of a stack, as shapes."""
        run, of_layer = partial(self._layer, stack, self._no_gradients(stack)), self._known_shapes(stack)
        _, aux = jax.eval_shape(run, of_layer, self._shapes[1])
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((stack.num_layers, *a.shape), a.dtype), aux)

    @cached_property
    def passes(self) -> dict[str, LayerPasses]:
        """The passes of a layer of each stack."""
        return {
            stack.name: split_passes(
                partial(self._layer, stack),
                stack.policy,
                self._no_gradients(stack),
                self._known_shapes(stack),
                self._shapes[1],
                cotangent=lambda aux: cotangent_of(aux, self.scale),
                recomputes=PipelineOp.RECOMPUTE in self.table.ops,
            )
            for stack in self.model.stacks
        }

    def begin(self) -> _State:
        """Returns the carry of the first tick. Buffers that an array is put in whether it is used or not have a slot
        more."""
        microbatch, x = self._shapes
        of_head = self.head.begin(x, microbatch)
        of_layers = {stack.name: zeros_of(self._aux_shapes(stack)) for stack in self.model.stacks}
        state: _State = {
            **of_head,
            "x": empty_buffer("x", x, self.lowered.num_x + 1),
            "auxiliary": of_layers | of_head["auxiliary"],
        }
        if self.scale is None:
            return state
        split = {name: by_dimensions(own.accumulators, num_before=1) for name, own in self.of_stacks.items()}
        state |= {
            "gradient": empty_buffer("gradient", x, self.lowered.num_gradients + 1),
            "dx": zeros_of(x),
            "of_vectors": {name: zeros_of(vectors) for name, (vectors, _) in split.items()},
            "of_matrices": {name: zeros_of(matrices) for name, (_, matrices) in split.items()},
            "of_embed": zeros_of(self.lookup.accumulators),
            "saved": self._buffers("saved", lambda passes: passes.saved, self.lowered.num_x),
        }
        if PipelineOp.RECOMPUTE in self.table.ops:
            state["kept"] = self._buffers("kept", lambda passes: passes.kept, self.lowered.num_residuals)
        if PipelineOp.WEIGHT_GRADIENT in self.table.ops:
            state["cut"] = self._buffers("cut", lambda passes: passes.cut, self.lowered.num_cuts)
        return state

    def _buffers(self, buffer: str, arrays: Callable[[LayerPasses], Any], num_slots: int) -> dict[str, Any]:
        """Returns the parts of a buffer for the layers of each stack."""
        return {
            name: empty_buffer(buffer, arrays(passes), num_slots, self.layers.room(name))
            for name, passes in self.passes.items()
        }

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

    def _slot(
        self, op: PipelineOp, run: Callable[[Counts, _State, _State, _Row], Any], state: _State, own: _Row
    ) -> Any:
        """Runs a slot, if this stage has one in this tick, by the kind of its chunk. It changes `state`, and returns
        what the slot sends."""
        has_head = op == PipelineOp.FORWARD and not self.head.is_shared
        written = {key: state[key] for key in (*_WRITES[op], *(self.head.writes if has_head else ())) if key in state}
        read = {key: value for key, value in state.items() if key not in written}
        x = self._shapes[1]
        sends = {PipelineOp.FORWARD: (x, x if "gradient" in state else None)}.get(op, x if op.takes_gradient else None)
        with jax.named_scope(slot_scope(op)):
            runs = [lambda written, counts=counts: run(counts, written, read, own) for counts in self.layers.kinds]
            made, sent = self.branches.run(own[COLUMN_OF[op]], runs, written, zeros_of(sends))
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

    def _forward(self, counts: Counts, state: _State, read: _State, own: _Row) -> tuple[_State, Any]:
        state, microbatch = dict(state), self.microbatch(own["forward_microbatch"])

        def embedded() -> Any:
            return self.model.embed(self.lookup, microbatch)[0]

        def one(stack: StackFunctions, carry: tuple[Any, Any, Any], layer: Array) -> tuple[Any, Any, Any]:
            x, saved, auxiliary = carry
            known = self._known(stack, microbatch, own["forward_chunk"], layer)
            if self.scale is None:
                y, aux = self._layer(stack, self._no_gradients(stack), known, x)
            else:
                (y, aux), made = self.passes[stack.name].forward(known, x)
                saved = write_layer(saved, made, own["x_of_forward"], layer)
            return y, saved, added_at(auxiliary, aux, known[-1])

        with jax.named_scope(end_scope("first")):
            y = either(own["forward_is_first"], embedded, lambda: read_slot(read["x"], own["x_of_forward"]))
        saved, auxiliary = dict(state.pop("saved", {})), dict(state["auxiliary"])
        for stack, count in self._stacks(counts):
            start = y, saved.get(stack.name), auxiliary[stack.name]
            y, saved[stack.name], auxiliary[stack.name] = _over_layers(stack, count, one, start)
        state["auxiliary"] = auxiliary
        # What layers saved stays out of this branch, which would copy it.
        no_gradient = None if self.scale is None else zeros_of(y)
        if self.head.is_shared:
            dy = no_gradient
        else:
            with jax.named_scope(end_scope("last")):
                run = lambda state: self.head.run(state, y, microbatch)  # noqa: E731
                state, dy = self.branches.run_if(own["forward_is_last"], run, state, no_gradient)
        return state | ({} if self.scale is None else {"saved": saved}), (y, dy)

    def _shared_head(self, y: Any, state: _State, own: _Row) -> Any:
        """Runs the head on all stages for the result `y` of the last virtual stage, if that has made one in this tick.
        Changes `state`, and returns the gradient of `y`."""
        written = {key: state[key] for key in self.head.writes if key in state}
        no_gradient = None if self.scale is None else zeros_of(y)
        with jax.named_scope(slot_scope(PipelineOp.FORWARD)), jax.named_scope(shared_end_scope("last")):
            run = lambda written: self.head.run(written, y, self.microbatch(own["head_microbatch"]))  # noqa: E731
            made, dy = self.branches.run_if(own["head"], run, written, no_gradient)
        state |= made
        return dy

    def _recompute(self, counts: Counts, state: _State, read: _State, own: _Row) -> tuple[_State, None]:
        microbatch, kept = self.microbatch(own["recompute_microbatch"]), dict(state["kept"])

        def one(stack: StackFunctions, kept: Any, layer: Array) -> Any:
            known = self._known(stack, microbatch, own["recompute_chunk"], layer)
            saved = read_layer(read["saved"][stack.name], own["x_of_recompute"], layer)
            made = self.passes[stack.name].recompute(known, saved)
            return write_layer(kept, made, own["residuals_of_recompute"], layer)

        for stack, count in self._stacks(counts):
            kept[stack.name] = _over_layers(stack, count, one, kept[stack.name])
        return {"kept": kept}, None

    def _backward(self, counts: Counts, state: _State, read: _State, own: _Row) -> tuple[_State, Any]:
        """Runs B, if the table has W, or BW. The cut and the gradients of weights are written layer by layer: stacked
        and then copied into their buffers, B would take twice its time."""
        microbatch, chunk = self.microbatch(own["backward_microbatch"]), own["backward_chunk"]
        splits = "cut" in state
        written = "cut" if splits else "of_matrices"
        buffer, slot = ("kept", "residuals_of_backward") if "kept" in read else ("saved", "x_of_backward")

        def one(stack: StackFunctions, carry: tuple[Any, Any, Any], layer: Array) -> tuple[Any, Any, Any]:
            dy, total, others = carry
            passes, known = self.passes[stack.name], self._known(stack, microbatch, chunk, layer)
            held, place = read_layer(read[buffer][stack.name], own[slot], layer), self._place(stack, chunk, layer)
            if splits:
                dx, vectors, cut = passes.input_gradient(known, held, dy)
                others = write_layer(others, cut, own["cut_of_backward"], layer)
            else:
                dx, (vectors, matrices) = passes.backward(known, held, dy)
                others = added_at(others, matrices, place)
            return dx, added_at(total, vectors, place), others

        dx, totals, others = read_slot(read["gradient"], own["gradient_of_backward"]), {}, {}
        for stack, count in reversed(self._stacks(counts)):
            start = dx, state["of_vectors"][stack.name], state[written][stack.name]
            dx, totals[stack.name], others[stack.name] = _over_layers(stack, count, one, start, reverse=True)
        state = state | {"of_vectors": state["of_vectors"] | totals, written: state[written] | others}

        def first(of_embed: Any) -> tuple[Any, None]:
            def run(embed: Any) -> Any:
                return self.model.embed(replace(self.lookup, accumulators=embed), microbatch)[0]

            (embed,) = jax.vjp(run, self.lookup.accumulators)[1](dx)
            return jax.tree.map(jnp.add, of_embed, embed), None

        with jax.named_scope(end_scope("first")):
            state["of_embed"], _ = self.branches.run_if(own["backward_is_first"], first, state["of_embed"], None)
        return state, dx

    def _weight_gradient(self, counts: Counts, state: _State, read: _State, own: _Row) -> tuple[_State, None]:
        microbatch, chunk = self.microbatch(own["weight_microbatch"]), own["weight_chunk"]
        totals, reads_saved = dict(state["of_matrices"]), "kept" not in read

        def one(stack: StackFunctions, total: Any, layer: Array) -> Any:
            known = self._known(stack, microbatch, chunk, layer)
            saved = read_layer(read["saved"][stack.name], own["x_of_weight"], layer) if reads_saved else []
            cut = read_layer(read["cut"][stack.name], own["cut_of_weight"], layer)
            matrices = self.passes[stack.name].weight_gradient(known, saved, cut)
            return added_at(total, matrices, self._place(stack, chunk, layer))

        for stack, count in self._stacks(counts):
            totals[stack.name] = _over_layers(stack, count, one, totals[stack.name])
        return {"of_matrices": totals}, None

    def _stacks(self, counts: Counts) -> list[tuple[StackFunctions, int]]:
        """Returns the stacks that a chunk has layers of, and how many."""
        return [(stack, count) for stack, count in zip(self.model.stacks, counts, strict=True) if count]

    def _place(self, stack: StackFunctions, chunk: Array, layer: Array) -> Array:
        """Returns the place of a chunk's layer among those of this stage."""
        return chunk * self.layers.room(stack.name) + layer

    def _known(
        self, stack: StackFunctions, microbatch: Microbatch, chunk: Array, layer: Array
    ) -> tuple[Any, Any, Array]:
        """Returns the weights of a layer, what all layers share, and the number of the layer in its stack."""
        own, placement = jax.lax.axis_index(STAGE), self.placement
        chunks, stages = range(placement.num_chunks), range(placement.num_stages)
        first = [[self.layers.first(stack.name, placement.virtual(s, c)) for c in chunks] for s in stages]
        working = read_slot(self.of_stacks[stack.name].working, self._place(stack, chunk, layer))
        return working, microbatch.layers, jnp.array(first)[own, chunk] + layer

    def _no_gradients(self, stack: StackFunctions) -> Any:
        """Returns zeros of the gradients of a layer."""
        accumulators = self.of_stacks[stack.name].accumulators
        return jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), accumulators)

    def _layer(
        self, stack: StackFunctions, accumulators: Any, known: tuple[Any, Any, Array], x: Any
    ) -> tuple[Any, Aux]:
        working, shared, index = known
        own = replace(self.of_stacks[stack.name], accumulators=accumulators, working=working)
        return stack.layer(own.gathered(), shared, index, x)


# What each changes of the carry, and no more: XLA brings all of it into the layout of the branch, and back.
_WRITES: dict[PipelineOp, Sequence[str]] = {
    PipelineOp.FORWARD: ("auxiliary", "saved"),
    PipelineOp.RECOMPUTE: ("kept",),
    PipelineOp.INPUT_GRADIENT: ("cut", "of_vectors", "of_embed"),
    PipelineOp.BACKWARD: ("of_matrices", "of_vectors", "of_embed"),
    PipelineOp.WEIGHT_GRADIENT: ("of_matrices",),
}


def _over_layers(
    stack: StackFunctions, count: int, one: Callable[..., Any], start: Any, *, reverse: bool = False
) -> Any:
    """Runs a function of the stack, a carry and the number of a layer in its chunk, once for each layer."""
    with jax.named_scope(piece_scope(stack.name)):
        run = lambda carry, layer: (one(stack, carry, layer), None)  # noqa: E731
        return jax.lax.scan(run, start, jnp.arange(count), reverse=reverse)[0]


def _permuted(tree: Any, pairs: list[tuple[int, int]]) -> Any:
    return jax.tree.map(lambda x: jax.lax.ppermute(x, STAGE, pairs), tree)


def _received(buffer: Any, arrived: list[tuple[str, Any]], own: _Row) -> Any:
    for column, value in arrived:
        buffer = write_slot(buffer, value, own[column])
    return buffer
