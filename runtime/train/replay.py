"""Repeats suspect steps from the state before them, to distinguish faults of the hardware from the data and the model.

A step is repeated if its loss or the norm of its gradients is not finite, if its loss is a spike, and every
`replay.check_every_num_steps`. If both results have the same bits, the data and the model cause them. If not, a device
computes wrongly, and a third run decides which of the two results is kept. Different bits mean the hardware only where
the same program always gives the same bits; `suspect_of` says where that is so.

The state before a step is not donated to it, so two states are in memory. The host waits for a step before it
dispatches the next.
"""

import json
import socket
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import human_names
from meshloom.compiler.core.partition_spec import axes_in
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.parallel.overflow import OverflowCounts, describe_overflows
from meshloom.compiler.step.train_step import LOSS_BY_SHARD, build_train_step

from ..compile.run_programs import mesh_of
from ..core.failures import FAULTY, RunFailed
from .feed import rows_held, sequences_of
from .observer import ObservedRun, Observer, TakeStep

NUM_LOSSES = 32  # for the median
FEWEST_LOSSES = 8  # before a loss can be a spike
MOST_NAMED = 4  # devices in a message
DETERMINISTIC_OPTIONS = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")


def suspect_of(platform: str, options: Mapping[str, Any]) -> str:
    """Returns what is to blame if a program gives different bits for the same operands. options: of the compiler.

    On TPUs, XLA's programs add in the order of their compilation. On CPUs with more than one thread they do not always
    (https://github.com/jax-ml/jax/issues/39741). On GPUs, scatters and the backward pass of cuDNN's attention add
    atomically unless an option forbids it (https://github.com/openxla/xla/pull/14125).
    """
    is_set = any(str(options.get(name)).lower() in ("true", "1") for name in DETERMINISTIC_OPTIONS)
    if platform == "tpu" or (platform == "gpu" and is_set):
        return "the hardware"
    of_gpus = f"GPUs may take without compiler_options.{DETERMINISTIC_OPTIONS[0]}=true"
    who = of_gpus if platform == "gpu" else "CPUs with several threads may take"
    return f"the hardware, or a sum in another order, which {who}"


@dataclass(frozen=True)
class Result:
    """The result of a step, on the host. metrics: the results of the program. digest: the sum of the bits of each
    device's shard of each array of the state after it, (devices of the mesh, arrays)."""

    metrics: Mapping[str, np.ndarray]
    digest: np.ndarray

    def is_same(self, other: "Result") -> bool:
        """Returns True if all bits are the same."""
        pairs = [(self.metrics[name], other.metrics[name]) for name in self.metrics]
        return not any(_unlike(*pair).any() for pair in [*pairs, (self.digest, other.digest)])


