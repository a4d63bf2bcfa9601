"""From a command to its answer, in seconds of processor time and MB, and from a command to the first step, in parts.

    python bench/start.py [repeats] [override ...]

Each start is a process. A first start finds an empty cache of compiled programs, a second what the first one left.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

REFUSED = "explain sharding=fsd"
COMMANDS = (
    "train --help",
    "runs",
    REFUSED,
    "explain",
    "explain model=llama3_405b target=cpu-4096 global_batch_size=4096",
    "explain model=llama3_8b target=v5p-128 sharding=fsdp_tensor mesh.tensor=8 global_batch_size=8"
    " sequence_length=1048576",
)
PARTS = ("python", "import", "compose and plan", "data", "trace and lower", "compile or load", "first step")


def start(began: float, cache: str, overrides: list[str]) -> dict[str, float]:
    """Do what `meshloom train` does, up to the first step; seconds of each part."""
    seconds, last = {}, began

    def done(part: str) -> None:
        nonlocal last
        now = time.time()
        seconds[part], last = now - last, now

    done("python")
    import jax

    from meshloom import compose
    from meshloom.compiler.driver import plan_run
    from meshloom.compiler.xla.programs import build, lower
    from meshloom.runtime.compile.artifact import cached_compilation
    from meshloom.runtime.data import open_data
    from meshloom.runtime.processes.devices import start_devices
    from meshloom.runtime.processes.distributed import Processes

    done("import")
    spec = compose(*overrides)
    start_devices(spec.target, Processes())
    plan = plan_run(spec)
    done("compose and plan")
    batches = iter(open_data(spec)["train"])
    done("data")
    with cached_compilation(cache):
        lowered = lower(plan, plan.mesh.of_devices(jax.devices()[: plan.target.num_devices]))
        done("trace and lower")
        programs = build(lowered)
        done("compile or load")
    batch = {name: jax.device_put(x, programs.batch[name].sharding) for name, x in next(batches).items()}
    jax.block_until_ready(programs["train"](programs["init"](), batch))
    done("first step")
    return seconds


def measure(cache: str, overrides: list[str]) -> dict[str, float]:
    line = [sys.executable, __file__, "--one", str(time.time()), cache, *overrides]
    return json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def run(command: str) -> tuple[float, float]:
    """Returns the processor seconds of a command in an empty directory, without those of the system, and its MB. Raises
    RuntimeError if it fails, or if the line that is to be refused does not."""
    line, nowhere = [sys.executable, "-m", "meshloom", *command.split()], subprocess.DEVNULL
    with tempfile.TemporaryDirectory() as empty:
        process = subprocess.Popen(line, cwd=empty, stdout=nowhere, stderr=nowhere)
        _, status, usage = os.wait4(process.pid, 0)
    if (os.waitstatus_to_exitcode(status) == 0) == (command == REFUSED):
        raise RuntimeError(f"exit code {os.waitstatus_to_exitcode(status)}: meshloom {command}")
    return usage.ru_utime, usage.ru_maxrss / 1000


def main() -> None:
    repeats, overrides = int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2:]
    print(f"processor seconds, medians of {repeats}, and peak memory")
    for command in COMMANDS:
        runs = [run(command) for _ in range(repeats)]
        seconds, size = statistics.median(seconds for seconds, _ in runs), max(size for _, size in runs)
        print(f"{seconds:8.2f} s{size:8.0f} MB   {command}", flush=True)
    print()
    starts: dict[str, list[dict[str, float]]] = {"first": [], "second": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            for kind in starts:
                starts[kind].append(measure(cache, overrides))
    print(f"{'seconds, medians of ' + str(repeats):24}{'first start':>14}{'second start':>14}")
    for part in (*PARTS, "all"):
        of = {kind: [sum(one.values()) if part == "all" else one[part] for one in starts[kind]] for kind in starts}
        first, second = (statistics.median(of[kind]) for kind in starts)
        print(f"{part:24}{first:14.2f}{second:14.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(start(float(sys.argv[2]), sys.argv[3], sys.argv[4:])))
    else:
        main()
