"""Repeats suspect steps from the state before them, to distinguish faults of the hardware from the data and the model.

A step is repeated if its loss or the norm of its gradients is not finite, if its loss is a spike, and every
`replay.check_every_num_steps`. If both results have the same bits, the data and the model cause them. If not, a device
computes wrongly, and a third run decides which of the two results is kept. Different bits mean the hardware only where
the same program always gives the same bits; `suspect_of` says where that is so.

The state before a step is not donated to it, so two states are in memory. The host waits for a step before it
dispatches the next.
"""

import socket
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import human_names
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.compiler.step.state_checks import build_digest, replica_dimensions
from meshloom.compiler.step.train_step import LOSS_BY_SHARD

from ..compile.run_programs import mesh_of
from ..core.failures import FAULTY, RunFailed
from .feed import rows_held, sequences_of
from .observer import ObservedRun, Observer, TakeStep

NUM_LOSSES = 32  # for the median
FEWEST_LOSSES = 8  # before a loss can be a spike
MOST_NAMED = 4  # devices in a message

Run = Callable[[], tuple[Any, Any]]

HARDWARE = "the hardware"
ANY_ORDER = f"{HARDWARE}, or a sum in another order, which {{}} may take"
DETERMINISTIC_OPTIONS = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")


def suspect_of(plan: Plan) -> str:
    """Returns what is to blame if a program gives different bits for the same operands.

    On TPUs, XLA's programs add in the order of their compilation. On CPUs with more than one thread they do not always
    (https://github.com/jax-ml/jax/issues/39741). On GPUs, scatters and the backward pass of cuDNN's attention add
    atomically unless an option forbids it (https://github.com/openxla/xla/pull/14125).
    """
    platform, options = plan.target.platform, {**plan.preset_options, **plan.spec.compiler_options}
    if platform == "tpu" or (platform == "gpu" and any(_is_set(options.get(name)) for name in DETERMINISTIC_OPTIONS)):
        return HARDWARE
    if platform == "gpu":
        return f"{ANY_ORDER.format('GPUs')} without compiler_options.{DETERMINISTIC_OPTIONS[0]}=true"
    return ANY_ORDER.format("CPUs with several threads")


def _is_set(value: Any) -> bool:
    return str(value).lower() in ("true", "1")


@dataclass(frozen=True)
class Result:
    """The result of a step, on the host. metrics: the results of the program. digest: the digest of the state after it,
    by path and device of the mesh."""

    metrics: Mapping[str, np.ndarray]
    digest: Mapping[str, np.ndarray]

    @property
    def loss(self) -> float:
        return float(self.metrics["loss"])

    def is_same(self, other: "Result") -> bool:
        """Returns True if all bits are the same."""
        return not _unlike(self.metrics, other.metrics) and not _unlike(self.digest, other.digest)


