"""Reads the train step as operations on values.

It traces the same function that is compiled later (train_step.py) over the abstract mesh, so an estimate describes the
program that runs.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from ..jaxpr.program import Program
from ..jaxpr.read_jaxpr import layout_of, read_jaxpr
from ..plan import Plan
from ..sharding.batch import batch_arrays
from ..step.train_step import build_train_step


def read_step(plan: Plan) -> Program:
    """Traces the plan's train step and reads it. Inputs: the leaves of the state, then those of the batch."""
    shape = (plan.spec.global_batch_size, plan.spec.sequence_length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in batch_arrays(plan.spec)}
    # Shards of whole tiles and others are to be the same operations: tune compares the traces of meshes.
    weights = jax.tree.map(lambda each: replace(each, tile_rows=1), plan.weights)
    step = build_train_step(replace(plan, weights=weights))
    with jax.sharding.use_abstract_mesh(plan.mesh.abstract()):
        traced = jax.make_jaxpr(step)(plan.abstract, batch)
    is_spec = lambda node: isinstance(node, jax.sharding.PartitionSpec)  # noqa: E731
    specs = jax.tree.leaves(plan.specs, is_leaf=is_spec)
    specs += [plan.roles.tokens_spec] * len(batch)
    layouts = [layout_of(spec, len(x.aval.shape)) for spec, x in zip(specs, traced.jaxpr.invars, strict=True)]
    joins_sums = not plan.target.compiler.all_reduces_each_matmul
    program = read_jaxpr(
        traced.jaxpr, layouts, plan.mesh.sizes, joins_sums=joins_sums, ops=plan.ops, platform=plan.target.platform
    )
    return replace(program, donates=not plan.spec.keeps_state)