class Replay(Observer):
    """Repeats each step that is suspect, or that is due for a check."""

    def __init__(self, run: ObservedRun):
        self._run, self._plan, self._spec, self._mesh = run, run.plan, run.spec, mesh_of(run.plan)
        self._suspect = suspect_of(run.plan.target.platform, {**run.plan.preset_options, **run.spec.compiler_options})
        self._losses: deque[float] = deque(maxlen=NUM_LOSSES)
        specs = leaves_by_path(run.plan.specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
        self._specs = dict(sorted(specs.items()))  # the order in which JAX hands on the values of a dict
        over_devices = PartitionSpec(self._mesh.axis_names)
        digest = jax.shard_map(_sums_of_bits, in_specs=(self._specs,), out_specs=over_devices, check_vma=False)
        self._digest = jax.jit(digest, out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self | None:
        """Returns the replay of a run that keeps the state before each step; None for any other."""
        return cls(run) if run.spec.keeps_state else None

    def around_step(self, take: TakeStep) -> TakeStep:
        """Returns a function that takes a step, and repeats it if necessary. It raises RunFailed if no result comes
        twice, or replicas of the state differ."""

        def taken(state: Any, batch: dict[str, jax.Array], step: int, position: dict[str, Any]) -> tuple[Any, Any]:
            after, metrics = take(state, batch, step, position)
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            every = self._spec.replay.check_every_num_steps
            suspicion, is_check = self._why_suspect(loss, norm), every is not None and step % every == 0
            if suspicion is not None or is_check:
                results = [self._result(after, metrics)]
                while len(results) < 3 and not any(results[-1].is_same(one) for one in results[:-1]):
                    del after, metrics  # before they are made again: the memory holds two states
                    after, metrics = take(state, batch, step, position)
                    results.append(self._result(after, metrics))
                if len(results) == 2 and self._counts_overflows and not (isfinite(loss) and isfinite(norm)):
                    suspicion = f"{suspicion}; {self._overflows(state, batch, step)}"
                self._judge(results, step, position, suspicion)
                if is_check:
                    self._compare_replicas(step, results[-1])
            if isfinite(loss):
                self._losses.append(loss)
            return after, metrics

        return taken

    def reads_at_once(self, step: int) -> bool:  # noqa: ARG002 (the state is kept until the result is known)
        return True

    def _why_suspect(self, loss: float, norm: float) -> str | None:
        """Returns why a step is suspect; None if it is not, or `on_nonfinite` does not ask for it."""
        if self._spec.on_nonfinite != "replay":
            return None
        if not (isfinite(loss) and isfinite(norm)):
            return None if self._spec.may_skip else f"the loss is {loss}, the norm of the gradients {norm}"
        if len(self._losses) < FEWEST_LOSSES:
            return None
        times = loss / statistics.median(self._losses)
        told = f"the loss is {loss:.4g}, {times:.2g} times what it was"
        return told if times > self._spec.replay.spike_factor else None

    @property
    def _counts_overflows(self) -> bool:
        """Returns True if matmuls have scales, which may overflow."""
        return any(each.precision and each.precision.arithmetic for each in self._plan.operations)

    def _overflows(self, state: Any, batch: dict[str, jax.Array], step: int) -> str:
        """Returns a sentence on the scales of matmuls that overflow in a step, by a program that counts them."""
        counts = OverflowCounts()
        plan = replace(self._plan, operations=counts.watched(self._plan.operations))
        train_step = build_train_step(plan)
        with jax.set_mesh(self._mesh):
            jax.block_until_ready(jax.jit(lambda *step: train_step(*step)[1])(state, batch))
        jax.effects_barrier()
        every = self._run.processes.gather(f"overflows/{step}", json.dumps(counts.totals))
        return describe_overflows(list(map(json.loads, every)), [each.site.path for each in plan.operations])

    def _result(self, after: Any, metrics: Any) -> Result:
        with jax.set_mesh(self._mesh):
            return Result(*jax.device_get((metrics, self._digest(leaves_by_path(after)))))

    def _judge(self, results: Sequence[Result], step: int, position: Mapping[str, Any], suspicion: str | None) -> None:
        """Warns with what the results mean. Raises RunFailed if none comes twice."""
        first, second, last = results[0], results[1], results[-1]
        if len(results) == 2:
            if suspicion is not None:
                # Of shards whose loss is not finite; of all, if every loss is finite.
                devices = self._devices_of_shards(~np.isfinite(first.metrics[LOSS_BY_SHARD])) or self._mesh.devices.flat
                sharding = NamedSharding(self._mesh, self._plan.roles.rows_spec)
                rows = rows_held(sharding, self._spec.global_batch_size, devices)
                rows = sorted(sequences_of(self._plan.batch.row_order, rows))
                what = f"{suspicion}; run again from the same state, it is the same: the data or the model"
                self._run.warn(Problem(f"step {step}", what, f"look at {self._run.documents(position, rows)}"))
            return
        one, other = (float(result.metrics["loss"]) for result in (first, second))
        differing = "two results of the same loss" if one == other else f"a loss of {one:.8g} and of {other:.8g}"
        begun = f"run again from the same state, it gave {differing}"
        odd = first if last.is_same(second) else second if last.is_same(first) else None
        if odd is None:
            what = f"{begun}, and a third result then: a program that is not deterministic, or {self._suspect}"
            raise RunFailed(Problem(f"step {step}", what, "run on other hosts"), FAULTY)
        what = f"{suspicion}; {begun}" if suspicion else begun
        fix = "the run goes on with the result that came twice; leave the host out if it happens again"
        # Devices that computed another loss, or else hold other bits; a wrong gradient reaches all.
        devices = self._devices_of_shards(_unlike(odd.metrics[LOSS_BY_SHARD], last.metrics[LOSS_BY_SHARD]))
        if not 0 < len(devices) < self._mesh.size:
            devices = list(self._mesh.devices.flat[np.flatnonzero(_unlike(odd.digest, last.digest).any(axis=1))])
        who = self._named(devices) if 0 < len(devices) < self._mesh.size else "on which device is unknown"
        self._run.warn(Problem(f"step {step}", f"{what}, and one of them twice: {who}; {self._suspect}", fix))

    def _devices_of_shards(self, is_unlike: np.ndarray) -> list[Any]:
        """Returns the devices of some shards of the batch. is_unlike: marks them, in the order of the mesh axes that
        split the batch."""
        shards = NamedSharding(self._mesh, PartitionSpec(self._plan.roles.tokens))
        shard_of = shards.devices_indices_map((is_unlike.size,))
        return [device for device in self._mesh.devices.flat if is_unlike.ravel()[shard_of[device]].any()]

    def _compare_replicas(self, step: int, result: Result) -> None:
        """Raises RunFailed if devices hold different bits of the same shard."""
        odd, where = np.zeros(self._mesh.devices.shape, bool), list[str]()
        for (path, spec), sums in zip(self._specs.items(), result.digest.T, strict=True):
            along = [i for i, axis in enumerate(self._mesh.axis_names) if axis not in axes_in(spec)]
            if (is_odd := odd_replicas(sums.reshape(odd.shape), along)).any():
                odd |= is_odd
                where.append(path)
        if where:
            who = self._named(self._mesh.devices[odd])
            what = f"the replicas of {human_names(where, most=1)} differ: {who}; {self._suspect}"
            fix = "start the same command again, without that host: it goes on from the last checkpoint"
            raise RunFailed(Problem(f"step {step}", what, fix), FAULTY)

    def _named(self, devices: Iterable[Any]) -> str:
        hosts = self._run.processes.hosts or (socket.gethostname(),)
        return human_names([f"{one} on {hosts[one.process_index]}" for one in devices], most=MOST_NAMED)


def odd_replicas(sums: np.ndarray, along: Sequence[int]) -> np.ndarray:
    """Returns a mask of the devices that differ from most replicas of their shard.

    sums: a value for each device, in the shape of the mesh. along: the dimensions of the mesh with replicas. If two
    replicas differ, both are marked.
    """
    ends = list(range(-len(along), 0))
    moved = np.moveaxis(sums, along, ends)
    groups = moved.reshape(-1, size := int(np.prod(moved.shape[sums.ndim - len(along) :])))
    counts = (groups[:, :, None] == groups[:, None, :]).sum(axis=2)  # replicas with the same bits
    is_odd = (counts < size) & ((counts < counts.max(axis=1, keepdims=True)) | (2 * counts <= size))
    return np.moveaxis(is_odd.reshape(moved.shape), ends, along)


def _sums_of_bits(state: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the sum of the bits of each array of this device's state, (1, arrays)."""
    bits = (x.view(f"u{x.dtype.itemsize}") if jnp.issubdtype(x.dtype, jnp.floating) else x for x in state.values())
    return jnp.stack([jnp.sum(x.astype(jnp.uint32), dtype=jnp.uint32) for x in bits])[None]


def _unlike(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns a mask of the entries whose bits differ; NaN equals NaN of the same bits."""
    one, other = np.atleast_1d(one), np.atleast_1d(other)
    bits = np.dtype(f"u{one.dtype.itemsize}")
    return one.view(bits) != other.view(bits)