class Replay(Observer):
    """Repeats each step that is suspect, or that is due for a check.

    mesh: the mesh of the programs. hosts: the hosts of the processes. documents: describes the documents of rows of a
    batch, by its place in the data. warn: takes the findings.
    """

    def __init__(
        self,
        plan: Plan[RunSpec],
        mesh: Mesh,
        *,
        hosts: Sequence[str],
        documents: Callable[[Mapping[str, Any], Sequence[int]], str],
        warn: Callable[[Problem], None],
    ):
        self._plan, self._mesh = plan, mesh
        self._hosts, self._documents, self._warn = hosts, documents, warn
        self._suspect = suspect_of(plan)
        self._losses: deque[float] = deque(maxlen=NUM_LOSSES)
        self._digest = jax.jit(build_digest(plan), out_shardings=NamedSharding(mesh, PartitionSpec()))

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self | None:
        """Returns the replay of a run that keeps the state before each step; None for any other."""
        if not run.spec.keeps_state:
            return None
        hosts = run.processes.hosts or (socket.gethostname(),)
        return cls(run.plan, mesh_of(run.plan), hosts=hosts, documents=run.documents, warn=run.warn)

    def around_step(self, take: TakeStep) -> TakeStep:
        """Returns a function that takes a step, and repeats it if necessary."""
        return lambda state, batch, step, at: self._take(partial(take, state, batch, step, at), step, at)

    def reads_at_once(self, step: int) -> bool:  # noqa: ARG002
        """Returns True: the state before a step is kept until its result is known."""
        return True

    def _take(self, run: Run, step: int, position: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns the state after a step and its metrics. run: takes the step, each time from the same state. position:
        the place of the batch in the data.

        Raises RunFailed if no result comes twice, or replicas of the state differ.
        """
        after, metrics = run()
        read = jax.device_get(metrics)
        suspicion, is_check = self._why_suspect(read), self._is_check(step)
        if suspicion is not None or is_check:
            first = Result(read, self._digest_of(after))
            del after  # before it is made again: the memory holds two states
            after, metrics, result = self._again(run, step, position, first=first, suspicion=suspicion)
            if is_check:
                self._compare_replicas(step, result)
        if isfinite(loss := float(read["loss"])):
            self._losses.append(loss)
        return after, metrics

    def _is_check(self, step: int) -> bool:
        every = self._plan.spec.replay.check_every_num_steps
        return every is not None and step % every == 0

    def _why_suspect(self, read: Mapping[str, Any]) -> str | None:
        """Returns why a step is suspect; None if it is not, or `on_nonfinite` does not ask for it."""
        spec = self._plan.spec
        if spec.on_nonfinite != "replay":
            return None
        loss, norm = float(read["loss"]), float(read["grad_norm"])
        if not (isfinite(loss) and isfinite(norm)):
            return None if spec.may_skip else f"the loss is {loss}, the norm of the gradients {norm}"
        if len(self._losses) < FEWEST_LOSSES:
            return None
        times = loss / statistics.median(self._losses)
        return f"the loss is {loss:.4g}, {times:.2g} times what it was" if times > spec.replay.spike_factor else None

    def _again(
        self, run: Run, step: int, position: Mapping[str, Any], *, first: Result, suspicion: str | None
    ) -> tuple[Any, Any, Result]:
        """Returns the state, the metrics and the result that comes twice, and warns with its meaning."""
        after, metrics = run()
        second = Result(jax.device_get(metrics), self._digest_of(after))
        if second.is_same(first):
            if suspicion is not None:
                what = f"{suspicion}; run again from the same state, it is the same: the data or the model"
                fix = f"look at {self._documents(position, self._suspect_rows(first))}"
                self._warn(Problem(f"step {step}", what, fix))
            return after, metrics, second
        del after
        after, metrics = run()
        third = Result(jax.device_get(metrics), self._digest_of(after))
        odd = next((one for one, other in ((first, second), (second, first)) if third.is_same(other)), None)
        begun = f"run again from the same state, it gave {_differing(first, second)}"
        if odd is None:
            what = f"{begun}, and a third result then: a program that is not deterministic, or {self._suspect}"
            raise RunFailed(Problem(f"step {step}", what, "run on other hosts"), FAULTY)
        what = f"{suspicion}; {begun}" if suspicion else begun
        who = self._who_differs(odd, third)
        fix = "the run goes on with the result that came twice; leave the host out if it happens again"
        self._warn(Problem(f"step {step}", f"{what}, and one of them twice: {who}; {self._suspect}", fix))
        return after, metrics, third

    def _suspect_rows(self, result: Result) -> Sequence[int]:
        """Returns the rows of the batch whose shards have no finite loss; all rows if every loss is finite."""
        parts = ~np.isfinite(result.metrics[LOSS_BY_SHARD])
        devices = self._devices_of_shards(parts)
        rows = NamedSharding(self._mesh, self._plan.roles.rows_spec)
        held = rows_held(rows, self._plan.spec.global_batch_size, devices or self._mesh.devices.flat)
        return sorted(sequences_of(self._plan.row_order, held))

    def _who_differs(self, odd: Result, right: Result) -> str:
        """Returns the devices that computed another loss, or else those that hold other bits, as text. A wrong gradient
        reaches all."""
        parts = _unlike_entries(odd.metrics[LOSS_BY_SHARD], right.metrics[LOSS_BY_SHARD])
        devices = self._devices_of_shards(parts)
        if not 0 < len(devices) < self._mesh.size:
            unlike = [_unlike_entries(odd.digest[path], right.digest[path]) for path in odd.digest]
            devices = list(self._mesh.devices.flat[np.flatnonzero(np.any(unlike, axis=0))])
        if not 0 < len(devices) < self._mesh.size:
            return "on which device cannot be told"
        return self._named(devices)

    def _devices_of_shards(self, is_unlike: np.ndarray) -> list[Any]:
        """Returns the devices of some shards of the batch. is_unlike: marks them, in the order of the mesh axes that
        split the batch."""
        axes = self._plan.roles.tokens
        sizes = tuple(self._mesh.shape[axis] for axis in axes)
        named = is_unlike.reshape(sizes) if axes else is_unlike.reshape(())
        order = [axis for axis in self._mesh.axis_names if axis in axes]
        named = np.transpose(named, [axes.index(axis) for axis in order])
        shape = [self._mesh.shape[axis] if axis in axes else 1 for axis in self._mesh.axis_names]
        everywhere = np.broadcast_to(named.reshape(shape), self._mesh.devices.shape)
        return list(self._mesh.devices[everywhere])

    def _compare_replicas(self, step: int, result: Result) -> None:
        """Raises RunFailed if devices hold different bits of the same shard."""
        odd, where = np.zeros(self._mesh.devices.shape, bool), list[str]()
        for path, along in replica_dimensions(self._plan).items():
            if (is_odd := odd_replicas(result.digest[path], along)).any():
                odd |= is_odd
                where.append(path)
        if where:
            named = self._named(self._mesh.devices[odd])
            what = f"the replicas of {human_names(where, most=1)} differ: {named}; {self._suspect}"
            fix = "start the same command again, without that host: it goes on from the last checkpoint"
            raise RunFailed(Problem(f"step {step}", what, fix), FAULTY)

    def _digest_of(self, state: Any) -> dict[str, np.ndarray]:
        with jax.set_mesh(self._mesh):
            return jax.device_get(self._digest(state))

    def _named(self, devices: Iterable[Any]) -> str:
        return human_names([f"{one} on {self._hosts[one.process_index]}" for one in devices], most=MOST_NAMED)


def odd_replicas(sums: np.ndarray, along: Sequence[int]) -> np.ndarray:
    """Returns a mask of the devices that differ from most replicas of their shard.

    sums: a value for each device, in the shape of the mesh. along: the dimensions of the mesh with replicas. If two
    replicas differ, both are marked.
    """
    size = int(np.prod([sums.shape[i] for i in along]))
    last = [i for i in range(sums.ndim) if i not in along]
    groups = np.transpose(sums, [*last, *along]).reshape(-1, size)
    counts = (groups[:, :, None] == groups[:, None, :]).sum(axis=2)  # replicas with the same bits
    is_odd = (counts < size) & ((counts < counts.max(axis=1, keepdims=True)) | (2 * counts <= size))
    shape = [sums.shape[i] for i in (*last, *along)]
    return np.transpose(is_odd.reshape(shape), np.argsort([*last, *along]))


def _differing(first: Result, second: Result) -> str:
    if _unlike(first.metrics, second.metrics) and first.loss != second.loss:
        return f"a loss of {first.loss:.8g} and of {second.loss:.8g}"
    return "two results of the same loss"


def _unlike(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> list[str]:
    """Returns the names whose bits differ; NaN equals NaN of the same bits."""
    return [name for name in one if np.asarray(one[name]).tobytes() != np.asarray(other[name]).tobytes()]


def _unlike_entries(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns a mask of the entries whose bits differ."""
    bits = np.dtype(f"u{one.dtype.itemsize}")
    return np.asarray(one).view(bits) != np.asarray(other).view(bits)
