"""Compiles the small programs of a check for simulated devices, several at once, and runs them on global batches.

A program runs for milliseconds, so machine code is not optimised. XLA's own passes, which decide what crosses between
devices, are not touched by this.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshloom.compiler.core.trees import pick
from meshloom.compiler.plan import Plan
from meshloom.compiler.step.train_step import build_loss, build_train_step

from ..data.batches import HostBatch
from ..train.feed import in_token_order

UNOPTIMISED: Any = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}


@dataclass(frozen=True)
class SmallProgram:
    """A program of a plan on the first simulated devices. compiled: set when the compiler is done."""

    plan: Plan[Any]
    mesh: Any
    compiled: "Future[Any]"

    def placed(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Returns a global batch on the devices, with rows and tokens in the order of the devices."""
        return _placed(self.plan, self.mesh, batch)

    def laid_out(self, tree: Any, specs: Any) -> Any:
        """Returns arrays of the host on the devices."""
        return jax.tree.map(lambda x, spec: jax.device_put(np.array(x), NamedSharding(self.mesh, spec)), tree, specs)

    def run(self, *operands: Any) -> Any:
        """Returns what the program makes of operands on the devices."""
        with jax.set_mesh(self.mesh):
            return self.compiled.result()(*operands)


class Compiler:
    """Lowers programs one after the other, and compiles them on two threads meanwhile."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="check")

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def train(self, plan: Plan[Any], batch: HostBatch) -> SmallProgram:
        """Compiles (state, batch) -> (state, metrics with the gradients), the step of a run."""
        return self._compile(plan, build_train_step(plan, returns_gradients=True), plan.abstract, plan.specs, batch)

    def evaluate(self, plan: Plan[Any], batch: HostBatch) -> SmallProgram:
        """Compiles (parameters, batch) -> [summed loss, number of targets], the evaluation of a run."""
        of_params = plan.abstract["params"], plan.specs["params"]
        return self._compile(plan, build_loss(plan, with_gradients=False), *of_params, batch)

    def gradients(self, plan: Plan[Any], batch: HostBatch) -> SmallProgram:
        """Compiles (parameters, batch) -> (loss, gradients, ...)."""
        of_params = plan.abstract["params"], plan.specs["params"]
        return self._compile(plan, build_loss(plan, with_gradients=True), *of_params, batch)

    def plain(self, function: Callable[..., Any], *operands: Any) -> "Future[Any]":
        """Compiles a function of arrays on one device."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), operands)
        return self._pool.submit(jax.jit(function).lower(*abstract).compile, UNOPTIMISED)

    def _compile(
        self, plan: Plan[Any], function: Callable[..., Any], abstract: Any, specs: Any, batch: HostBatch
    ) -> SmallProgram:
        mesh = plan.mesh.of_devices(jax.devices("cpu")[: plan.target.num_devices])
        like = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), abstract, specs
        )
        out = (
            (jax.tree.map(lambda x: x.sharding, like), None)
            if isinstance(abstract, dict) and "step" in abstract
            else None
        )
        with jax.set_mesh(mesh):
            jitted = jax.jit(function) if out is None else jax.jit(function, out_shardings=out)
            lowered = jitted.lower(like, _placed(plan, mesh, batch))
        return SmallProgram(plan, mesh, self._pool.submit(lowered.compile, UNOPTIMISED))


def _placed(plan: Plan[Any], mesh: Any, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    order = plan.batch.token_order.of_sequence(batch["inputs"].shape[1])
    rows = plan.batch.row_order.rows()
    host = in_token_order({name: x[rows] for name, x in batch.items()}, order)
    return {
        name: jax.device_put(host[name], NamedSharding(mesh, spec)) for name, (_, spec) in plan.batch.shapes.items()
    }


def on_host(tree: Any) -> Any:
    """Returns a tree of arrays on the host."""
    return jax.tree.map(np.asarray, tree)


def initial_state(plan: Plan[Any], params: Any) -> Any:
    """Returns the state before the first step, on the host, in the types of the plan. plan: in float32."""
    trained = pick(params, plan.sharding.trained)
    optimizer = on_host(jax.jit(plan.optimizer.init)(trained))
    return {"step": np.zeros((), np.int32), "params": params, "optimizer": optimizer}
