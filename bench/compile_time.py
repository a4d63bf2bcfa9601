"""Measures where the time of `meshloom compile` goes, and the most memory that its process takes.

    python bench/compile_time.py [repeats] [override ...]

Each compile is a process of its own and does what the command does, from the overrides to the report; nothing is kept
between them. Medians; memory: the largest.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

PARTS = ("python", "import", "config", "plan", "devices", "trace", "lower", "compile", "serialise, as text", "estimate",
         "parse and simulate", "report")  # fmt: skip
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/backend_compile_duration": "compile",
}


def compile_once(began: float, overrides: list[str]) -> dict[str, float]:
    """Seconds of each part, and `memory`, the most bytes that this process held."""
    seconds: dict[str, float] = defaultdict(float)
    last = began

    def done(part: str, without: float = 0.0) -> None:
        nonlocal last
        now = time.time()
        seconds[part] += now - last - without
        last = now

    done("python")
    from pathlib import Path

    import jax

    from meshloom import compose
    from meshloom.compiler.analysis.compiled_step import CompiledStep, read_text
    from meshloom.compiler.driver import plan_run, report_of
    from meshloom.compiler.estimate.estimate import estimate_step
    from meshloom.compiler.target.topology import find_devices
    from meshloom.compiler.xla.aot import compile_ahead, lower_ahead
    from meshloom.runtime.processes.devices import plan_without_devices, start_devices
    from meshloom.runtime.processes.distributed import Processes
    from meshloom.runtime.rundir.run_dir import write_report

    done("import")
    spec = compose(*overrides)
    done("config")
    if spec.target.kind == "cpu":
        start_devices(spec.target, Processes())
    else:
        plan_without_devices(spec.target)
    plan = plan_run(spec)
    done("plan")
    devices = find_devices(spec.target, plan.target)
    mesh = plan.mesh.of_devices(devices)
    done("devices")

    def count(event: str, duration_secs: float, **_: str | int) -> None:
        if part := EVENTS.get(event):
            seconds[part] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(count)
    lowered = lower_ahead(plan, mesh)
    seconds["lower"] = 0.0  # with what is done beside JAX's own events
    done("lower", without=seconds["trace"])
    built = compile_ahead(lowered)
    done("serialise, as text", without=seconds["compile"])
    estimate = estimate_step(plan)
    done("estimate")
    schedule, peak = read_text(built.text, plan, estimate.communication)
    done("parse and simulate")
    step = CompiledStep(plan, estimate, lowered, built, schedule, peak)
    with tempfile.TemporaryDirectory() as folder:
        write_report(report_of(step, overrides=tuple(overrides)), plan, Path(folder), events=step.analysis.events)
    done("report")
    return {**seconds, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main() -> None:
    repeats, overrides = int(sys.argv[1]) if len(sys.argv) > 1 else 3, sys.argv[2:]
    runs = []
    for _ in range(repeats):
        line = [sys.executable, __file__, "--one", str(time.time()), *overrides]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{' '.join(overrides) or 'defaults'}: seconds, medians of {repeats}")
    for part in PARTS:
        print(f"  {part:22}{statistics.median(run.get(part, 0.0) for run in runs):8.2f}")
    totals = [sum(run.get(part, 0.0) for part in PARTS) for run in runs]
    own = [total - run.get("compile", 0.0) for total, run in zip(totals, runs, strict=True)]
    print(f"  {'all':22}{statistics.median(totals):8.2f}, without XLA {statistics.median(own):.2f}")
    print(f"  {'peak memory':22}{max(run['memory'] for run in runs) / 2**30:8.2f} GiB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(compile_once(float(sys.argv[2]), sys.argv[3:])))
    else:
        main()
