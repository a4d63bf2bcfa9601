"""Measures the time and memory of `meshloom --help` and of `explain` of the largest model and the longest sequence,
against importing JAX alone.

    python bench/explain.py [repeats]

Runs all, interleaved, in fresh processes; prints medians and spread of seconds and of processor seconds.
"""

import os
import statistics
import subprocess
import sys
import time

EXPLAIN = "from meshloom.runtime.cli.main import run; run(['explain', 'model=llama3_405b', 'target=cpu-4096', 'global_batch_size=4096'])"  # noqa: E501
LONG = "from meshloom.runtime.cli.main import run; run(['explain', 'model=llama3_8b', 'target=v5p-128', 'sharding=fsdp_tensor', 'mesh.tensor=8', 'global_batch_size=8', 'sequence_length=1048576'])"  # noqa: E501
HELP = "from meshloom.runtime.cli.main import run; run(['--help'])"
CASES = {
    "meshloom --help": HELP,
    "import jax, flax": "import jax, flax.nnx",
    "explain llama3_405b, 4,096 devices": EXPLAIN,
    "explain llama3_8b, 1,048,576 tokens": LONG,
}


def measure(code: str) -> tuple[float, float, float]:
    """Seconds from start to exit of a process, processor seconds, and its peak memory in MB."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    results = {name: [] for name in CASES}
    for _ in range(repeats):
        for name, code in CASES.items():
            results[name].append(measure(code))
    for name, runs in results.items():
        seconds = sorted(s for s, _, _ in runs)
        print(
            f"{name:36} median {statistics.median(seconds):.2f} s ({seconds[0]:.2f}..{seconds[-1]:.2f}), "
            f"processor {statistics.median(p for _, p, _ in runs):.2f} s, peak {max(m for *_, m in runs):.0f} MB, "
            f"{repeats} runs"
        )


if __name__ == "__main__":
    main()
