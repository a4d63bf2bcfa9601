"""Puts batches on the devices: the rows of a global batch that this process reads, and the time of waiting for them.

The global batch does not depend on the number of processes. A process holds the rows of its devices. They need not be
adjacent, and other processes hold them too if a mesh axis that does not split the batch runs across processes.

The reference of a DPO, the log-probabilities of all pairs by the weights that the run begins with, is computed once,
before the first step, and saved in the run directory; a run that continues reads it. It costs a forward pass over the
pairs, and no memory: neither a second model nor a second pass in each step.
"""

import hashlib
import io
import json
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.compiler.sharding.batch import REFERENCE, RowOrder
from meshloom.compiler.xla.programs import Programs, build, lower

from ..core.failures import STORAGE, RunFailed
from ..core.files import replace_bytes
from ..data import BatchIterator, Data, HostBatch
from ..processes.distributed import Processes
from ..processes.process_log import announce
from .metrics import Stopwatch

FILE = "reference.npz"


def rows_held(sharding: Sharding, num_rows: int, devices: Iterable[Any] | None = None) -> tuple[int, ...]:
    """Returns the rows of an array of `num_rows` that these devices hold, in order. Default: this process's devices."""
    held = sharding.addressable_devices if devices is None else set(devices)
    slices = [index[0] for device, index in sharding.devices_indices_map((num_rows,)).items() if device in held]
    return tuple(sorted({row for part in slices for row in range(*part.indices(num_rows))}))


def local_rows(batch: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[int, ...]:
    """Returns the rows of the batch that are on this process's devices."""
    first: Any = next(iter(batch.values()))
    of_rows = jax.sharding.PartitionSpec(*first.sharding.spec[:1])
    return rows_held(jax.sharding.NamedSharding(first.sharding.mesh, of_rows), first.shape[0])


def sequences_of(order: RowOrder, rows: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of the sequences that are in these rows of a batch on the devices (sharding/batch.py)."""
    return tuple(map(int, order.rows_at(np.asarray(rows, int))))


def in_token_order(local: Mapping[str, np.ndarray], order: np.ndarray | None) -> Mapping[str, np.ndarray]:
    """Returns rows with their tokens in the order of devices that split sequences (sharding/batch.py)."""
    return local if order is None else {name: x[:, order] if x.ndim > 1 else x for name, x in local.items()}


def to_devices(
    batch: Mapping[str, jax.ShapeDtypeStruct], rows: Sequence[int], local: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
    """Returns the global batch on the devices. local: its `rows`, in that order, which are those of `local_rows`."""
    shardings = {name: x.sharding for name, x in batch.items()}
    if jax.process_count() == 1:  # one call instead of one per device
        return jax.device_put({name: local[name] for name in batch}, shardings)

    def place(name: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(x.shape[0])
            first = bisect_left(rows, start)
            return local[name][first : first + stop - start][:, *index[1:]]

        return jax.make_array_from_callback(x.shape, x.sharding, part)  # type: ignore[arg-type]

    return {name: place(name, x) for name, x in batch.items()}


class Feed:
    """Puts batches on the devices of a run's programs. order: of the tokens (`in_token_order`). watch: counts the time
    for which devices stood still."""

    def __init__(self, programs: Programs, batches: BatchIterator, order: np.ndarray | None, watch: Stopwatch):
        self._batch, self._batches, self._order, self._watch = programs.batch, batches, order, watch
        self._rows = local_rows(programs.batch)

    def next(self, behind: dict[str, jax.Array] | None) -> tuple[dict[str, jax.Array], float, float]:
        """Returns the next batch on the devices, the seconds that this took, and the seconds for which devices stood
        still: 0 if the previous step still runs, else at most the former. behind: the metrics of that step."""
        start = time.perf_counter()
        batch = self.place(next(self._batches))
        seconds = time.perf_counter() - start
        loss: Any = behind["loss"] if behind is not None else None
        if loss is not None and not loss.is_ready():
            return batch, seconds, 0.0
        self._watch.move(seconds, to="input")
        return batch, seconds, seconds

    def place(self, batch: HostBatch) -> dict[str, jax.Array]:
        """Returns this process's rows of a batch as part of the global one, on the devices."""
        return to_devices(self._batch, self._rows, in_token_order(batch, self._order))


def prepare_reference(
    plan: Plan[RunSpec],
    programs: Programs,
    params: Any,
    data: Data,
    run_dir: Path,
    console: Console,
    processes: Processes,
    *,
    is_continued: bool,
) -> None:
    """Gives each pair of the data its log-probabilities by the reference, if the objective compares with one.

    is_continued: the run goes on from a checkpoint of its own, and reads what its first start saved. Raises RunFailed
    if that is not there, or is of other data.
    """
    if plan.spec.objective.kind != "dpo":
        return
    order_alone = ("global_batch_size", "data.shuffle_seed")  # the rows and their numbers do not depend on these
    kept = {key: value for key, value in data.identity.items() if key not in order_alone}
    file, identity = run_dir / FILE, hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    if is_continued:
        tables = _read(file, identity)
        announce(console, f"reference: log-probabilities from {file}")
    else:
        tables = list(_computed(plan, programs, params, data, console))
        if processes.is_first:
            content = io.BytesIO()
            np.savez(content, *tables, identity=np.asarray(identity))
            replace_bytes(file, content.getvalue())
    for sequences, table in zip(data.pairs, tables, strict=True):
        sequences.reference = table


def _computed(
    plan: Plan[RunSpec], programs: Programs, params: Any, data: Data, console: Console
) -> Iterator[np.ndarray]:
    """Yields the log-probability of each row, for each of the data's sequences of rows."""
    batch = {name: x for name, x in programs.batch.items() if name != REFERENCE}
    log_probs = build(lower(plan, batch["inputs"].sharding.mesh, ["log_probs"]))["log_probs"]
    rows, order = local_rows(batch), plan.batch.token_order.of_sequence(plan.spec.sequence_length)
    mine, size = sequences_of(plan.batch.row_order, rows), plan.spec.global_batch_size
    num_rows, done = sum(map(len, data.pairs)), 0
    bar = console.bar("reference", "doing", "count", "bar", "left", is_transient=True)
    bar.start()
    try:
        for sequences in data.pairs:
            table = np.zeros(len(sequences), np.float32)
            for first in range(0, len(sequences), size):
                numbers = np.minimum(first + np.arange(size), len(sequences) - 1)  # the last batch repeats its last row
                local = [sequences[int(numbers[number])] for number in mine]
                host = {name: np.stack([row[name] for row in local]) for name in batch}
                table[numbers] = jax.device_get(log_probs(params, to_devices(batch, rows, in_token_order(host, order))))
                bar.update(done + int(numbers[-1]) + 1, total=num_rows)
            done += len(sequences)
            yield table
    finally:
        bar.stop()
    announce(console, f"reference: log-probabilities of {counted(num_rows // 2, 'pair')} by the weights at the start")


def _read(file: Path, identity: str) -> list[np.ndarray]:
    fix = "go on with the data that the run began with, or begin anew in another hydra.run.dir"
    try:
        with np.load(file, allow_pickle=False) as saved:
            arrays = dict(saved)
    except (OSError, ValueError, EOFError) as error:
        what = f"the log-probabilities of the reference cannot be read: {error}"
        raise RunFailed(Problem(str(file), what, fix), STORAGE) from error
    if str(arrays.pop("identity", "")) != identity:
        raise RunFailed(Problem(str(file), "the log-probabilities of the reference are of other data", fix), STORAGE)
    return [arrays[f"arr_{number}"] for number in range(len(arrays))]
