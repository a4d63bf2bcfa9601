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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from ..core.scopes import nested_scope
from ..parallel.remat import Policy
from .pipeline_buffers import Residual

# Calls of a program, whose operations belong to different passes.
_CALLS = frozenset({"checkpoint", "closed_call", "core_call", "jit", "pjit", "remat2"})

# (accumulators of the gradients of weights, known, x) -> (y, auxiliary outputs)
DifferentiatedLayer = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class LayerPasses:
    """The passes of a layer: functions of x, of lists of arrays, and of a tree `known` that begins with the weights.

    forward: (known, x) -> ((y, auxiliary outputs), saved). recompute: (known, saved) -> kept. backward: (known, held,
    dy) -> (dx, (vectors, matrices)). input_gradient: (known, held, dy) -> (dx, vectors, cut). weight_gradient: (known,
    saved, cut) -> matrices; it reads nothing of `saved` if what is recomputed is a pass of its own. vectors, matrices:
    gradients of weights of one dimension, and of more (`by_dimensions`). held: `kept` if what is recomputed is a pass
    of its own, else `saved`. saved, kept, cut: the arrays of each.
    """

    forward: Callable[[Any, Any], tuple[tuple[Any, Any], list[Array]]]
    recompute: Callable[[Any, list[Array]], list[Array]]
    backward: Callable[[Any, list[Array], Any], tuple[Any, tuple[list[Array], list[Array]]]]
    input_gradient: Callable[[Any, list[Array], Any], tuple[Any, list[Array], list[Array]]]
    weight_gradient: Callable[[Any, list[Array], list[Array]], list[Array]]
    saved: list[Residual]
    kept: list[Residual]
    cut: list[Residual]


