"""How long `meshloom --help` and `explain` of the largest model take, and how much memory, against importing JAX alone.

    python bench/explain.py [repeats]

Runs all, interleaved, in fresh processes; prints medians and spread.
"""

import os
import statistics
import subprocess
import sys
import time

EXPLAIN = "from meshloom.runtime.cli import run; run(['explain', 'model=llama3_405b', 'target=cpu-4096', 'global_batch_size=4096'])"  # noqa: E501
HELP = "from meshloom.runtime.cli import run; run(['--help'])"
CASES = {
    "meshloom --help": HELP,
    "import jax, flax": "import jax, flax.nnx",
    "explain llama3_405b, 4,096 devices": EXPLAIN,
}


def measure(code: str) -> tuple[float, float]:
    """Seconds from start to exit of a process, and its peak memory in MB."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return time.perf_counter() - start, usage.ru_maxrss / 1000


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    results = {name: [] for name in CASES}
    for _ in range(repeats):
        for name, code in CASES.items():
            results[name].append(measure(code))
    for name, runs in results.items():
        seconds = sorted(s for s, _ in runs)
        print(
            f"{name:36} median {statistics.median(seconds):.2f} s ({seconds[0]:.2f}..{seconds[-1]:.2f}), "
            f"peak {max(m for _, m in runs):.0f} MB, {repeats} runs"
        )


if __name__ == "__main__":
    main()
