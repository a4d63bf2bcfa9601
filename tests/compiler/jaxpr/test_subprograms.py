"""The programs that equations of a jaxpr call, and how often: against programs that count."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshloom.compiler.jaxpr.program import Program
from meshloom.compiler.jaxpr.read_jaxpr import read_jaxpr
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


def once(count):
    return count + 1.0


def same(count):
    return count


def scanned(predicate, *, reverse=False):
    def trip(count, t):
        return lax.cond(predicate(t), once, same, count), None

    return lambda count: lax.scan(trip, count, jnp.arange(1, 8), reverse=reverse)[0]


def counted(predicate):
    """The number of a trip is carried, and begins at 2."""
    return lambda count: lax.fori_loop(2, 9, lambda i, count: lax.cond(predicate(i), once, same, count), count)


def two_loops(count):
    """The inner loop counts in 0, 1, 2, .. of its trips."""

    def outer(count, t):
        inner = lambda count, s: (lax.cond(s < t, once, same, count), None)  # noqa: E731
        return lax.scan(inner, count, jnp.arange(5))[0], None

    return lax.scan(outer, count, jnp.arange(4))[0]


def a_counter_beside_reversed_rows(count):
    """The rows come from the end, while the counter goes up: they meet in one trip of five."""

    def trip(carry, row):
        i, count = carry
        return (i + 1, lax.cond(i == row, once, same, count)), None

    return lax.scan(trip, (0, count), jnp.arange(5), reverse=True)[0][1]


TABLE = np.arange(20).reshape(5, 4) * 7 % 5 % 2


def rows_of_a_table(count):
    """The scan takes a row for each trip; the condition is in the column that the trip before it names."""

    def trip(carry, row):
        i, count = carry
        return (i + 1, lax.cond(row[i - 2] > 0, once, same, count)), None

    return lax.scan(trip, (0, count), jnp.asarray(TABLE))[0][1]


PROGRAMS = {
    "first trips": scanned(lambda t: t < 3),
    "all trips": scanned(lambda t: t > 0),
    "no trip": scanned(lambda t: t > 7),
    "every second": scanned(lambda t: t % 2 == 0, reverse=True),
    "either of two": scanned(lambda t: jnp.logical_or(jnp.minimum(t, 5) == 5, t == 1)),
    "a long computation": scanned(lambda t: reduce(lambda x, _: (x * x + x) % 7, range(40), t) == 2),
    "a counter": counted(lambda i: i % 3 == 0),
    "a quotient": counted(lambda i: i // 2 == 3),
    "two loops": two_loops,
    "reversed rows": a_counter_beside_reversed_rows,
    "in a branch": lambda count: lax.fori_loop(
        0, 9, lambda i, c: lax.cond(i > 3, lambda: lax.cond(i < 6, once, same, c), lambda: c), count
    ),
    "rows of a table": rows_of_a_table,
    "places in a table": lambda count: scanned(lambda t: jnp.asarray(TABLE)[t % 5, 2 * t - 6] > 0)(count),
    "a part of a table": scanned(lambda t: jnp.asarray(TABLE)[1:4, ::2][t // 3, 1] > 0),
    "a table of a function that is compiled": lambda count: jax.jit(rows_of_a_table)(count),
    "a platform": lambda count: lax.platform_dependent(count, cpu=once, default=same),
}


def executions(program: Program, times: float = 1.0) -> float:
    """How often a float is added to."""
    own = sum(times for one in program.operations if one.name == "add" and program.dtypes[one.outputs[0]] == "float32")
    assert not any(one.unknown for one in program.operations)
    bodies = (body for one in program.operations for body in one.bodies)
    return own + sum(executions(body.program, times * body.executions[0]) for body in bodies)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_branch_is_counted_as_often_as_it_runs(name):
    program = PROGRAMS[name]
    traced = jax.make_jaxpr(program)(0.0)
    read = read_jaxpr(traced.jaxpr, [()], {}, platform="cpu", consts=traced.consts)
    assert executions(read) == pytest.approx(float(program(0.0)))
