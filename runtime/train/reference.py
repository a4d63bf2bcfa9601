"""The reference of a DPO: the log-probabilities of all pairs by the weights that the run begins with.

They are computed once, before the first step, and saved in the run directory; a run that continues reads them. They
cost a forward pass over the pairs, and no memory: neither a second model nor a second pass in each step.
"""

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.compiler.sharding.batch import REFERENCE
from meshloom.compiler.xla.programs import Programs, build, lower

from ..core.failures import STORAGE, RunFailed
from ..core.files import replace_bytes
from ..data import Data
from ..processes.distributed import Processes
from ..processes.process_log import announce
from .feed import in_token_order, local_rows, sequences_of, to_devices

FILE = "reference.npz"


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
