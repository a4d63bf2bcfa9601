"""Cuts the passes of a layer apart: what the forward pass saves, what is computed again, and the two gradients.

    F   x                 -> y, saved              what the remat policy of the layer selects, its input at least
    R   saved             -> kept                  all that does not depend on dy
    B   saved or kept, dy -> dx, vectors, cut      what dx depends on, and gradients of vectors
    W   saved, cut        -> matrices              the other operations
    BW  saved or kept, dy -> dx, vectors, matrices

The derivative that JAX makes is one program of operations; B is those that lead to dx, and W the rest. `known`, the
arguments that a later pass has anyway (weights, what all layers share, the number of the layer), is never saved. What
is made of weights alone, such as a gathered one, is not saved either: each part that reads it makes it again.
What F saved stays where it is until W; what R kept is in the cut, if W reads it: most of it is for B alone.
Gradients of vectors are made in B, because each of them reads arrays as large as x in float32: of a layer of Llama the
cut is 14 times as large as x, and with them it would be 22 times.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from ..core.scopes import nested_scope
from ..parallel.remat import Policy
from .pipeline_state import Residual

# Calls of a program, whose operations belong to different passes.
_CALLS = frozenset({"checkpoint", "closed_call", "core_call", "jit", "pjit", "remat2"})

# (accumulators of the gradients of weights, known, x) -> (y, auxiliary outputs)
DifferentiatedLayer = Callable[[Any, Any, Any], tuple[Any, Any]]


def split_passes(
    layer: DifferentiatedLayer,
    policy: Policy,
    accumulators: Any,
    known: Any,
    x: Any,
    *,
    cotangent: Callable[[Any], Any],
    recomputes: bool,
) -> "LayerPasses":
    """Returns the passes of a layer that is differentiated by `accumulators` and x, with arguments of these shapes.

    cotangent: from the shapes of the auxiliary outputs, what their derivatives are multiplied by; it is the same in all
    passes. recomputes: whether what is computed again is a pass of its own.
    """
    saving = jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def forward(known: Any, accumulators: Any, x: Any) -> tuple[Any, list[Any], Any]:
        made, pull_back = jax.vjp(lambda accumulators, x: saving(accumulators, known, x), accumulators, x)
        residuals, structure = jax.tree.flatten(pull_back)
        return made, residuals, _Static(structure)

    traced, (made, residuals, of_pull_back) = jax.make_jaxpr(forward, return_shape=True)(known, accumulators, x)

    def pull_back(dy: Any, *residuals: Any) -> tuple[Any, Any]:
        dw, dx = jax.tree.unflatten(of_pull_back.value, residuals)((dy, cotangent(made[1])))
        return dx, dw

    pulled, (dx, _) = jax.make_jaxpr(pull_back, return_shape=True)(made[0], *residuals)
    num_known = len(jax.tree.leaves((known, accumulators)))
    saved = _Forward(traced, accumulators, jax.tree.structure(made), num_known)
    cut = BackwardCut(
        _Program.of(_inlined(pulled)),
        saved,
        num_dy=len(jax.tree.leaves(made[0])),
        num_dx=len(jax.tree.leaves(dx)),
        num_weights=len(jax.tree.leaves(known[0])),
        recomputes=recomputes,
    )
    return LayerPasses(saved, cut, jax.tree.structure(dx))


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """A value that leaves a trace as it is."""

    value: Any


@dataclass(frozen=True)
class _Forward:
    """The forward pass of a layer, with the residuals that its derivative reads.

    traced: (known, accumulators, x) -> (y, auxiliary outputs), residuals. structure: the tree of what comes before the
    residuals. num_known: the inputs before x.
    """

    traced: ClosedJaxpr
    accumulators: Any
    structure: Any
    num_known: int

    @cached_property
    def residuals(self) -> list[Any]:
        return self.traced.jaxpr.outvars[self.structure.num_leaves :]

    @cached_property
    def place(self) -> dict[Var, int]:
        """Returns the arguments that a later pass has anyway, with their places."""
        return {var: at for at, var in enumerate(self.traced.jaxpr.invars[: self.num_known])}

    @cached_property
    def constants(self) -> dict[Var, Any]:
        return dict(zip(self.traced.jaxpr.constvars, self.traced.consts, strict=True))

    @cached_property
    def saved(self) -> list[Var]:
        """Returns the residuals that are neither such arguments nor constants."""
        there = self.place.keys() | self.constants.keys()
        return list(dict.fromkeys(v for v in self.residuals if isinstance(v, Var) and v not in there))

    def arguments(self, known: Any, *of_x: Any) -> list[Any]:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.accumulators)
        return jax.tree.leaves((known, zeros, *of_x))

    def run(self, known: Any, x: Any) -> tuple[Any, list[Array]]:
        out = jaxpr_as_fun(self.traced)(*self.arguments(known, x))
        num_made = self.structure.num_leaves
        of = {v: value for v, value in zip(self.residuals, out[num_made:], strict=True) if isinstance(v, Var)}
        return self.structure.unflatten(out[:num_made]), [of[var] for var in self.saved]


@dataclass(frozen=True)
class BackwardCut:
    """The derivative of a layer, cut into parts: sets of its operations, and the variables that cross between them.

    backward: (dy, residuals) -> (dx, gradients of weights). num_dy, num_dx: the arrays of each. num_weights: the
    weights, which are the first arguments that each pass has. recomputes: whether R is a pass of its own.
    """

    backward: "_Program"
    forward: _Forward
    num_dy: int
    num_dx: int
    num_weights: int
    recomputes: bool

    @cached_property
    def dy(self) -> list[Var]:
        return self.backward.inputs[: self.num_dy]

    @cached_property
    def dx(self) -> list[Any]:
        return self.backward.outputs[: self.num_dx]

    @cached_property
    def vectors(self) -> list[Any]:
        return [var for var in self.backward.outputs[self.num_dx :] if var.aval.ndim < 2]

    @cached_property
    def matrices(self) -> list[Any]:
        return [var for var in self.backward.outputs[self.num_dx :] if var.aval.ndim >= 2]

    @cached_property
    def sources(self) -> dict[Var, Any]:
        """Returns the residual that each input of the backward program is."""
        return dict(zip(self.backward.inputs[self.num_dy :], self.forward.residuals, strict=True))

    @cached_property
    def of_saved(self) -> list[Var]:
        """Returns the inputs that F saves."""
        saved = set(self.forward.saved)
        return [var for var, source in self.sources.items() if isinstance(source, Var) and source in saved]

    @cached_property
    def again(self) -> frozenset[int]:
        """Returns the operations on weights alone, which each part does again."""
        place, sources = self.forward.place, self.sources
        given = [var for var, source in sources.items() if isinstance(source, Literal) or source in place]
        weights = [v for v in given if isinstance(sources[v], Var) and place[sources[v]] < self.num_weights]
        return self.backward.made_of(weights, given)

    @cached_property
    def in_r(self) -> frozenset[int]:
        return self.backward.independent_of(self.dy) - self.again if self.recomputes else frozenset[int]()

    @cached_property
    def in_b(self) -> frozenset[int]:
        return self.backward.leading_to([*self.dx, *self.vectors]) - self.in_r - self.again

    @cached_property
    def in_w(self) -> frozenset[int]:
        return self.backward.leading_to(self.matrices) - self.in_b - self.in_r - self.again

    @cached_property
    def crossing(self) -> list[Var]:
        """Returns what W reads of other parts, without what stays in the slot of F."""
        in_slot = set[Var]() if self.recomputes else set(self.of_saved)
        return [var for var in self._held_for(self.in_w, self.matrices) if var not in in_slot]

    @cached_property
    def kept(self) -> list[Var]:
        """Returns what R hands on, or what F saves if R is no pass."""
        if not self.recomputes:
            return self.of_saved
        read = self._held_for(self.in_b, [*self.dx, *self.vectors, *self.crossing])
        return [var for var in read if var not in set(self.dy)]

    def _held_for(self, part: frozenset[int], results: Sequence[Any]) -> list[Var]:
        """Returns what a part of the program reads, and results that it does not make, if it has to be held."""
        read, sources, held = self.backward.read_by(part | self.again, results), self.sources, set(self.of_saved)
        return [var for var in read if var not in self.backward.constants and (var not in sources or var in held)]

    def restored(self, saved: list[Array]) -> dict[Var, Any]:
        """Returns what F saved, by the inputs that it is."""
        of = dict(zip(self.forward.saved, saved, strict=True))
        return {var: of[self.sources[var]] for var in self.of_saved}

    def run(self, part: frozenset[int], results: Sequence[Any], known: Any, held: dict[Var, Any]) -> list[Any]:
        """Returns results of a part, from the arguments that each pass has and what is held for it."""
        leaves, forward = self.forward.arguments(known), self.forward

        def value(var: Var) -> Any:
            if var in held or var in self.backward.constants:
                return held[var] if var in held else self.backward.constants[var]
            source = self.sources[var]
            if isinstance(source, Literal):
                return source.val
            return leaves[forward.place[source]] if source in forward.place else forward.constants[source]

        return self.backward.run(part | self.again, results, lambda variables: list(map(value, variables)))


@dataclass(frozen=True)
class LayerPasses:
    """The passes of a layer, on x, lists of arrays, and a tree `known` that begins with the weights.

    held: `kept` if what is recomputed is a pass of its own, else `saved`. Gradients of weights are lists of those of
    one dimension, `vectors`, and of more, `matrices` (`by_dimensions`).
    """

    _forward: _Forward
    _cut: BackwardCut
    _of_x: Any

    @property
    def saved(self) -> list[Residual]:
        return [_held(var.aval) for var in self._forward.saved]

    @property
    def kept(self) -> list[Residual]:
        return [_held(var.aval) for var in self._cut.kept]

    @property
    def cut(self) -> list[Residual]:
        return [_held(var.aval) for var in self._cut.crossing]

    def forward(self, known: Any, x: Any) -> tuple[tuple[Any, Any], list[Array]]:
        """Returns ((y, auxiliary outputs), saved)."""
        return self._forward.run(known, x)

    def recompute(self, known: Any, saved: list[Array]) -> list[Array]:
        """Returns `kept`."""
        return self._cut.run(self._cut.in_r, self._cut.kept, known, self._cut.restored(saved))

    def backward(self, known: Any, held: list[Array], dy: Any) -> tuple[Any, tuple[list[Array], list[Array]]]:
        """Returns (dx, (vectors, matrices))."""
        cut = self._cut
        dx, vectors, matrices = self._with_dy(known, held, dy, cut.in_b | cut.in_w, cut.matrices)
        return dx, (vectors, matrices)

    def input_gradient(self, known: Any, held: list[Array], dy: Any) -> tuple[Any, list[Array], list[Array]]:
        """Returns (dx, vectors, cut)."""
        return self._with_dy(known, held, dy, self._cut.in_b, self._cut.crossing)

    def weight_gradient(self, known: Any, saved: list[Array], cut: list[Array]) -> list[Array]:
        """Returns the matrices. It reads nothing of `saved` if what is recomputed is a pass of its own."""
        of_slot = {} if self._cut.recomputes else self._cut.restored(saved)
        there = dict(zip(self._cut.crossing, cut, strict=True)) | of_slot
        return self._cut.run(self._cut.in_w, self._cut.matrices, known, there)

    def _with_dy(
        self, known: Any, held: list[Array], dy: Any, part: frozenset[int], others: list[Any]
    ) -> tuple[Any, list[Array], list[Array]]:
        """Returns dx, the gradients of vectors and other results of a part that depends on dy."""
        cut = self._cut
        of_held = dict(zip(cut.kept, held, strict=True)) if cut.recomputes else cut.restored(held)
        there = of_held | dict(zip(cut.dy, jax.tree.leaves(dy), strict=True))
        out = iter(cut.run(part, [*cut.dx, *cut.vectors, *others], known, there))
        dx, vectors, rest = (list(islice(out, len(each))) for each in (cut.dx, cut.vectors, others))
        return self._of_x.unflatten(dx), vectors, rest


def by_dimensions(tree: Any, num_before: int = 0) -> tuple[list[Any], list[Any]]:
    """Returns the leaves of weights, or of their gradients, that are vectors, and the others. num_before: dimensions
    before those of a weight."""
    leaves = jax.tree.leaves(tree)
    vectors = [leaf for leaf in leaves if leaf.ndim - num_before < 2]
    return vectors, [leaf for leaf in leaves if leaf.ndim - num_before >= 2]


def rejoined(tree: Any, vectors: list[Any], matrices: list[Any], num_before: int = 0) -> Any:
    """Returns the tree that `by_dimensions` took apart, with these leaves. tree: one like it."""
    of = {True: iter(vectors), False: iter(matrices)}
    return jax.tree.map(lambda leaf: next(of[leaf.ndim - num_before < 2]), tree)


@dataclass(frozen=True)
class _Program:
    """A program without calls, of which parts are run: sets of the numbers of its operations."""

    jaxpr: Jaxpr
    constants: dict[Var, Any]

    @staticmethod
    def of(closed: ClosedJaxpr) -> "_Program":
        return _Program(closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)))

    @property
    def inputs(self) -> list[Var]:
        return list(self.jaxpr.invars)

    @property
    def outputs(self) -> list[Any]:
        return list(self.jaxpr.outvars)

    def leading_to(self, results: Sequence[Any]) -> frozenset[int]:
        """Returns the operations that results depend on."""
        needed, found = set(_variables(results)), set[int]()
        for at in reversed(range(len(self.jaxpr.eqns))):
            if needed & set(self.jaxpr.eqns[at].outvars):
                found.add(at)
                needed |= set(_variables(self.jaxpr.eqns[at].invars))
        return frozenset(found)

    def independent_of(self, inputs: Sequence[Var]) -> frozenset[int]:
        """Returns the operations that do not depend on inputs."""
        dependent, found = set(inputs), set[int]()
        for at, equation in enumerate(self.jaxpr.eqns):
            if dependent & set(_variables(equation.invars)):
                dependent |= set(equation.outvars)
            else:
                found.add(at)
        return frozenset(found)

    def made_of(self, some: Sequence[Var], given: Sequence[Var]) -> frozenset[int]:
        """Returns the operations that depend on some of the given inputs, and on no other inputs, with all that lead to
        them."""
        known, dependent = {*given, *self.constants}, set(some)
        for equation in self.jaxpr.eqns:
            if known.issuperset(read := set(_variables(equation.invars))):
                known.update(equation.outvars)
                dependent.update(equation.outvars if dependent & read else ())
        return self.leading_to([*dependent])

    def made_by(self, part: frozenset[int]) -> set[Any]:
        """Returns the results of a part."""
        return {var for at in part for var in self.jaxpr.eqns[at].outvars}

    def read_by(self, part: frozenset[int], results: Sequence[Any]) -> list[Var]:
        """Returns what a part reads and does not make, to make these results."""
        made = self.made_by(part)
        read = [var for at in sorted(part) for var in _variables(self.jaxpr.eqns[at].invars)]
        return [var for var in dict.fromkeys([*read, *_variables(results)]) if var not in made]

    def run(self, part: frozenset[int], results: Sequence[Any], values: Callable[[list[Var]], list[Any]]) -> list[Any]:
        """Returns results of a part. values: of what it reads."""
        part &= self.leading_to(results)
        read = self.read_by(part, results)
        own = self.jaxpr.replace(
            constvars=[],
            invars=read,
            outvars=list(results),
            eqns=[self.jaxpr.eqns[at] for at in sorted(part)],
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )
        return jaxpr_as_fun(ClosedJaxpr(own, []))(*values(read))


def _variables(atoms: Sequence[Any]) -> Iterator[Var]:
    return (atom for atom in atoms if not isinstance(atom, Literal))


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with the operations of the programs that it calls in their place, with the calls' scopes."""

    def run(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        made: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

        def values(atoms: Sequence[Any]) -> list[Any]:
            return [atom.val if isinstance(atom, Literal) else made[atom] for atom in atoms]

        for equation in jaxpr.eqns:
            own = str(equation.source_info.name_stack)
            with jax.named_scope(nested_scope("", own)) if own else nullcontext(), equation.ctx.manager:
                results = operate(equation, values(equation.invars))
            made.update(zip(equation.outvars, results, strict=True))
        return values(jaxpr.outvars)

    def operate(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if equation.primitive.name in _CALLS:
            called = next(each for each in equation.params.values() if isinstance(each, Jaxpr | ClosedJaxpr))
            is_closed = isinstance(called, ClosedJaxpr)
            return run(called.jaxpr if is_closed else called, called.consts if is_closed else [], operands)
        primitive: Any = equation.primitive
        results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
        return results if primitive.multiple_results else [results]

    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *arguments: run(closed.jaxpr, closed.consts, arguments))(*shapes)


def _held(aval: Any) -> Residual:
    return Residual(aval.shape, aval.dtype, is_on_host=aval.memory_space == jax.memory.Space.Host)
