"""Compiles the small programs of a check for simulated devices, several at once, and runs them on global batches.

A program runs for milliseconds, so machine code is not optimised. XLA's own passes, which decide what crosses between
devices, are not touched by this.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshloom.compiler.jax_private import taking_packed
from meshloom.compiler.parallel.weight_plan import WeightPlan
from meshloom.compiler.plan import Plan
from meshloom.compiler.step.train_step import build_loss, build_train_step
from meshloom.compiler.xla.programs import state_on

from ..data.batches import HostBatch
from ..train.feed import in_token_order

UNOPTIMISED: Any = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}


@dataclass(frozen=True)
class SmallPlan:
    """A plan on the first simulated devices."""

    plan: Plan[Any]

    @cached_property
    def mesh(self) -> Any:
        """Returns the mesh of devices."""
        return self.plan.mesh.of_devices(jax.devices("cpu")[: self.plan.target.num_devices])

    def placed(self, batch: HostBatch) -> dict[str, jax.Array]:
        """Returns a global batch on the devices, with rows and tokens in the order of the devices."""
        planned = self.plan.batch
        order = planned.token_order.of_sequence(batch["inputs"].shape[1])
        host = in_token_order({name: x[planned.row_order.rows()] for name, x in batch.items()}, order)
        return {name: jax.device_put(host[name], self._on(spec)) for name, (_, spec) in planned.shapes.items()}

    def state(self, tree: Any) -> Any:
        """Returns a state of the host on the devices."""
        return self._laid_out(tree | {"params": self._stored(tree["params"])}, self.abstract)

    def params(self, tree: Any) -> Any:
        """Returns parameters of the host on the devices."""
        return self._laid_out(self._stored(tree), self.abstract["params"])

    def _stored(self, params: Any) -> Any:
        """Returns parameters with those in few bits that the plan encodes; some may be so already."""

        def stored(weight: WeightPlan, x: Any) -> Any:
            if weight.encoding.format is None or isinstance(x, dict):
                return x
            return jax.device_get(weight.encoding.store_of(x))

        return jax.tree.map(stored, self.plan.weights, params)

    def _laid_out(self, tree: Any, like: Any) -> Any:
        return jax.tree.map(lambda x, abstract: jax.device_put(np.array(x), abstract.sharding), tree, like)

    def _on(self, spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @cached_property
    def abstract(self) -> Any:
        """Returns the state as the programs take it."""
        plan = self.plan
        return state_on(self.mesh, plan.abstract, plan.specs, plan.on_host)


@dataclass(frozen=True)
class SmallProgram:
    """A program that is being compiled for a plan on devices."""

    on: SmallPlan
    compiled: "Future[Any]"

    def run(self, *operands: Any) -> Any:
        """Returns what the program makes of operands on the devices, on the host."""
        with jax.set_mesh(self.on.mesh):
            return jax.tree.map(np.asarray, self.compiled.result()(*operands))

    def loss(self, params: Any, batch: HostBatch) -> float:
        """Returns the mean loss of parameters of the host; of a program that evaluates."""
        loss, count = self.run(self.on.params(params), self.on.placed(batch))
        return float(loss / max(count, 1))


class Compiler:
    """Lowers programs one after the other, and compiles them on two threads meanwhile."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="check")

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def train(self, on: SmallPlan, batch: HostBatch) -> SmallProgram:
        """Compiles (state, batch) -> (state, metrics with the gradients), the step of a run."""
        layouts = jax.tree.map(lambda x: x.sharding, on.abstract)
        step = jax.jit(build_train_step(on.plan, returns_gradients=True), out_shardings=(layouts, None))
        return self._compile(on, step, on.abstract, batch)

    def loss(self, on: SmallPlan, batch: HostBatch, *, with_gradients: bool) -> SmallProgram:
        """Compiles (parameters, batch) -> [summed loss, number of targets], and the gradients with it."""
        return self._compile(
            on, jax.jit(build_loss(on.plan, with_gradients=with_gradients)), on.abstract["params"], batch
        )

    def plain(self, function: Callable[..., Any], *operands: Any) -> "Future[Any]":
        """Compiles a function of arrays on one device."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), operands)
        return self._pool.submit(jax.jit(function).lower(*abstract).compile, UNOPTIMISED)

    def _compile(self, on: SmallPlan, jitted: Any, abstract: Any, batch: HostBatch) -> SmallProgram:
        with jax.set_mesh(on.mesh):
            lowered = jitted.lower(abstract, on.placed(batch))
        return SmallProgram(on, self._pool.submit(lambda: taking_packed(lowered.compile(UNOPTIMISED))))


def on_host(tree: Any) -> Any:
    """Returns a tree of arrays on the host."""
    return jax.tree.map(np.asarray, tree)