def split_passes(
    layer: DifferentiatedLayer,
    policy: Policy,
    accumulators: Any,
    known: Any,
    x: Any,
    *,
    cotangent: Callable[[Any], Any],
    recomputes: bool,
) -> LayerPasses:
    """Returns the passes of a layer that is differentiated by `accumulators` and x, with arguments of these shapes.

    cotangent: from the shapes of the auxiliary outputs, what their derivatives are multiplied by; it is the same in all
    passes. recomputes: whether what is computed again is a pass of its own.
    """
    saving, found = jax.checkpoint(layer, policy=policy, prevent_cse=False), dict[str, Any]()

    def arguments(known: Any, *of_x: Any) -> list[Any]:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), accumulators)
        return jax.tree.leaves((known, zeros, *of_x))

    def forward(known: Any, accumulators: Any, x: Any) -> tuple[Any, list[Any]]:
        made, pull_back = jax.vjp(lambda accumulators, x: saving(accumulators, known, x), accumulators, x)
        residuals, found["pull_back"] = jax.tree.flatten(pull_back)
        return made, residuals

    traced, (made, residuals) = jax.make_jaxpr(forward, return_shape=True)(known, accumulators, x)
    num_known, structure = len(jax.tree.leaves((known, accumulators))), jax.tree.structure(made)

    def pull_back(dy: Any, *residuals: Any) -> tuple[Any, Any]:
        dw, dx = jax.tree.unflatten(found["pull_back"], residuals)((dy, cotangent(made[1])))
        return dx, dw

    pulled, gradients = jax.make_jaxpr(pull_back, return_shape=True)(made[0], *residuals)
    of_x = jax.tree.structure(gradients[0])
    backward = _Program.of(_inlined(pulled))

    # A residual is an argument that a later pass has, a constant of the program, or saved.
    inputs, outputs = traced.jaxpr.invars, traced.jaxpr.outvars[structure.num_leaves :]
    place = {var: at for at, var in enumerate(inputs[:num_known])}
    constants = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    saved = list(dict.fromkeys(v for v in outputs if isinstance(v, Var) and v not in place and v not in constants))
    saved_at = {var: at for at, var in enumerate(saved)}
    num_dy = len(jax.tree.leaves(made[0]))
    sources = dict(zip(backward.inputs[num_dy:], outputs, strict=True))

    def values(variables: Sequence[Var], known: Any, held: dict[Var, Any]) -> list[Any]:
        """Returns the values of variables of the backward program."""
        leaves = arguments(known)

        def value(var: Var) -> Any:
            if var in held or var in backward.constants:
                return held[var] if var in held else backward.constants[var]
            source = sources[var]
            if isinstance(source, Literal):
                return source.val
            return leaves[place[source]] if source in place else constants[source]

        return [value(var) for var in variables]

    of_saved = [var for var, source in sources.items() if isinstance(source, Var) and source in saved_at]

    def restored(saved: list[Array]) -> dict[Var, Any]:
        return {var: saved[saved_at[sources[var]]] for var in of_saved}

    dy_vars = backward.inputs[:num_dy]
    dx_vars, dw_vars = backward.outputs[: of_x.num_leaves], backward.outputs[of_x.num_leaves :]
    vectors = [var for var in dw_vars if var.aval.ndim < 2]
    matrices = [var for var in dw_vars if var.aval.ndim >= 2]
    num_weights = len(jax.tree.leaves(known[0]))
    given = [var for var, source in sources.items() if isinstance(source, Literal) or source in place]
    weights = [var for var in given if place.get(sources[var], num_weights) < num_weights]
    again = backward.made_of(weights, given)
    first = backward.independent_of(dy_vars) - again if recomputes else frozenset[int]()
    in_b = backward.leading_to([*dx_vars, *vectors]) - first - again
    in_w = backward.leading_to(matrices) - in_b - first - again

    def free(of: frozenset[int], results: Sequence[Any]) -> list[Var]:
        """Returns what a part of the program reads, and results that it does not make, if it has to be held."""
        read = backward.read_by(of | again, results)
        return [var for var in read if var not in backward.constants and (var not in sources or var in set(of_saved))]

    in_slot = set[Var]() if recomputes else set(of_saved)
    cut = [var for var in free(in_w, matrices) if var not in in_slot]
    kept = [var for var in free(in_b, [*dx_vars, *vectors, *cut]) if var not in set(dy_vars)]
    kept = kept if recomputes else of_saved

    def held(arrays: list[Array]) -> dict[Var, Any]:
        return dict(zip(kept, arrays, strict=True)) if recomputes else restored(arrays)

    def with_dy(known: Any, arrays: list[Array], dy: Any, of: frozenset[int], results: list[Any]) -> list[Any]:
        there = held(arrays) | dict(zip(dy_vars, jax.tree.leaves(dy), strict=True))
        return backward.run(of | again, results, lambda variables: values(variables, known, there))

    def run_forward(known: Any, x: Any) -> tuple[tuple[Any, Any], list[Array]]:
        out = jaxpr_as_fun(traced)(*arguments(known, x))
        residuals = zip(outputs, out[structure.num_leaves :], strict=True)
        of = {var: value for var, value in residuals if isinstance(var, Var)}
        return structure.unflatten(out[: structure.num_leaves]), [of[var] for var in saved]

    def run_recompute(known: Any, saved: list[Array]) -> list[Array]:
        return backward.run(first | again, kept, lambda variables: values(variables, known, restored(saved)))

    def run_backward(known: Any, arrays: list[Array], dy: Any) -> tuple[Any, tuple[list[Array], list[Array]]]:
        out = iter(with_dy(known, arrays, dy, in_b | in_w, [*dx_vars, *vectors, *matrices]))
        dx, of_vectors, of_matrices = (list(islice(out, len(each))) for each in (dx_vars, vectors, matrices))
        return of_x.unflatten(dx), (of_vectors, of_matrices)

    def run_input_gradient(known: Any, arrays: list[Array], dy: Any) -> tuple[Any, list[Array], list[Array]]:
        out = iter(with_dy(known, arrays, dy, in_b, [*dx_vars, *vectors, *cut]))
        dx, of_vectors, of_cut = (list(islice(out, len(each))) for each in (dx_vars, vectors, cut))
        return of_x.unflatten(dx), of_vectors, of_cut

    def run_weight_gradient(known: Any, saved: list[Array], arrays: list[Array]) -> list[Array]:
        there = dict(zip(cut, arrays, strict=True)) | ({} if recomputes else restored(saved))
        return backward.run(in_w | again, matrices, lambda variables: values(variables, known, there))

    return LayerPasses(
        run_forward,
        run_recompute,
        run_backward,
        run_input_gradient,
        run_weight_gradient,
        *([_held(var.aval) for var in each] for each in (saved, kept, cut)),
    )


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
            with _scope_of(equation), equation.ctx.manager:
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

    shapes = [_shape_of(var) for var in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *arguments: run(closed.jaxpr, closed.consts, arguments))(*shapes)


def _scope_of(equation: JaxprEqn) -> AbstractContextManager[Any]:
    own = str(equation.source_info.name_stack)
    return jax.named_scope(nested_scope("", own)) if own else nullcontext()


def _held(aval: Any) -> Residual:
    return Residual(aval.shape, aval.dtype, is_on_host=aval.memory_space == jax.memory.Space.Host)


def _shape_of(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
