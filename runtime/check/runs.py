"""Runs what a check compares: two steps of the small program on simulated devices and on one device, and more.

The main comparison is in float32, in which a fault is not hidden by rounding: loss, gradients and update of two steps.
Further programs have one thing otherwise, such as no context shards, so that a line names what is at fault.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from meshloom.compiler.check.compare import deviation, deviations, nudged, tolerances
from meshloom.compiler.check.reference import StepOutput, build_plain_update, build_reference
from meshloom.compiler.check.same_program import split_of
from meshloom.compiler.check.shrink import (
    Shrinking,
    in_float32,
    in_float32_with_matmuls,
    on_mesh,
    on_one_device,
    plainly,
    without_matmuls,
)
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.trees import leaves_by_path, like, pick
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.parallel.encodings import float32_params
from meshloom.compiler.parallel.weight_plan import WeightPlan
from meshloom.compiler.plan import Plan

from .check_data import CheckData
from .programs import Compiler, SmallPlan, SmallProgram, on_host

NUM_STEPS = 2
ONE_DEVICE = "the declaration has one device, and nothing is split: add a mesh, such as target=cpu-4 sharding=fsdp"
SPREAD = 0.05  # of what is added to each parameter, so that none is 0 or 1 everywhere


@dataclass(frozen=True)
class TwoSteps:
    """Two steps. found: of each step. params: before the first, and after each."""

    found: tuple[StepOutput, ...]
    params: tuple[Any, ...]


@dataclass
class CheckRuns:
    """The runs of one check. declared: the declaration's plan, for its target. program: its name."""

    declared: Plan[RunSpec]
    program: str

    def __post_init__(self) -> None:
        """Shrinks the declaration. Raises ConfigError where it cannot shrink."""
        self.shrunk = Shrinking(self.declared).shrunk()

    @property
    def small(self) -> str:
        """Returns the small program in words: "3 layers, fsdp 2 x tensor 2, 4 x 32 tokens"."""
        plan = self.shrunk.plan
        axes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.sizes.items() if size > 1) or "one device"
        num_layers = getattr(plan.spec.model, "num_layers", 0) or sum(stack.num_layers for stack in plan.model.stacks)
        layers = counted(num_layers, "layer")  # a stack counts periods of windows
        return f"{layers}, {axes}, {plan.spec.global_batch_size} x {plan.spec.sequence_length} tokens"

    def start(self, compiler: Compiler) -> None:
        """Plans the small programs. Each is lowered and compiled when it is first asked for."""
        ops, self.compiler = self.declared.ops, compiler
        self.spec = in_float32(self.shrunk.plan.spec)
        self.plan = plan_run(self.spec, ops)
        self.one = plan_run(plainly(on_one_device(self.spec)), ops)
        self.data = CheckData(self.spec, NUM_STEPS)
        self.batches = self.data.batches()
        self.trained = frozenset(self.plan.sharding.trained)
        self.params = self._drawn()
        self.split = {each.array.path: split_of(each.spec) for each in self.plan.sharding.parameters}

    def compile_all(self) -> None:
        """Lowers all programs, which are compiled meanwhile; the longest are the first."""
        for name in ("train", "step", "narrow", "in_few_bits", "evaluated", "variants", "update"):
            getattr(self, name)

    @cached_property
    def train(self) -> SmallProgram:
        """Returns the step on the mesh."""
        return self.compiler.train(SmallPlan(self.plan), self.batches[0])

    @cached_property
    def step(self) -> "Future[Any]":
        """Returns the figures of the step on one device, a function of parameters and a batch."""
        return self.compiler.plain(self._reference_step, self.params, self.batches[0])

    @cached_property
    def _reference_step(self) -> Callable[..., StepOutput]:
        return build_reference(self.spec, self.plan.model, self.trained)

    @cached_property
    def update(self) -> "Future[Any]":
        """Returns the update on one device, a function of parameters, the optimizer's state and a step's figures."""
        output = jax.eval_shape(self._reference_step, self.params, self.batches[0])
        state = jax.eval_shape(self.one.optimizer.init, pick(self.params, self.trained))
        update = build_plain_update(self.one.model, self.one.optimizer, self.trained)
        return self.compiler.plain(update, self.params, state, output)

    @cached_property
    def narrow(self) -> SmallProgram | None:
        """Returns the loss and its gradients in the declared types, without matmuls in few bits; None if these are
        float32 throughout."""
        spec = without_matmuls(self.shrunk.plan.spec)
        if spec.precision == self.spec.precision:
            return None
        return self._with_gradients(SmallPlan(plan_run(spec, self.declared.ops)))

    @cached_property
    def in_few_bits(self) -> tuple[SmallProgram, SmallProgram] | str:
        """Returns the loss and its gradients on the mesh and on one device, in float32 but for matmuls in few bits, or
        why there are none."""
        spec = in_float32_with_matmuls(self.shrunk.plan.spec)
        if not spec.precision.has_few_bits:
            return "the declaration has none"
        try:
            mesh, one = (plan_run(each, self.declared.ops) for each in (spec, plainly(on_one_device(spec))))
            return self._with_gradients(SmallPlan(mesh)), self._with_gradients(SmallPlan(one))
        except ConfigError as error:
            return f"the other program cannot be planned: {error.problems[0].where}: {error.problems[0].what}"

    def _with_gradients(self, on: SmallPlan) -> SmallProgram:
        return self.compiler.loss(on, self.batches[0], with_gradients=True)

    @cached_property
    def evaluated(self) -> SmallProgram:
        """Returns the loss on the mesh."""
        return self.compiler.loss(SmallPlan(self.plan), self.batches[0], with_gradients=False)

    @cached_property
    def variants(self) -> dict[str, SmallProgram | str]:
        """Returns the same loss with one thing otherwise, by the name of its line, or why there is none."""
        return {name: self._variant(make) for name, make in self._variant_plans().items()}

    def _drawn(self) -> Any:
        """Returns initial parameters, each moved a little, so that none is 0 or 1 everywhere; of those that are stored
        in few bits, what these stand for, which they stand for again once they are written again."""
        drawn = jax.jit(self.plan.model.init)(jax.random.key(self.spec.seed))
        rng = np.random.default_rng(0)
        moved = like(
            drawn,
            {
                path: (np.asarray(x, np.float32) + SPREAD * rng.standard_normal(x.shape)).astype(np.float32)
                for path, x in leaves_by_path(drawn).items()
            },
        )

        def as_stored(weight: WeightPlan, x: Any) -> Any:
            encoding = weight.encoding
            return x if encoding.format is None else np.asarray(encoding.float32(encoding.store_of(x)))

        return jax.tree.map(as_stored, self.plan.weights, moved)

    def decoded(self, params: Any) -> Any:
        """Returns parameters of a state on the mesh as numbers."""
        return on_host(float32_params(self.plan.weights, params))

    def initial_state(self) -> Any:
        optimizer = on_host(jax.jit(self.one.optimizer.init)(pick(self.params, self.trained)))
        return {"step": np.zeros((), np.int32), "params": self.params, "optimizer": optimizer}

    def _reference(self, params: Any) -> TwoSteps:
        step, update = self.step.result(), self.update.result()
        state = on_host(jax.jit(self.one.optimizer.init)(pick(params, self.trained)))
        found, each = list[StepOutput](), [params]
        for batch in self.batches:
            output = step(params, batch)
            params, state = on_host(update(params, state, output))
            found.append(on_host(output))
            each.append(params)
        return TwoSteps(tuple(found), tuple(each))

    @cached_property
    def expected(self) -> TwoSteps:
        return self._reference(self.params)

    @cached_property
    def rounded(self) -> TwoSteps:
        """Returns what one device finds after rounding of the parameters in float32."""
        return self._reference(nudged(self.params, "float32", seed=1))

    @cached_property
    def steps(self) -> tuple[tuple[Any, Any], ...]:
        """Returns (state, metrics) of each step on the mesh, on the host."""
        state = self.train.on.state(self.initial_state())
        made = list[tuple[Any, Any]]()
        for batch in self.batches:
            state, metrics = self.train.run(state, self.train.on.placed(batch))
            made.append((state, metrics))
            state = self.train.on.state(state)
        return tuple(made)

    # Tolerances.

    @cached_property
    def of_gradients(self) -> dict[str, float]:
        each = zip(self.rounded.found, self.expected.found, strict=True)
        return tolerances(largest(deviations(a.gradients, b.gradients) for a, b in each))

    @cached_property
    def of_loss(self) -> float:
        each = zip(self.rounded.found, self.expected.found, strict=True)
        return tolerances({"": max(deviation(a.loss, b.loss) for a, b in each)})[""]

    def _variant_plans(self) -> dict[str, Callable[[], RunSpec] | str]:
        """Returns what makes a declaration with one thing otherwise, or why there is none."""
        spec, sizes = self.spec, self.plan.mesh.sizes
        several = [axis for axis, size in sizes.items() if size > 1]
        flat = plainly(on_mesh(spec, stage=1)) if sizes.get("stage", 1) > 1 else spec

        def without(axis: str) -> Callable[[], RunSpec] | str:
            if sizes.get(axis, 1) == 1:
                return f"mesh.{axis} is 1"
            return lambda: plainly(on_mesh(spec, **{axis: 1}))

        microbatches: Callable[[], RunSpec] | str = "num_microbatches is 1"
        if spec.num_microbatches > 1:
            microbatches = lambda: flat.model_copy(update={"num_microbatches": 1})  # noqa: E731
        return {
            "meshes": (lambda: plainly(on_one_device(spec))) if several else ONE_DEVICE,
            "microbatches": microbatches,
            "context": without("context"),
            "stages": without("stage"),
        }

    def as_published(self) -> Plan[RunSpec]:
        """Returns the plan of the model of the declared size on one device, in float32."""
        spec = plainly(on_one_device(self.spec)).model_copy(update={"model": self.declared.spec.model})
        return plan_run(spec, self.declared.ops)

    def _variant(self, make: Callable[[], RunSpec] | str) -> SmallProgram | str:
        if isinstance(make, str):
            return make
        try:
            plan = plan_run(make(), self.declared.ops)
        except ConfigError as error:
            return f"the other program cannot be planned: {error.problems[0].where}: {error.problems[0].what}"
        return self.compiler.loss(SmallPlan(plan), self.batches[0], with_gradients=False)


def largest(each: Iterable[dict[str, float]]) -> dict[str, float]:
    found = dict[str, float]()
    for one in each:
        for path, value in one.items():
            found[path] = max(found.get(path, 0.0), value)
    return found


def least(each: Iterable[dict[str, float]]) -> dict[str, float]:
    found = dict[str, float]()
    for one in each:
        for path, value in one.items():
            found[path] = min(found.get(path, value), value)
    return found
