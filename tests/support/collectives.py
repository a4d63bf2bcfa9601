"""Counts the collectives of a traced step, of a compiled program's text, and of a trace."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData

from meshloom.compiler.jaxpr.subprograms import scan_of, subprograms, without_consts
from meshloom.compiler.plan import Plan
from meshloom.compiler.sharding.batch import batch_arrays
from meshloom.compiler.step.train_step import build_train_step
from meshloom.compiler.xla.programs import Programs
from support.programs import on_devices

WRITTEN = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "psum": "all-reduce",
           "psum_invariant": "all-reduce", "all_to_all": "all-to-all", "ppermute": "collective-permute"}  # fmt: skip


def written_collectives(plan: Plan) -> tuple[Counter[str], Counter[str]]:
    """Returns how many collectives the train step itself asks for and the elements of their results on a device, by
    kind, loop bodies once per trip, all branches, without scalars. Nothing is compiled: what a partitioner adds along
    the axes that are left to it is not in it."""
    shape = (plan.spec.global_batch_size, plan.spec.sequence_length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in batch_arrays(plan.spec)}
    with jax.set_mesh(plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])):
        traced = jax.make_jaxpr(build_train_step(plan))(plan.abstract, batch)
    counts, elements = Counter[str](), Counter[str]()
    for kind, size, trips in _each_written(without_consts(traced), 1):
        counts[kind] += trips
        elements[kind] += trips * size
    return counts, elements


def _each_written(jaxpr: Any, trips: int) -> Iterator[tuple[str, int, int]]:
    for equation in jaxpr.eqns:
        if kind := WRITTEN.get(equation.primitive.name):
            yield from ((kind, x.aval.size, trips) for x in equation.outvars if x.aval.size > 1)
        elif equation.primitive.name == "scan":
            scan = scan_of(equation.params)
            yield from _each_written(scan.body, trips * scan.num_trips)
        else:
            for inner in subprograms(equation.params):
                yield from _each_written(inner, trips)


_COLLECTIVE = re.compile(r" = (?P<type>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")  # fmt: skip  # noqa: E501

_CALLED = re.compile(r"(?:body|condition|calls|to_apply|(?:true|false)_computation|branch_computations)=(\{.*?\}|\S+)")


def collectives_per_step(hlo: str, *, at_least_elements: int = 2) -> Counter[str]:
    """Collectives by kind that a compiled program runs, one for each array, loop bodies once per trip, all branches.

    Scalars are left out: the loss and the squares of the gradient norm are summed whatever the layout.
    """
    counts: Counter[str] = Counter()
    for kind, sizes, trips in _each_collective(hlo):
        counts[kind] += trips * sum(size >= at_least_elements for size in sizes)
    return counts


def collective_elements_per_step(hlo: str) -> Counter[str]:
    """Elements of their results, by kind, likewise."""
    elements: Counter[str] = Counter()
    for kind, sizes, trips in _each_collective(hlo):
        elements[kind] += trips * sum(size for size in sizes if size > 1)
    return elements


def collectives_run(programs: Programs, tokens: np.ndarray, folder: Path) -> Counter[str]:
    """Collectives by kind that a CPU device runs in a step, by the runtime's own trace: branches where they are taken.

    folder: for the trace.
    """
    state, batch = programs["init"](), on_devices(programs, tokens)
    with jax.profiler.trace(folder):
        jax.block_until_ready(programs["train"](state, batch))
    trace = ProfileData.from_file(str(next(folder.rglob("*.xplane.pb"))))
    events = Counter(event.name for plane in trace.planes for line in plane.lines for event in line.events)
    counts: Counter[str] = Counter()
    for name, _, kind, _ in re.findall(rf"%?([\w.\-]+){_COLLECTIVE.pattern}", programs["train"].as_text()):
        counts[kind] += events[name]
    return Counter({kind: count // jax.device_count() for kind, count in counts.items()})


def largest_outside_loops(hlo: str, kind: str) -> int:
    """Elements of the largest array of this kind of collective that no loop runs."""
    return max(max(sizes) for each, sizes, trips in _each_collective(hlo) if each == kind and trips == 1)


def _each_collective(hlo: str) -> Iterator[tuple[str, list[int], int]]:
    """(kind, elements of each array of its result, times that it is run)."""
    computations = {m[1]: m[2] for m in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S)}
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.M)
    assert entry

    def visit(name: str, trips: int) -> Iterator[tuple[str, list[int], int]]:
        for line in computations.get(name, "").splitlines():
            if match := _COLLECTIVE.search(line):
                shapes = re.findall(r"\w+\[([\d,]*)\]", match["type"])
                sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
                # The operands of an all-to-all are the parts of one array.
                yield match["kind"], [sum(sizes)] if match["kind"] == "all-to-all" else sizes, trips
                continue
            inner = trips
            if " while(" in line:
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                assert known, line
                inner = trips * int(known[1])
            for called in re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(line))):
                yield from visit(called, inner)

    yield from visit(entry[1], 1)
