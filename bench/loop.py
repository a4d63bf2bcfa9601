"""Measures what the loop costs over a bare loop on the same compiled step: interleaved pairs of runs, medians.

    python bench/loop.py [pairs] [override ...]

The bare loop fetches the batch, puts it on the devices, calls the step, and reads nothing until its end. Ours also
reads each step's metrics, writes metrics.jsonl and TensorBoard, and shows them. No evaluation, no checkpoint.
"""

import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

import meshloom
from meshloom.compiler.core.console import Console
from meshloom.compiler.xla.programs import build, lower
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.stop import StopRequest
from meshloom.runtime.train.loop import TrainingLoop, add_observers
from meshloom.runtime.train.metrics import Stopwatch
from meshloom.runtime.train.observer import ObservedRun, Observers
from meshloom.runtime.train.train import prepare

NUM_STEPS = 200
OVERRIDES = (
    "target=cpu-1", "sharding=ddp", "model.num_layers=2", "global_batch_size=4", "sequence_length=128",
    "data=synthetic", "checkpoint=disabled", f"num_steps={NUM_STEPS}", "evaluation.every_num_steps=1000000",
)  # fmt: skip


def measure(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds per step, by the clock and of this thread's own work."""
    start, own = time.perf_counter(), time.thread_time()
    run()
    return (time.perf_counter() - start) / NUM_STEPS, (time.thread_time() - own) / NUM_STEPS


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    job = prepare(meshloom.compose(*OVERRIDES, *sys.argv[2:]))
    plan, train = job.plan, job.data["train"]
    programs = build(lower(plan, plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])))
    console = Console(io.StringIO())

    def bare() -> None:
        state, batches, metrics = programs["init"](), iter(train), None
        for _ in range(NUM_STEPS):
            batch = next(batches)
            placed = {name: jax.device_put(batch[name], x.sharding) for name, x in programs.batch.items()}
            state, metrics = programs["train"](state, placed)
        jax.block_until_ready((state, metrics))

    def ours() -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            StopRequest(Processes()) as stop,
            Checkpoints(Path(folder), plan.spec) as checkpoints,
            Observers(Stopwatch(time.time())) as observers,
        ):
            run = ObservedRun(plan, programs, job.data, Path(folder), Processes(), console, observers, first_step=0)
            add_observers(run)
            loop = TrainingLoop(
                plan,
                programs,
                batches=iter(train),
                held_out=[],
                checkpoints=checkpoints,
                stop=stop,
                observers=observers,
            )
            loop._evaluate = lambda step, state: float("nan")  # the last step is always evaluated: not here
            loop.run(programs["init"](), 0)

    bare()
    ours()
    results = [(measure(bare), measure(ours)) if i % 2 else (measure(ours), measure(bare))[::-1] for i in range(pairs)]
    for name, which in (("bare", 0), ("ours", 1)):
        clock, own = (statistics.median(pair[which][kind] for pair in results) * 1e3 for kind in (0, 1))
        print(f"{name}: {clock:.2f} ms a step by the clock, {own:.2f} ms of it this thread's own work")
    ratios = sorted(mine[0] / base[0] - 1 for base, mine in results)
    difference = statistics.median(mine[1] - base[1] for base, mine in results) * 1e3
    print(f"ours over bare: {statistics.median(ratios):+.1%} by the clock "
          f"({ratios[len(ratios) // 4]:+.1%}..{ratios[-1 - len(ratios) // 4]:+.1%}, middle half of {pairs} pairs), "
          f"{difference:+.2f} ms of own work")  # fmt: skip


if __name__ == "__main__":
    main()
