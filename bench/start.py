"""From a command to its answer, in processor seconds, and from a command to the first step, in parts. Medians.

    python bench/start.py [repeats] [override ...]

Each start is a process. A first start finds an empty cache of compiled programs, a second what the first one left.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time

COMMANDS = ("train --help", "runs", "explain sharding=fsd", "explain")  # the third is refused
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
    from meshloom.runtime.compile.compile_cache import cached_compilation
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


def processor_seconds(command: str) -> float:
    """Returns what a command takes in an empty directory, without what the system does for it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with tempfile.TemporaryDirectory() as empty:
        subprocess.run([sys.executable, "-m", "meshloom", *command.split()], cwd=empty, capture_output=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def main() -> None:
    repeats, overrides = int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2:]
    print(f"processor seconds, medians of {repeats}")
    for command in COMMANDS:
        print(f"{command:24}{statistics.median(processor_seconds(command) for _ in range(repeats)):14.2f}", flush=True)
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
