"""What the equations of a jaxpr call, as versions of JAX write it."""

import jax
import jax.numpy as jnp

from meshloom.compiler.jaxpr.subprograms import scan_of, subprograms

TRIPS = 3


def _scaled_sums(scale, total, start, rows):
    """A constant, two carried, a row for each trip; two carried, one stacked."""

    def trip(carry, row):
        total, last = carry
        return (total + scale * row + last, jnp.sin(last)), total * row

    return jax.lax.scan(trip, (total, start), rows)


ARGUMENTS = (*(jnp.ones(4) for _ in range(3)), jnp.ones((TRIPS, 4)))


def _scan(function, *arguments):
    (equation,) = (e for e in jax.make_jaxpr(function)(*arguments).jaxpr.eqns if e.primitive.name == "scan")
    return equation, scan_of(equation.params)


def test_a_scans_constants_what_it_carries_and_its_trips_are_told_apart():
    equation, scan = _scan(_scaled_sums, *ARGUMENTS)
    assert (scan.num_consts, scan.num_carried, scan.num_trips) == (1, 2, TRIPS)
    sliced = equation.invars[scan.num_consts + scan.num_carried :]
    stacked = equation.outvars[scan.num_carried :]
    assert [x.aval.shape for x in (*sliced, *stacked)] == [(TRIPS, 4)] * 2
    assert [x.aval.shape for x in (*scan.body.invars, *scan.body.outvars)] == [(4,)] * 7  # type: ignore[attr-defined]


def test_a_scan_with_its_derivative_has_each_argument_twice():
    equation, scan = _scan(lambda *x: jax.jvp(_scaled_sums, x, x), *ARGUMENTS)
    first = scan.num_consts + scan.num_carried
    assert scan.num_carried == 4
    assert [x.aval.shape for x in equation.invars[first:]] == [(TRIPS, 4)] * 2
    assert [x.aval.shape for x in equation.outvars[scan.num_carried :]] == [(TRIPS, 4)] * 2
    assert len(scan.body.invars) == len(equation.invars)


def test_each_branch_and_each_function_that_is_called_is_found():
    chosen = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, jnp.sin, jax.jit(lambda x: x * 2), x))(1.0).jaxpr
    assert [len(list(subprograms(e.params))) for e in chosen.eqns if e.primitive.name == "cond"] == [2]
